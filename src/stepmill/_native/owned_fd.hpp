// A descriptor and its one owner. Knows no Python.
#pragma once

#include <atomic>

#include <unistd.h>

namespace stepmill {

// Owns one descriptor, or none. It is closed once: by close(), from any thread and however often, or by the destructor.
// Reading the number and closing at the same time are the caller's to keep apart.
class OwnedFd {
   public:
    static constexpr int NONE = -1;

    OwnedFd() noexcept = default;
    explicit OwnedFd(int fd) noexcept : fd_(fd < 0 ? NONE : fd) {}
    ~OwnedFd() { close(); }
    OwnedFd(OwnedFd&& other) noexcept : fd_(other.release()) {}
    OwnedFd(const OwnedFd&) = delete;
    OwnedFd& operator=(OwnedFd&&) = delete;
    OwnedFd& operator=(const OwnedFd&) = delete;

    int number() const noexcept { return fd_.load(); }  // NONE once it is closed or released

    // Gives the descriptor away: the caller owns it.
    int release() noexcept { return fd_.exchange(NONE); }

    void close() noexcept {
        const int fd = release();
        if (fd >= 0) ::close(fd);  // not again after EINTR: Linux has closed it
    }

   private:
    std::atomic<int> fd_{NONE};
};

}  // namespace stepmill
