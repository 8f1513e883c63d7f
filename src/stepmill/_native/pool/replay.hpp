// What the pool stores of a suspended env: its object was rebuilt, and its results are hidden until its episode has been replayed.
#pragma once

#include <vector>

#include "shared/protocol.hpp"

namespace stepmill {

// Why a replay is PAUSED. Python handles it, by a decision that moves the env on.
enum class ReplayEvent : std::uint8_t {
    AT_PLACE,  // a command after which a call must be repeated is done
    PLAYED,    // the whole log was played, with the same outcomes
    DIFFERS,   // the outcome of this step differs from the logged one
    FAILED,    // the env has a fault at this step, or its worker died
};

// A suspended env. The user must not see the results of its replay, so `EnvRecord::done` points to `never_done`. This record stores the
// pending command's action and the other row contents that the replay overwrites.
struct Replay {
    Word never_done{0};                // differs from every ticket that the env can reach
    bool was_ended = false;            // the newest result received ended the episode
    bool is_sent = false;              // the pending command, a step, was sent while the env was suspended
    bool was_last = false;             // this episode is the last one of the env's budget
    bool is_restored = false;          // the newest observation comes from a saved position: that of the replay replaces it
    std::size_t step = 0;              // index in the log of the newest command
    std::uint32_t slot = 0;            // a private slot, neither the env's latest nor its target
    ReplayEvent event = ReplayEvent::PLAYED;  // of a PAUSED env
    bool is_finished_here = false;     // once the log is played, no decision is needed
    std::vector<std::uint32_t> places; // numbers of commands after which the replay pauses AT_PLACE
    std::vector<std::byte> action;     // of the pending command
    std::vector<std::uint8_t> blob;    // of the pending command: the parts of its action without a fixed size
    std::vector<std::byte> sums;       // return and length of the episode, as of the newest result received
    std::vector<std::byte> outcome;    // of an unclaimed result: its columns except the observation
};

}  // namespace stepmill
