// What depends on the operating system: futex, clock, CPU pause. Linux only; a port replaces this file.
// Needs no Python.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace stepmill {

inline std::uint64_t now_ns() noexcept {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}

// Returns a duration that was given in seconds; the longest one is 31 years.
inline std::uint64_t to_ns(double seconds) noexcept { return static_cast<std::uint64_t>(std::clamp(seconds, 0.0, 1e9) * 1e9); }

inline void cpu_pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

inline void yield_core() noexcept { sched_yield(); }

// Populates fresh pages with one call, which is much cheaper than one page fault each. Does nothing on kernels that lack it.
inline void prefault(void* memory, std::size_t bytes) noexcept {
    constexpr int POPULATE_WRITE = 23;  // Linux 5.14; older headers do not define it
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
    const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, POPULATE_WRITE);
}

// Returns the resident memory of this process, or 0 if it cannot be read.
inline std::uint64_t resident_bytes() noexcept {
    char text[128] = {};
    const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return 0;
    char* rest = nullptr;
    std::strtoull(text, &rest, 10);  // the size of the address space comes first
    return std::strtoull(rest, nullptr, 10) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

enum class Woken { RUNG, TIMED_OUT, SIGNAL };

// Sleeps while *word == expected, at most timeout_ns. The word is in memory shared between processes.
inline Woken futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::uint64_t timeout_ns) noexcept {
    timespec time{static_cast<time_t>(timeout_ns / 1'000'000'000u), static_cast<long>(timeout_ns % 1'000'000'000u)};
    const long result = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &time, nullptr, 0);
    if (result == 0 || errno == EAGAIN) return Woken::RUNG;
    return errno == EINTR ? Woken::SIGNAL : Woken::TIMED_OUT;
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Waits until the word is 0, at most timeout_ns. Looks at it every slice_ns, because the thread that clears it may not see the waiter and
// then wakes nobody. Returns whether the word is 0.
inline bool wait_until_zero(std::atomic<std::uint32_t>& word, std::uint64_t timeout_ns, std::uint64_t slice_ns) noexcept {
    const std::uint64_t began = now_ns();
    for (;;) {
        const std::uint32_t value = word.load(std::memory_order_seq_cst);
        if (value == 0) return true;
        const std::uint64_t spent = now_ns() - began;
        if (spent >= timeout_ns) return false;
        futex_wait(word, value, std::min(slice_ns, timeout_ns - spent));
    }
}

// Makes an eventfd readable. Never waits: a full counter is readable as it is.
inline void set_event(int eventfd) noexcept { eventfd_write(eventfd, 1); }

inline void clear_event(int eventfd) noexcept {
    eventfd_t count = 0;
    eventfd_read(eventfd, &count);
}

}  // namespace stepmill
