// Threads that run the envs of a kernel, and the queue from which they take env numbers. Knows neither Python nor the envs' memory.
//
//     the pool's thread   push(), wake(), run_chunk(), wait_finished()
//     the other threads   run_chunk() in a loop; if nothing is queued, they spin for a moment and then sleep
//
// An env is queued at most once at a time. The thread that takes an env from the queue runs it and counts it as finished.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <pthread.h>

#include "shared/protocol.hpp"

namespace stepmill {

// One producer, any number of consumers. Positions only grow; a place of the ring is reused when its position has been taken.
class KernelQueue {
   public:
    explicit KernelQueue(std::uint32_t num_envs) : places_(std::bit_ceil(std::max(num_envs, 1u))), mask_(places_.size() - 1) {}

    void push(std::span<const std::uint32_t> envs) noexcept {
        std::uint64_t head = head_.load(std::memory_order_relaxed);
        for (const std::uint32_t env : envs) places_[head++ & mask_].store(env, std::memory_order_relaxed);
        head_.store(head, std::memory_order_release);
    }

    // Takes at most `max` envs, longest-waiting first. Reads the places before it claims them: the producer does not reuse them until the
    // claim succeeds.
    std::uint32_t take(std::uint32_t* envs, std::uint32_t max) noexcept {
        std::uint64_t tail = tail_.load(std::memory_order_acquire);
        for (;;) {
            const std::uint64_t queued = head_.load(std::memory_order_acquire) - tail;
            const auto num = static_cast<std::uint32_t>(std::min<std::uint64_t>(queued, max));
            if (num == 0) return 0;
            for (std::uint32_t i = 0; i < num; ++i) envs[i] = places_[(tail + i) & mask_].load(std::memory_order_relaxed);
            if (tail_.compare_exchange_weak(tail, tail + num, std::memory_order_acq_rel)) return num;
        }
    }

    std::uint32_t size() const noexcept {
        const std::uint64_t tail = tail_.load(std::memory_order_acquire);
        return static_cast<std::uint32_t>(head_.load(std::memory_order_acquire) - tail);
    }

   private:
    std::vector<std::atomic<std::uint32_t>> places_;
    std::uint64_t mask_;
    alignas(CACHE_LINE) std::atomic<std::uint64_t> head_{0};
    alignas(CACHE_LINE) std::atomic<std::uint64_t> tail_{0};
};

// Envs 0 … num-1, of which threads take parts. `next` and `end` are one word, so that a thread takes a part only of the range that it read.
class KernelRange {
   public:
    void begin(std::uint32_t num) noexcept { places_.store(num, std::memory_order_release); }
    std::uint32_t size() const noexcept {
        const std::uint64_t places = places_.load(std::memory_order_acquire);
        return end_of(places) - next_of(places);
    }
    // Returns how many envs were taken, from `first` on.
    std::uint32_t take(std::uint32_t& first, std::uint32_t max) noexcept {
        std::uint64_t places = places_.load(std::memory_order_acquire);
        for (;;) {
            first = next_of(places);
            const std::uint32_t num = std::min(end_of(places) - first, max);
            if (num == 0) return 0;
            const std::uint64_t rest = std::uint64_t{first + num} << 32 | end_of(places);
            if (places_.compare_exchange_weak(places, rest, std::memory_order_acq_rel)) return num;
        }
    }

   private:
    static std::uint32_t next_of(std::uint64_t places) noexcept { return static_cast<std::uint32_t>(places >> 32); }
    static std::uint32_t end_of(std::uint64_t places) noexcept { return static_cast<std::uint32_t>(places); }

    alignas(CACHE_LINE) std::atomic<std::uint64_t> places_{0};
};

// What the threads run. The object lives as long as any of them.
class KernelWork {
   public:
    virtual ~KernelWork() = default;
    // runner: the number of the calling thread; 0 is the pool's thread.
    virtual void run(std::span<const std::uint32_t> envs, std::uint32_t runner) noexcept = 0;  // envs taken from the queue
    virtual void run_range(std::uint32_t first, std::uint32_t num, std::uint32_t runner) noexcept = 0;
};

struct KernelThreadsPlan {
    std::uint32_t num_envs = 0;
    std::uint32_t num_threads = 0;    // without the pool's thread
    std::vector<int> cores;           // cores that the threads may use; empty: all
    std::uint64_t spin_ns = 0;        // how long a thread spins before it sleeps
};

// push, push_all, wake, run_chunk, wait_finished and stop are called by the pool's thread only.
class KernelThreads {
   public:
    static constexpr std::uint32_t MAX_CHUNK = 512;
    static constexpr std::uint64_t CHUNK_NS = 4'000;    // a chunk takes about this long: much longer than taking it from the queue
    static constexpr std::uint64_t HANDOVER_NS = 8'000;  // shorter work is done before a sleeping thread has woken

    KernelThreads(std::shared_ptr<KernelWork> work, KernelThreadsPlan plan);
    ~KernelThreads() { stop(0); }
    KernelThreads(const KernelThreads&) = delete;
    KernelThreads& operator=(const KernelThreads&) = delete;

    void push(std::span<const std::uint32_t> envs);
    void push_all(std::uint32_t num_envs);           // as a range; nothing else may be queued or run
    void wake() noexcept;
    std::uint32_t run_chunk() noexcept;              // how many envs were run: 0 if none was queued
    std::uint32_t num_queued() const noexcept;
    std::uint32_t num_finished() const noexcept;     // since the constructor; wraps
    bool has_work() const noexcept { return num_pushed_ != num_finished(); }
    bool wait_finished(std::uint32_t seen, std::uint64_t timeout_ns) noexcept;  // false: num_finished() still is `seen`
    std::uint64_t queued_ns() const noexcept;        // how long one thread would take for what is queued
    std::uint64_t needed_ns(std::uint32_t num_envs) const noexcept;  // or for `num_envs` envs
    std::uint32_t num_threads() const noexcept { return static_cast<std::uint32_t>(threads_.size()); }
    bool stop(std::uint64_t timeout_ns) noexcept;    // false: a thread is still in an env; it is not joined

   private:
    struct Shared;
    static void* run_thread(void* argument);

    std::shared_ptr<Shared> shared_;
    std::vector<pthread_t> threads_;
    std::uint32_t num_pushed_ = 0;
    pid_t pid_;
};

}  // namespace stepmill
