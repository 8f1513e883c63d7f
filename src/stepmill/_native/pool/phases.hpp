// The phases of envs and the tables of phases.def. Needs neither Python nor NumPy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stepmill {

enum class EnvPhase : std::uint8_t {
#define ENV_PHASE(name) name,
#include "pool/phases.def"
};

enum class ObjectPhase : std::uint8_t {
#define OBJECT_PHASE(name) name,
#include "pool/phases.def"
};

constexpr std::uint8_t NUM_ENV_PHASES = 0
#define ENV_PHASE(name) +1
#include "pool/phases.def"
    ;
constexpr std::uint8_t NUM_OBJECT_PHASES = 0
#define OBJECT_PHASE(name) +1
#include "pool/phases.def"
    ;

constexpr const char* name_of(EnvPhase phase) {
    switch (phase) {
#define ENV_PHASE(name) \
    case EnvPhase::name: return #name;
#include "pool/phases.def"
    }
    return "?";
}

constexpr const char* name_of(ObjectPhase phase) {
    switch (phase) {
#define OBJECT_PHASE(name) \
    case ObjectPhase::name: return #name;
#include "pool/phases.def"
    }
    return "?";
}

constexpr bool is_legal(EnvPhase env, ObjectPhase object) {
#define LEGAL_PAIR(env_phase, object_phase) \
    if (env == EnvPhase::env_phase && object == ObjectPhase::object_phase) return true;
#include "pool/phases.def"
    return false;
}

constexpr bool can_move(EnvPhase from, EnvPhase to) {
#define ENV_MOVE(from_phase, to_phase) \
    if (from == EnvPhase::from_phase && to == EnvPhase::to_phase) return true;
#include "pool/phases.def"
    return from == to;
}

constexpr bool can_move(ObjectPhase from, ObjectPhase to) {
#define OBJECT_MOVE(from_phase, to_phase) \
    if (from == ObjectPhase::from_phase && to == ObjectPhase::to_phase) return true;
#include "pool/phases.def"
    return from == to;
}

constexpr bool is_suspended(ObjectPhase phase) { return phase >= ObjectPhase::AWAITING_REPLAY; }

}  // namespace stepmill
