#include "kernel_watch.hpp"

#include <cstdio>
#include <system_error>

#include <unistd.h>

#include "native_thread.hpp"

namespace stepmill {

KernelWatch::KernelWatch(std::shared_ptr<const KernelEnvs> envs, std::string name, std::uint64_t limit_ns)
    : envs_(std::move(envs)), name_(std::move(name)), limit_ns_(limit_ns), seen_(envs_->progress().size()), pid_(getpid()) {
    if (const int error = start_native_thread(thread_, run_thread, this); error != 0) throw std::system_error(error, std::generic_category(), "a thread for kernels cannot be started");
}

KernelWatch::~KernelWatch() {
    if (getpid() != pid_) return;  // a forked child has no such thread
    is_ended_.store(1, std::memory_order_seq_cst);
    futex_wake_all(is_ended_);
    pthread_join(thread_, nullptr);
}

void* KernelWatch::run_thread(void* watch) {
    static_cast<KernelWatch*>(watch)->run();
    return nullptr;
}

void KernelWatch::run() noexcept {
    while (is_ended_.load(std::memory_order_seq_cst) == 0) {
        futex_wait(is_ended_, 0, limit_ns_ / 4 + 1);
        const std::uint64_t now = now_ns();
        for (std::size_t thread = 0; thread < seen_.size(); ++thread) check(envs_->progress()[thread], seen_[thread], now);
    }
}

void KernelWatch::check(const KernelProgress& progress, Seen& seen, std::uint64_t now) noexcept {
    const std::uint32_t env = progress.env.load(std::memory_order_relaxed), num_begun = progress.num_begun.load(std::memory_order_relaxed);
    if (env == NO_SERVER || env != seen.env || num_begun != seen.num_begun) {
        seen = {env, num_begun, now, false};
        return;
    }
    if (seen.is_reported || now - seen.since_ns < limit_ns_) return;
    seen.is_reported = true;
    const std::uint32_t env_id = envs_->env_id(env);
    last_reported_.store(env_id, std::memory_order_relaxed);
    std::fprintf(stderr, "stepmill: env %u of the kernel %s has not returned for %.3g s (step_timeout_s), and compiled code cannot be ended; run it as Python to find out where it hangs\n", env_id, name_.c_str(), static_cast<double>(now - seen.since_ns) / 1e9);
}

}  // namespace stepmill
