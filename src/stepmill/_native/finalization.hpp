// The end of the program: exit functions run (atexit), and then the interpreter is finalized. Daemon threads run on meanwhile.
#pragma once

#include <atomic>

#include <Python.h>

namespace stepmill {

// Ident of the thread that runs the program's exit functions, which close the pools that are left; 0: they do not run yet.
inline std::atomic<unsigned long> exiting_thread{0};

inline void begin_exit() noexcept { exiting_thread.store(PyThread_get_thread_ident(), std::memory_order_release); }
inline bool is_exiting() noexcept { return exiting_thread.load(std::memory_order_acquire) != 0; }

// Whether the calling thread is a daemon thread that still runs while the program ends.
inline bool is_left_over() noexcept { return is_exiting() && exiting_thread.load(std::memory_order_acquire) != PyThread_get_thread_ident(); }

}  // namespace stepmill
