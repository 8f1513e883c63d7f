// A file descriptor with exactly one owner. Needs no Python.
#pragma once

#include <atomic>

#include <unistd.h>

namespace stepmill {

// Owns one descriptor, or none. The descriptor is closed once: by close(), from any thread, or by the destructor. The caller must not
// use the number while another thread closes it.
class OwnedFd {
   public:
    static constexpr int NONE = -1;

    OwnedFd() noexcept = default;
    explicit OwnedFd(int fd) noexcept : fd_(fd < 0 ? NONE : fd) {}
    ~OwnedFd() { close(); }
    OwnedFd(OwnedFd&& other) noexcept : fd_(other.release()) {}
    OwnedFd(const OwnedFd&) = delete;
    OwnedFd& operator=(const OwnedFd&) = delete;
    OwnedFd& operator=(OwnedFd&& other) noexcept {
        close();
        fd_.store(other.release());
        return *this;
    }

    int number() const noexcept { return fd_.load(); }  // NONE after close() or release()

    // Transfers the descriptor to the caller.
    int release() noexcept { return fd_.exchange(NONE); }

    void close() noexcept {
        const int fd = release();
        if (fd >= 0) ::close(fd);  // no retry after EINTR: Linux has closed it
    }

   private:
    std::atomic<int> fd_{NONE};
};

}  // namespace stepmill
