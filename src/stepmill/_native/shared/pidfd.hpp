// Descriptors of processes. Direct system calls, since Pythons and C libraries built with old kernel headers lack these functions.
#pragma once

#include <cerrno>
#include <csignal>

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424  // the same number on all architectures
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace stepmill {

// Returns a close-on-exec descriptor that polls readable after the process has ended, or -1 with errno set.
inline int open_pidfd(pid_t pid) noexcept { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

// Returns 0, or an errno: ESRCH after the process has ended.
[[nodiscard]] inline int signal_pidfd(int pidfd, int signal) noexcept {
    return syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0) == 0 ? 0 : errno;
}

}  // namespace stepmill
