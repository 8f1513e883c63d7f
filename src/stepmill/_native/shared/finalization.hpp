// The end of the program: Python runs the exit functions (atexit), then finalizes the interpreter. Daemon threads keep running meanwhile.
#pragma once

#include <atomic>

#include <Python.h>

namespace stepmill {

// Ident of the thread that runs the exit functions, which close all open pools; 0 before that.
inline std::atomic<unsigned long> exiting_thread{0};

inline void begin_exit() noexcept { exiting_thread.store(PyThread_get_thread_ident(), std::memory_order_release); }
inline bool is_exiting() noexcept { return exiting_thread.load(std::memory_order_acquire) != 0; }

// Whether the calling thread is a daemon thread that still runs while the program ends.
inline bool is_left_over() noexcept { return is_exiting() && exiting_thread.load(std::memory_order_acquire) != PyThread_get_thread_ident(); }

}  // namespace stepmill
