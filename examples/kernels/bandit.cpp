// A kernel in C++: a bandit with ten arms, whose mean rewards each reset draws.
//
//     c++ -O2 -std=c++17 -shared -fPIC -I$(python -c 'import stepmill; print(stepmill.get_include())') bandit.cpp -o libbandit.so
#include <array>
#include <cstdint>
#include <cstdio>

#include "stepmill_kernel.h"

namespace {

constexpr std::int64_t NUM_ARMS = 10;

struct Bandit {
    std::array<double, NUM_ARMS> means;
    std::int64_t last_arm;
};

std::int32_t reset(void *state, stepmill_rng *rng, void *obs, stepmill_result *) {
    auto &self = *static_cast<Bandit *>(state);
    for (double &mean : self.means) mean = stepmill_rng_normal(rng);
    self.last_arm = stepmill_rng_integers(rng, 0, NUM_ARMS);
    *static_cast<std::int64_t *>(obs) = self.last_arm;
    return STEPMILL_OK;
}

std::int32_t step(void *state, const void *action, stepmill_rng *rng, void *obs, stepmill_result *result) {
    auto &self = *static_cast<Bandit *>(state);
    const auto arm = *static_cast<const std::int64_t *>(action);
    if (arm < 0 || arm >= NUM_ARMS) {
        std::snprintf(result->message, sizeof result->message, "there is no arm %lld", static_cast<long long>(arm));
        return 1;
    }
    self.last_arm = arm;
    result->reward = self.means[static_cast<std::size_t>(arm)] + stepmill_rng_normal(rng);
    *static_cast<std::int64_t *>(obs) = self.last_arm;
    return STEPMILL_OK;
}

}  // namespace

extern "C" const stepmill_kernel *stepmill_kernel_describe(void) {
    static const stepmill_kernel kernel = [] {
        stepmill_kernel made{};
        made.abi_version = STEPMILL_KERNEL_ABI;
        made.size_bytes = sizeof made;
        made.name = "bandit";
        made.observation.kind = made.action.kind = STEPMILL_DISCRETE;
        made.observation.n = made.action.n = NUM_ARMS;
        made.state_bytes = sizeof(Bandit);
        made.max_episode_steps = 100;
        made.reset = reset;
        made.step = step;
        return made;
    }();
    return &kernel;
}
