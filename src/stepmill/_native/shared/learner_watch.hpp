// Ends a worker when its learner has ended, whatever its envs are doing: a native thread watches the learner's pidfd.
#pragma once

#include <cerrno>
#include <cstdint>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "shared/native_thread.hpp"

namespace stepmill {

inline constexpr int EXIT_LEARNER_GONE = 66;  // exit status of a worker whose learner has ended

inline void* wait_and_exit(void* argument) {
    const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(argument));
    pollfd learner{fd, POLLIN, 0};
    // A pidfd becomes readable when its process has ended. An error on it must not kill the worker.
    while (poll(&learner, 1, -1) < 0 && errno == EINTR) {
    }
    if ((learner.revents & POLLIN) != 0) _exit(EXIT_LEARNER_GONE);
    close(fd);
    return nullptr;
}

// Starts a detached thread (all signals blocked, small stack) that waits until the process behind `pidfd` ends, and then calls
// _exit(EXIT_LEARNER_GONE). It uses a duplicate: the caller keeps `pidfd`. A forked child does not inherit the thread, so each process
// calls this function itself. Returns 0, or an errno if no thread was started.
[[nodiscard]] inline int watch_parent(int pidfd) {
    const int fd = fcntl(pidfd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return errno;
    pthread_t thread{};
    const int error = start_native_thread(thread, &wait_and_exit, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)));
    if (error != 0) {
        close(fd);
        return error;
    }
    pthread_detach(thread);
    return 0;
}

}  // namespace stepmill
