// Counts the forks of this process, so that a forked copy of our objects can be recognised.
#pragma once

#include <atomic>
#include <cstdint>

#include <pthread.h>

#include <nanobind/nanobind.h>

namespace stepmill {

constexpr int EXIT_FORKED_COPY = 67;  // exit status of a forked copy of a worker that returned from the env

inline std::atomic<std::uint32_t> fork_count{0};  // number of forks between the process that first called watch_forks() and this one

inline std::uint32_t watch_forks() noexcept {
    static const int once = pthread_atfork(nullptr, nullptr, [] {
        fork_count.fetch_add(1);
        nanobind::set_leak_warnings(false);  // a child may end while frames copied from its parent still hold pools
    });
    static_cast<void>(once);
    return fork_count.load();
}

}  // namespace stepmill
