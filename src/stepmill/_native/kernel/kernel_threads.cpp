#include "kernel/kernel_threads.hpp"

#include <system_error>

#include <unistd.h>

#include "shared/native_thread.hpp"

namespace stepmill {

// The state that the threads share. The last thread frees it, even a thread that stop() has not joined.
struct KernelThreads::Shared {
    Shared(std::shared_ptr<KernelWork> of, const KernelThreadsPlan& plan) : work(std::move(of)), queue(plan.num_envs), spin_ns(plan.spin_ns), cores(plan.cores), num_runners(plan.num_threads + 1) {}

    std::uint32_t run_chunk(std::uint32_t runner) noexcept;
    std::uint32_t take_and_run(std::uint32_t max, std::uint32_t runner) noexcept;
    std::uint32_t size() const noexcept { return range.size() + queue.size(); }
    void run(std::uint32_t runner) noexcept;
    void rest(std::uint32_t seen, SpinPolicy& spin_policy) noexcept;
    void pin() const noexcept;

    const std::shared_ptr<KernelWork> work;
    KernelQueue queue;
    KernelRange range;
    const std::uint64_t spin_ns;
    const std::vector<int> cores;
    const std::uint32_t num_runners;
    std::atomic<float> env_ns{1'000.0f};             // how long one env takes: a moving average
    alignas(CACHE_LINE) Word bell{0};                // the threads sleep on it
    std::atomic<std::uint32_t> num_parked{0};
    std::atomic<bool> is_stopped{false};
    alignas(CACHE_LINE) Word num_finished{0};        // the pool's thread sleeps on it
    Word is_pool_parked{0};
    std::atomic<std::uint32_t> num_started{0};
    Word num_running{0};                             // threads that have not ended; stop() sleeps on it
};

std::uint32_t KernelThreads::Shared::take_and_run(std::uint32_t max, std::uint32_t runner) noexcept {
    std::uint32_t first = 0;
    if (const std::uint32_t num = range.take(first, max); num != 0) {
        work->run_range(first, num, runner);
        return num;
    }
    std::uint32_t envs[MAX_CHUNK];
    const std::uint32_t num = queue.take(envs, std::min(max, MAX_CHUNK));
    if (num != 0) work->run({envs, num}, runner);
    return num;
}

std::uint32_t KernelThreads::Shared::run_chunk(std::uint32_t runner) noexcept {
    const float each_ns = env_ns.load(std::memory_order_relaxed);
    // Chunks become smaller as the queue empties, so that all threads finish at about the same time.
    const auto fitting = static_cast<std::uint32_t>(static_cast<float>(CHUNK_NS) / std::max(each_ns, 1.0f)) + 1;
    const auto fair = std::max(size() / (2 * num_runners), std::min(fitting, 15u)) + 1;
    const std::uint64_t began = now_ns();
    const std::uint32_t num = take_and_run(num_runners == 1 ? UINT32_MAX : std::min(fair, fitting), runner);
    if (num == 0) return 0;
    const auto spent = static_cast<float>(now_ns() - began) / static_cast<float>(num);
    env_ns.store(each_ns + (std::min(spent, 8 * each_ns) - each_ns) / 4, std::memory_order_relaxed);
    num_finished.fetch_add(num, std::memory_order_seq_cst);
    if (is_pool_parked.load(std::memory_order_seq_cst) != 0) futex_wake_all(num_finished);
    return num;
}

// No ring is missed: the bell is read before the queue, and num_parked is raised before the bell is read again.
void KernelThreads::Shared::run(std::uint32_t runner) noexcept {
    SpinPolicy spin_policy;
    for (;;) {
        const std::uint32_t seen = bell.load(std::memory_order_seq_cst);
        if (is_stopped.load(std::memory_order_acquire)) return;
        if (run_chunk(runner) == 0) rest(seen, spin_policy);
    }
}

void KernelThreads::Shared::rest(std::uint32_t seen, SpinPolicy& spin_policy) noexcept {
    constexpr std::uint64_t SLICE_NS = 1'000'000'000;
    const std::uint64_t began = now_ns();
    std::uint64_t lost_ns = 0;
    const bool is_rung = spin_policy.may_spin(spin_ns, began) && spin_while(bell, seen, began + spin_ns, lost_ns);
    while (!is_rung && bell.load(std::memory_order_acquire) == seen) {
        num_parked.fetch_add(1, std::memory_order_seq_cst);
        if (bell.load(std::memory_order_seq_cst) == seen) futex_wait(bell, seen, SLICE_NS);
        num_parked.fetch_sub(1, std::memory_order_seq_cst);
    }
    const std::uint64_t ended = now_ns();
    spin_policy.record_wait(ended - began, lost_ns, spin_ns, ended);
}

void KernelThreads::Shared::pin() const noexcept {
    if (cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) {
        if (core < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(core), &set);
    }
    sched_setaffinity(0, sizeof set, &set);
}

void* KernelThreads::run_thread(void* argument) {
    const std::unique_ptr<std::shared_ptr<Shared>> argument_owner(static_cast<std::shared_ptr<Shared>*>(argument));
    Shared& shared = **argument_owner;
    shared.pin();
    shared.run(1 + shared.num_started.fetch_add(1, std::memory_order_relaxed));
    shared.num_running.fetch_sub(1, std::memory_order_seq_cst);
    futex_wake_all(shared.num_running);
    return nullptr;
}

KernelThreads::KernelThreads(std::shared_ptr<KernelWork> work, KernelThreadsPlan plan) : shared_(std::make_shared<Shared>(std::move(work), plan)), pid_(getpid()) {
    for (std::uint32_t i = 0; i < plan.num_threads; ++i) {
        auto held = std::make_unique<std::shared_ptr<Shared>>(shared_);
        pthread_t thread{};
        shared_->num_running.fetch_add(1);
        if (const int error = start_native_thread(thread, run_thread, held.get()); error != 0) {
            shared_->num_running.fetch_sub(1);
            stop(UINT64_MAX);
            throw std::system_error(error, std::generic_category(), "a thread for kernels cannot be started");
        }
        static_cast<void>(held.release());  // the thread owns it now
        threads_.push_back(thread);
    }
}

void KernelThreads::push(std::span<const std::uint32_t> envs) {
    shared_->queue.push(envs);
    num_pushed_ += static_cast<std::uint32_t>(envs.size());
}

void KernelThreads::push_all(std::uint32_t num_envs) {
    num_pushed_ += num_envs;
    shared_->range.begin(num_envs);
}

void KernelThreads::wake() noexcept {
    shared_->bell.fetch_add(1, std::memory_order_seq_cst);
    if (shared_->num_parked.load(std::memory_order_seq_cst) != 0) futex_wake_all(shared_->bell);
}

std::uint32_t KernelThreads::run_chunk() noexcept { return shared_->run_chunk(0); }
std::uint32_t KernelThreads::num_queued() const noexcept { return shared_->size(); }
std::uint32_t KernelThreads::num_finished() const noexcept { return shared_->num_finished.load(std::memory_order_acquire); }

std::uint64_t KernelThreads::needed_ns(std::uint32_t num_envs) const noexcept {
    return static_cast<std::uint64_t>(shared_->env_ns.load(std::memory_order_relaxed) * static_cast<float>(num_envs));
}

std::uint64_t KernelThreads::queued_ns() const noexcept { return needed_ns(num_queued()); }

bool KernelThreads::wait_finished(std::uint32_t seen, std::uint64_t timeout_ns) noexcept {
    std::uint64_t lost_ns = 0;
    const std::uint64_t began = now_ns();
    if (spin_while(shared_->num_finished, seen, began + std::min(timeout_ns, 4 * CHUNK_NS), lost_ns)) return true;
    const std::uint64_t spent = now_ns() - began;
    if (spent >= timeout_ns) return false;
    park(shared_->num_finished, shared_->is_pool_parked, seen, timeout_ns - spent);
    return num_finished() != seen;
}

bool KernelThreads::stop(std::uint64_t timeout_ns) noexcept {
    if (getpid() != pid_) threads_.clear();  // a forked child has none of them
    if (threads_.empty()) return true;
    shared_->is_stopped.store(true, std::memory_order_release);
    wake();
    const bool have_ended = wait_until_zero(shared_->num_running, timeout_ns, 1'000'000'000);
    for (const pthread_t thread : threads_) have_ended ? pthread_join(thread, nullptr) : pthread_detach(thread);
    threads_.clear();
    return have_ended;
}

}  // namespace stepmill
