// Forks of this process. A copy of it that has our objects is not who they belong to.
#pragma once

#include <atomic>
#include <cstdint>

#include <pthread.h>

#include <nanobind/nanobind.h>

namespace stepmill {

constexpr int EXIT_STRAY_COPY = 67;  // exit status of a process that an env forked, and that came back from the env

inline std::atomic<std::uint32_t> fork_count{0};  // how many forks lie between the process that began to watch and this one

inline std::uint32_t watch_forks() noexcept {
    static const int once = pthread_atfork(nullptr, nullptr, [] {
        fork_count.fetch_add(1);
        nanobind::set_leak_warnings(false);  // a child may end while frames of its parent's still hold pools
    });
    static_cast<void>(once);
    return fork_count.load();
}

}  // namespace stepmill
