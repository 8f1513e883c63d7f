// The classes of pool/events.py: what drain() returns, and what Python has decided about an env or a worker.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "pool/env_table.hpp"

namespace stepmill {

enum class Event : std::uint8_t { ENV_FAILED, WORKER_DIED, REPLAY_PAUSED };  // the last: and those that follow, by ReplayEvent
inline constexpr std::array EVENT_NAMES{"EnvFailed", "Death", "ReplayAt", "ReplayPlayed", "ReplayDiffers", "ReplayFailed"};

// A decision with all memory that its commit needs, so that the commit does not fail.
struct Decision {
    enum class Kind : std::uint8_t {
        RESOLVE_FAULT, MARK_NEW, REPLAY, CONTINUE_REPLAY,                 // of an env
        BEGIN_RESTART, SERVE_WORKER, CANCEL_RESTART, FAIL_WORKER,  // of a worker
    };
    static constexpr std::array NAMES{"ResolveFault", "MarkNew", "Replay", "ContinueReplay", "BeginRestart", "ServeWorker", "CancelRestart", "FailWorker"};

    bool is_of_env() const noexcept { return kind < Kind::BEGIN_RESTART; }

    Kind kind = Kind::RESOLVE_FAULT;
    std::uint32_t id = 0;                          // of the env, or the worker
    std::uint32_t key = 0;                         // the env's ticket, or how often the worker was restarted. Another one: the decision is stale
    Remedy remedy = Remedy::CUT;
    nb::object info;                               // info["fault"] of the episodes that are cut short
    nb::object final_obs;                          // SAME_STEP: the last observation of the episode that ends
    std::vector<std::uint32_t> ids;                // the worker's envs, or this env
    std::vector<std::unique_ptr<Replay>> replays;  // for `ids`
    std::vector<std::uint32_t> places;             // of a replay
    bool is_finished_here = false, is_recycling = false;
    std::uint32_t pid = 0;
};

}  // namespace stepmill
