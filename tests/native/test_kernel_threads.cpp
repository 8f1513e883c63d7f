// Kernel threads run each env that is queued once, in whatever order, and sleep in between.
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "kernel/kernel_threads.hpp"

using namespace stepmill;

namespace {

constexpr std::uint32_t NUM_ENVS = 300;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int NUM_ROUNDS = 2'000;
#else
constexpr int NUM_ROUNDS = 20'000;
#endif

// Plain counts: if two threads had the same env, or the pool's thread looked too early, it would be a race.
class Counts final : public KernelWork {
   public:
    void run(std::span<const std::uint32_t> envs, std::uint32_t) noexcept override {
        for (const std::uint32_t env : envs) ++runs[env];
    }
    void run_range(std::uint32_t first, std::uint32_t num, std::uint32_t) noexcept override {
        for (std::uint32_t env = first; env < first + num; ++env) ++runs[env];
    }
    std::vector<std::uint64_t> runs = std::vector<std::uint64_t>(NUM_ENVS);
};

KernelThreadsPlan plan(std::uint32_t num_threads, std::uint64_t spin_ns) {
    KernelThreadsPlan made;
    made.num_envs = NUM_ENVS;
    made.num_threads = num_threads;
    made.spin_ns = spin_ns;
    return made;
}

void finish(KernelThreads& threads, bool is_helping) {
    while (threads.has_work()) {
        const std::uint32_t seen = threads.num_finished();
        if (is_helping && threads.run_chunk() != 0) continue;
        if (threads.has_work()) threads.wait_finished(seen, 10'000'000);
    }
}

void each_env_of_a_range_is_run_once() {
    for (const std::uint32_t num_threads : {0u, 1u, 3u}) {
        const auto counts = std::make_shared<Counts>();
        KernelThreads threads(counts, plan(num_threads, 20'000));
        for (std::uint64_t round = 1; round <= NUM_ROUNDS / 10; ++round) {
            threads.push_all(NUM_ENVS);
            threads.wake();
            finish(threads, true);
            for (const std::uint64_t runs : counts->runs) CHECK(runs == round);
        }
        CHECK(threads.stop(UINT64_MAX));
    }
}

void envs_are_queued_again_while_others_run() {
    for (const std::uint64_t spin_ns : {0u, 50'000u}) {
        const auto counts = std::make_shared<Counts>();
        KernelThreads threads(counts, plan(2, spin_ns));
        std::vector<std::uint64_t> expected(NUM_ENVS);
        std::vector<std::uint32_t> all(NUM_ENVS), some;
        std::iota(all.begin(), all.end(), 0u);
        std::mt19937 random(1);
        for (int round = 0; round < NUM_ROUNDS / 20; ++round) {
            std::shuffle(all.begin(), all.end(), random);
            // Each env once: in parts, of which the next is pushed while the one before runs.
            for (std::size_t begin = 0; begin < all.size();) {
                const std::size_t num = std::min<std::size_t>(1 + random() % 90, all.size() - begin);
                some.assign(all.begin() + static_cast<std::ptrdiff_t>(begin), all.begin() + static_cast<std::ptrdiff_t>(begin + num));
                threads.push(some);
                threads.wake();
                for (const std::uint32_t env : some) ++expected[env];
                begin += num;
            }
            finish(threads, round % 2 == 0);
            CHECK(counts->runs == expected);
        }
        CHECK(threads.stop(UINT64_MAX));
    }
}

void threads_end_while_work_is_queued() {
    for (int round = 0; round < NUM_ROUNDS / 200; ++round) {
        const auto counts = std::make_shared<Counts>();
        KernelThreads threads(counts, plan(2, 10'000));
        threads.push_all(NUM_ENVS);
        threads.wake();
        CHECK(threads.stop(UINT64_MAX));
        for (const std::uint64_t runs : counts->runs) CHECK(runs <= 1);
    }
}

}  // namespace

int main() {
    return run_cases({
        {"each env of a range is run once", each_env_of_a_range_is_run_once},
        {"envs are queued again while others run", envs_are_queued_again_while_others_run},
        {"threads end while work is queued", threads_end_while_work_is_queued},
    });
}
