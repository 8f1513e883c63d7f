// A thread that reports envs of a kernel that do not return. They cannot be ended, so that the program hangs. Knows no Python.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <pthread.h>

#include "kernel_envs.hpp"

namespace stepmill {

// Made and ended by the pool's thread.
class KernelWatch {
   public:
    // name: of the kernel. Each call of an env that takes `limit_ns` is reported once, by a line on stderr.
    KernelWatch(std::shared_ptr<const KernelEnvs> envs, std::string name, std::uint64_t limit_ns);
    ~KernelWatch();
    KernelWatch(const KernelWatch&) = delete;
    KernelWatch& operator=(const KernelWatch&) = delete;

    // The env_id of the env that was reported last, or NO_SERVER. For any thread.
    std::uint32_t last_reported() const noexcept { return last_reported_.load(std::memory_order_relaxed); }

   private:
    struct Seen {
        std::uint32_t env = NO_SERVER, num_begun = 0;
        std::uint64_t since_ns = 0;
        bool is_reported = false;
    };
    static void* run_thread(void* watch);
    void run() noexcept;
    void check(const KernelProgress& progress, Seen& seen, std::uint64_t now) noexcept;

    const std::shared_ptr<const KernelEnvs> envs_;
    const std::string name_;
    const std::uint64_t limit_ns_;
    std::vector<Seen> seen_;  // by thread of the kernel
    Word is_ended_{0};
    Word last_reported_{NO_SERVER};
    pthread_t thread_{};
    pid_t pid_;
};

}  // namespace stepmill
