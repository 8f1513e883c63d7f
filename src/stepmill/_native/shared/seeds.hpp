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
inline std::uint64_t seed_of_episode(Seeding seeding, std::uint64_t base, std::uint64_t env, std::uint64_t episode) {
    return episode == 0 || seeding == Seeding::FIXED ? base : derive_seed(base, env, episode);
}

// The seeds of one env's episodes, where its resets are made.
struct EpisodeSeeds {
    std::uint64_t base = 0, episode = 0;  // base: of the last reset that had a seed; episode: resets since then
    std::uint8_t has_seed = 0;            // or not 0; a byte, because records of kernels are restored as they were saved

    // An episode begins with these words of a command; an automatic reset has none. Returns whether its reset has a seed: `of`.
    bool begin(std::uint8_t flags, std::uint64_t seed, std::uint64_t number, Seeding seeding) noexcept {
        if (flags & FLAG_SEED) base = seed, has_seed = true, episode = (flags & FLAG_EPISODE) ? number : 0;
        else if (has_seed && seeding != Seeding::CONTINUE) ++episode;
        else return false;
        return true;
    }
    std::uint64_t of(std::uint64_t env, Seeding seeding) const { return seed_of_episode(seeding, base, env, episode); }
};

}  // namespace stepmill
