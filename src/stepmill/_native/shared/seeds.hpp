// The seeds of automatic resets, computed by the worker that resets and by the pool that logs it.
#pragma once

#include <cstdint>

#include "shared/protocol.hpp"

namespace stepmill {

// Mixes with splitmix64; 31 bits, so that every env API accepts the seed.
inline std::uint64_t derive_seed(std::uint64_t base, std::uint64_t env, std::uint64_t episode) {
    auto mix = [](std::uint64_t x) {
        x += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    };
    return mix(mix(mix(base) + env) + episode) >> 33;
}

// Episode 0 has the seed that the user gave.
inline std::uint64_t seed_of_episode(bool is_fixed, std::uint64_t base, std::uint64_t env, std::uint64_t episode) {
    return episode == 0 || is_fixed ? base : derive_seed(base, env, episode);
}

}  // namespace stepmill
