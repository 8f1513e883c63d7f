// Native threads that run no signal handlers: signals are left to the threads of Python.
#pragma once

#include <cerrno>
#include <csignal>
#include <cstddef>

#include <pthread.h>

namespace stepmill {

// Starts `body(argument)` with all signals blocked and a small stack. Returns 0, or an errno if no thread was started.
[[nodiscard]] inline int start_native_thread(pthread_t& thread, void* (*body)(void*), void* argument) noexcept {
    constexpr std::size_t STACK_BYTES = 256 * 1024;
    pthread_attr_t attributes;
    if (const int error = pthread_attr_init(&attributes); error != 0) return error;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);

    // A new thread inherits the signal mask of its creator, so no signal can reach it before it blocks them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, &attributes, body, argument);
    // Thread-local storage is part of the stack: libraries with much of it need the default size.
    if (error == EINVAL) error = pthread_create(&thread, nullptr, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    return error;
}

}  // namespace stepmill
