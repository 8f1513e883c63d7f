// A thread that says so when an env of a kernel does not come back: nobody can end it, and the program hangs. Knows no Python.
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
    // name: of the kernel. Once an env is in one call for `limit_ns` a line on stderr names it, once.
    KernelWatch(std::shared_ptr<const KernelEnvs> envs, std::string name, std::uint64_t limit_ns);
    ~KernelWatch();
    KernelWatch(const KernelWatch&) = delete;
    KernelWatch& operator=(const KernelWatch&) = delete;

   private:
    struct Seen {
        std::uint32_t env = NO_SERVER, num_begun = 0;
        std::uint64_t since_ns = 0;
        bool is_told = false;
    };
    static void* run_thread(void* watch);
    void run() noexcept;
    void look(const KernelProgress& progress, Seen& seen, std::uint64_t now) const noexcept;

    const std::shared_ptr<const KernelEnvs> envs_;
    const std::string name_;
    const std::uint64_t limit_ns_;
    std::vector<Seen> seen_;  // by thread of the kernel
    Word is_ended_{0};
    pthread_t thread_{};
    pid_t pid_;
};

}  // namespace stepmill
