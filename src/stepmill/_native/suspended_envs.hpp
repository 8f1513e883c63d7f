// Suspended envs: their objects were rebuilt, and their episodes are replayed. Their results are hidden until the replay ends.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "env_table.hpp"

namespace stepmill {

// What a replay reports to Python.
enum class ReplayEvent : int {
    PLACE = 0,     // a command after which a call must be repeated is done; continue_replay() continues
    PLAYED = 1,    // the whole log was played, with the same outcomes
    DIFFERS = 2,   // the outcome of this step differs from the logged one
    FAULT = 3,     // the env has a fault at this step, or its worker died
};

// A suspended env. The user must not see the results of its replay, so `EnvRecord::done` points to `never_done`. This record stores the
// pending command's action and the other row contents that the replay overwrites.
struct Replay {
    Word never_done{0};                // differs from every ticket that the env can reach
    bool was_ended = false;            // the newest result received ended the episode
    bool is_sent = false;              // the pending command, a step, was sent while the env was suspended
    bool was_last = false;             // this episode is the last one of the env's budget
    std::size_t step = 0;              // index in the log of the newest command
    std::uint32_t slot = 0;            // a private slot, neither the env's latest nor its target
    std::vector<std::uint32_t> places; // numbers of commands after which PLACE is reported
    std::vector<std::byte> action;     // of the pending command
    std::vector<std::byte> sums;       // return and length of the episode, as of the newest result received
    std::vector<std::byte> outcome;    // of an unclaimed result: its columns except the observation
};

// The replays of suspended envs, which of them have an outstanding command, and the events for Python. Used by the pool's thread.
class SuspendedEnvs {
   public:
    struct Event {
        std::uint32_t env;
        ReplayEvent event;
        std::size_t step;
    };

    SuspendedEnvs(EnvTable& envs, std::uint32_t num_envs) : envs_(envs), replays_(num_envs) {}

    Replay* find(std::uint32_t id) const { return replays_.at(id).get(); }  // null: not suspended
    bool is_any() const noexcept { return num_suspended_ != 0; }
    bool has_stopped_replays() const noexcept { return num_suspended_ != replaying_.size(); }  // AWAITING_REPLAY or PAUSED
    std::vector<std::uint32_t> ids() const {
        std::vector<std::uint32_t> ids;
        for (std::uint32_t id = 0; is_any() && id < replays_.size(); ++id) {
            if (replays_[id]) ids.push_back(id);
        }
        return ids;
    }

    void add(std::uint32_t id, std::unique_ptr<Replay> replay) {
        replays_[id] = std::move(replay);
        ++num_suspended_;
        envs_.move(id, ObjectPhase::AWAITING_REPLAY);
    }
    void remove(std::uint32_t id) {
        replays_[id].reset();
        --num_suspended_;
        std::erase(replaying_, id);
        envs_.move(id, ObjectPhase::CURRENT);
    }

    const std::vector<std::uint32_t>& replaying() const noexcept { return replaying_; }  // envs whose replay has an outstanding command
    void set_replaying(std::uint32_t id) {
        envs_.move(id, ObjectPhase::REPLAYING);
        if (std::ranges::count(replaying_, id) == 0) replaying_.push_back(id);
    }
    void pause(std::uint32_t id, ReplayEvent event) {
        envs_.move(id, ObjectPhase::PAUSED);
        std::erase(replaying_, id);
        events_.push_back({id, event, replays_[id]->step});
    }
    // Drops the replay's progress and events; it will start from the beginning.
    void restart_replay(std::uint32_t id) {
        std::erase(replaying_, id);
        std::erase_if(events_, [id](const Event& event) { return event.env == id; });
        if (replays_[id]) envs_.move(id, ObjectPhase::AWAITING_REPLAY);
    }
    // Reports that the worker died. A paused replay has no outstanding command that would become a fault, for example during a repeated call.
    void report_death(std::uint32_t id) {
        const bool has_event = std::ranges::any_of(events_, [id](const Event& event) { return event.env == id; });
        if (has_event) return;
        envs_.move(id, ObjectPhase::AWAITING_REPLAY);
        events_.push_back({id, ReplayEvent::FAULT, replays_[id]->step});
    }
    bool has_events() const noexcept { return !events_.empty(); }
    std::vector<Event> pop_events() { return std::exchange(events_, {}); }

   private:
    EnvTable& envs_;
    std::vector<std::unique_ptr<Replay>> replays_;  // by env
    std::vector<std::uint32_t> replaying_;
    std::size_t num_suspended_ = 0;
    std::vector<Event> events_;
};

}  // namespace stepmill
