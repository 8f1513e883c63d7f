// The tables of phases.def: which pairs of phases an env can reach, and how it leaves them again.
#include <set>
#include <utility>

#include "check.hpp"
#include "pool/phases.hpp"

using namespace stepmill;

namespace {

using Pair = std::pair<int, int>;

EnvPhase env_phase(int number) { return static_cast<EnvPhase>(number); }
ObjectPhase object_phase(int number) { return static_cast<ObjectPhase>(number); }

// Returns the pairs that moves of one phase at a time lead to, from `first`.
std::set<Pair> reachable_from(Pair first) {
    std::set<Pair> found{first};
    for (std::size_t size = 0; size != found.size();) {
        size = found.size();
        for (const auto& [env, object] : std::set<Pair>(found)) {
            for (int next = 0; next < NUM_ENV_PHASES; ++next) {
                if (can_move(env_phase(env), env_phase(next)) && is_legal(env_phase(next), object_phase(object))) found.insert({next, object});
            }
            for (int next = 0; next < NUM_OBJECT_PHASES; ++next) {
                if (can_move(object_phase(object), object_phase(next)) && is_legal(env_phase(env), object_phase(next))) found.insert({env, next});
            }
        }
    }
    return found;
}

std::set<Pair> legal_pairs() {
    std::set<Pair> pairs;
    for (int env = 0; env < NUM_ENV_PHASES; ++env) {
        for (int object = 0; object < NUM_OBJECT_PHASES; ++object) {
            if (is_legal(env_phase(env), object_phase(object))) pairs.insert({env, object});
        }
    }
    return pairs;
}

constexpr Pair START{static_cast<int>(EnvPhase::NEW), static_cast<int>(ObjectPhase::CURRENT)};
constexpr Pair USABLE{static_cast<int>(EnvPhase::IDLE), static_cast<int>(ObjectPhase::CURRENT)};

void each_legal_pair_is_reached() { CHECK(reachable_from(START) == legal_pairs()); }

void an_env_becomes_usable_again_from_each_pair() {
    for (const Pair& pair : legal_pairs()) CHECK(reachable_from(pair).contains(USABLE));
}

void each_move_is_possible_in_some_pair() {
    for (int from = 0; from < NUM_ENV_PHASES; ++from) {
        for (int to = 0; to < NUM_ENV_PHASES; ++to) {
            bool is_possible = !can_move(env_phase(from), env_phase(to));
            for (int object = 0; object < NUM_OBJECT_PHASES; ++object) is_possible |= is_legal(env_phase(from), object_phase(object)) && is_legal(env_phase(to), object_phase(object));
            CHECK(is_possible);
        }
    }
    for (int from = 0; from < NUM_OBJECT_PHASES; ++from) {
        for (int to = 0; to < NUM_OBJECT_PHASES; ++to) {
            bool is_possible = !can_move(object_phase(from), object_phase(to));
            for (int env = 0; env < NUM_ENV_PHASES; ++env) is_possible |= is_legal(env_phase(env), object_phase(from)) && is_legal(env_phase(env), object_phase(to));
            CHECK(is_possible);
        }
    }
}

void a_suspended_env_shows_no_result_before_it_is_resumed() {
    for (int from = 0; from < NUM_OBJECT_PHASES; ++from) {
        for (int to = 0; to < NUM_OBJECT_PHASES; ++to) {
            const bool is_resumed = is_suspended(object_phase(from)) && !is_suspended(object_phase(to));
            if (is_resumed && can_move(object_phase(from), object_phase(to))) CHECK(object_phase(to) == ObjectPhase::CURRENT);
        }
    }
}

}  // namespace

int main() {
    return run_cases({
        {"each legal pair is reached from a new env", each_legal_pair_is_reached},
        {"an env becomes usable again from each legal pair", an_env_becomes_usable_again_from_each_pair},
        {"each move is possible in some pair", each_move_is_possible_in_some_pair},
        {"a suspended env shows no result before it is resumed", a_suspended_env_shows_no_result_before_it_is_resumed},
    });
}
