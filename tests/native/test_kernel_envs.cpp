// Envs of a kernel in threads: results depend neither on their number nor on the order of commands, and nothing races.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "arena.hpp"
#include "check.hpp"
#include "kernel/kernel_envs.hpp"

using namespace stepmill;

namespace {

constexpr std::uint32_t NUM_ENVS = 120;
constexpr int NUM_STEPS = 200;

// Walks at random until it is out; a fault where the walk comes near a certain place.
struct Walk {
    double place;
};

int32_t reset(void* state, stepmill_rng* rng, void* obs, stepmill_result*) {
    auto& walk = *static_cast<Walk*>(state);
    walk.place = stepmill_rng_random(rng);
    std::memcpy(obs, &walk.place, sizeof walk.place);
    return STEPMILL_OK;
}

int32_t step(void* state, const void*, stepmill_rng* rng, void* obs, stepmill_result* result) {
    auto& walk = *static_cast<Walk*>(state);
    walk.place += stepmill_rng_normal(rng);
    std::memcpy(obs, &walk.place, sizeof walk.place);
    result->reward = walk.place;
    result->terminated = walk.place > 4.0 || walk.place < -4.0;
    if (stepmill_rng_random(rng) < 0.002) {
        std::strcpy(result->message, "a bad place");
        return 7;
    }
    return STEPMILL_OK;
}

KernelPlan make_plan(Autoreset autoreset) {
    KernelPlan plan;
    plan.reset = reinterpret_cast<void*>(&reset);
    plan.step = reinterpret_cast<void*>(&step);
    plan.state_bytes = sizeof(Walk);
    plan.max_episode_steps = 50;
    plan.obs_offsets = {0}, plan.obs_bytes = sizeof(double);
    plan.action_offsets = {0}, plan.action_bytes = sizeof(std::int64_t);
    plan.autoreset = autoreset;
    plan.entropy = 11;
    plan.final_payload = {0, 0};
    return plan;
}

// An arena with all that a kernel's results consist of.
std::shared_ptr<Slab> make_slab() {
    SlabPlan plan = plan_arena(1, NUM_ENVS, 1);
    auto add = [&plan](std::size_t row_bytes) {
        const Column column{.offset = plan.size_bytes, .row_bytes = row_bytes};
        plan.size_bytes += (row_bytes * NUM_ENVS + 4095) / 4096 * 4096;
        return column;
    };
    plan.action.push_back(add(sizeof(std::int64_t)));
    plan.final_observation.push_back(add(sizeof(double)));
    plan.outcome.reward = add(sizeof(double));
    plan.outcome.terminated = add(1), plan.outcome.truncated = add(1);
    plan.outcome.episode_return = add(sizeof(double));
    plan.over = add(1), plan.episode_length = add(sizeof(std::int64_t)), plan.payload = add(64);
    return make_slab(std::move(plan));
}

// What all envs have brought: rewards and numbers of faults, by env, whatever the threads and the order.
std::vector<double> play(Autoreset autoreset, std::uint32_t num_threads, bool is_whole) {
    const auto slab = make_slab();
    const auto envs = std::make_shared<KernelEnvs>(slab, make_plan(autoreset), num_threads + 1);
    KernelThreadsPlan plan;
    plan.num_envs = NUM_ENVS, plan.num_threads = num_threads, plan.spin_ns = 20'000;
    KernelThreads threads(envs, plan);
    ServerWords& words = slab->words[0];
    std::vector<double> sums(NUM_ENVS);
    std::vector<std::uint32_t> order(NUM_ENVS);
    std::iota(order.begin(), order.end(), 0u);
    std::mt19937 random(num_threads);
    auto finish = [&] {
        while (threads.has_work()) {
            const std::uint32_t seen = threads.num_finished();
            if (threads.run_chunk() == 0 && threads.has_work()) threads.wait_finished(seen, 10'000'000);
        }
        for (const KernelFault& fault : envs->pop_faults()) {
            CHECK(fault.status == 7 && fault.message == "a bad place" && !fault.is_reset);
            envs->mark_faulted(fault.local);
            sums[fault.local] += 1e6;
        }
    };
    auto command = [&](Command kind, std::uint64_t seed) {
        std::shuffle(order.begin(), order.end(), random);
        for (const std::uint32_t env : order) {
            words.row[env] = env;
            set_command(words, env, kind);
            words.flags[env] = seed != 0 ? FLAG_SEED : 0;
            words.seed[env] = seed + env;
            words.ticket[env].fetch_add(1);
        }
        threads.push(order);
        threads.wake();
        finish();
    };
    command(Command::RESET, 1);
    for (int count = 0; count < NUM_STEPS; ++count) {
        if (is_whole) {
            envs->begin_whole(0);
            threads.push_all(NUM_ENVS);
            threads.wake();
            finish();
        } else {
            command(Command::STEP, 0);
        }
        for (std::uint32_t env = 0; env < NUM_ENVS; ++env) sums[env] += *reinterpret_cast<double*>(slab->reward(env));
    }
    CHECK(threads.stop(UINT64_MAX));
    return sums;
}

void results_do_not_depend_on_threads() {
    for (const Autoreset autoreset : {Autoreset::NEXT_STEP, Autoreset::SAME_STEP}) {
        const std::vector<double> expected = play(autoreset, 0, false);
        for (const std::uint32_t num_threads : {1u, 3u}) CHECK(play(autoreset, num_threads, false) == expected);
    }
}

void a_step_of_all_is_a_step_of_each() {
    const std::vector<double> expected = play(Autoreset::NEXT_STEP, 0, false);
    for (const std::uint32_t num_threads : {0u, 1u, 3u}) CHECK(play(Autoreset::NEXT_STEP, num_threads, true) == expected);
}

}  // namespace

int main() {
    return run_cases({
        {"results do not depend on threads", results_do_not_depend_on_threads},
        {"a step of all is a step of each", a_step_of_all_is_a_step_of_each},
    });
}
