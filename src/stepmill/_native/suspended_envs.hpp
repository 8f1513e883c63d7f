// Suspended envs: their objects were rebuilt, and their episodes are replayed. Their results are hidden until the replay ends.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "env_table.hpp"

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
    std::size_t step = 0;              // index in the log of the newest command
    std::uint32_t slot = 0;            // a private slot, neither the env's latest nor its target
    ReplayEvent event = ReplayEvent::PLAYED;  // of a PAUSED env
    std::vector<std::uint32_t> places; // numbers of commands after which the replay pauses AT_PLACE
    std::vector<std::byte> action;     // of the pending command
    std::vector<std::byte> sums;       // return and length of the episode, as of the newest result received
    std::vector<std::byte> outcome;    // of an unclaimed result: its columns except the observation
};

// The replays of suspended envs, and which of them have an outstanding command. Used by the pool's thread.
class SuspendedEnvs {
   public:
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
        replays_[id]->event = event;
        has_news_ = true;
    }
    // Drops the replay's progress; it will start from the beginning.
    void restart_replay(std::uint32_t id) {
        std::erase(replaying_, id);
        if (replays_[id]) envs_.move(id, ObjectPhase::AWAITING_REPLAY);
    }
    bool has_news() const noexcept { return has_news_; }  // an env has paused since the last acknowledge()
    void acknowledge() { has_news_ = false; }

   private:
    EnvTable& envs_;
    std::vector<std::unique_ptr<Replay>> replays_;  // by env
    std::vector<std::uint32_t> replaying_;
    std::size_t num_suspended_ = 0;
    bool has_news_ = false;
};

}  // namespace stepmill
