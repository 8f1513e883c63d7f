// Envs whose object is rebuilt by a replay: they are held while their episodes are played again.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "protocol.hpp"

namespace stepmill {

// What a replay reports to Python.
enum class ReplayEvent : int {
    PLACE = 0,     // a command after which a call must be repeated is done; continue_replay() continues
    PLAYED = 1,    // the whole log was played, with the same outcomes
    DIFFERS = 2,   // the outcome of this step differs from the logged one
    FAULT = 3,     // the env has a fault at this step, or its worker died
};

// A held env. The user must not see the results of its replay, so `EnvRecord::done` points to `never_done`. This record stores the
// pending command's action and the other row contents that the replay overwrites.
struct Replay {
    enum class Phase { WAITING, PLAYING, PAUSED };  // needs begin_replay() · a command is outstanding · waits for Python
    Word never_done{0};                // differs from every ticket that the env can reach
    Phase phase = Phase::WAITING;
    bool was_ended = false;            // the newest result received ended the episode
    bool is_sent = false;              // the pending command, a step, was sent while the env was held
    bool was_last = false;             // this episode is the last one of the env's budget
    std::size_t step = 0;              // index in the log of the newest command
    std::uint32_t slot = 0;            // a private slot, neither the env's latest nor its target
    std::vector<std::uint32_t> places; // numbers of commands after which PLACE is reported
    std::vector<std::byte> action;     // of the pending command
    std::vector<std::byte> sums;       // return and length of the episode, as of the newest result received
    std::vector<std::byte> outcome;    // of an unclaimed result: its columns except the observation
};

// Which envs are held, which of them play, and the events for Python. Used by the pool's thread.
class HeldEnvs {
   public:
    struct Event {
        std::uint32_t env;
        ReplayEvent event;
        std::size_t step;
    };

    explicit HeldEnvs(std::uint32_t num_envs) : replays_(num_envs) {}

    Replay* find(std::uint32_t id) const { return replays_.at(id).get(); }  // null: not held
    bool is_held(std::uint32_t id) const { return num_held_ != 0 && replays_[id] != nullptr; }
    bool is_any() const noexcept { return num_held_ != 0; }
    bool is_any_idle() const noexcept { return num_held_ != playing_.size(); }
    std::vector<std::uint32_t> ids() const {
        std::vector<std::uint32_t> ids;
        for (std::uint32_t id = 0; is_any() && id < replays_.size(); ++id) {
            if (replays_[id]) ids.push_back(id);
        }
        return ids;
    }

    void add(std::uint32_t id, std::unique_ptr<Replay> replay) {
        replays_[id] = std::move(replay);
        ++num_held_;
    }
    void remove(std::uint32_t id) {
        replays_[id].reset();
        --num_held_;
        std::erase(playing_, id);
    }

    const std::vector<std::uint32_t>& playing() const noexcept { return playing_; }  // envs whose replay waits for a command
    void play(std::uint32_t id) {
        replays_[id]->phase = Replay::Phase::PLAYING;
        if (std::ranges::count(playing_, id) == 0) playing_.push_back(id);
    }
    void pause(std::uint32_t id, ReplayEvent event) {
        replays_[id]->phase = Replay::Phase::PAUSED;
        std::erase(playing_, id);
        events_.push_back({id, event, replays_[id]->step});
    }
    // Cancels what the env's replay has done; the next replay starts from the beginning.
    void forget_progress(std::uint32_t id) {
        std::erase(playing_, id);
        std::erase_if(events_, [id](const Event& event) { return event.env == id; });
        if (replays_[id]) replays_[id]->phase = Replay::Phase::WAITING;
    }
    // Reports that the worker died. A paused replay has no outstanding command that would become a fault, for example during a repeated call.
    void lose(std::uint32_t id) {
        const bool has_event = std::ranges::any_of(events_, [id](const Event& event) { return event.env == id; });
        if (has_event) return;
        replays_[id]->phase = Replay::Phase::WAITING;
        events_.push_back({id, ReplayEvent::FAULT, replays_[id]->step});
    }
    bool has_events() const noexcept { return !events_.empty(); }
    std::vector<Event> pop_events() { return std::exchange(events_, {}); }

   private:
    std::vector<std::unique_ptr<Replay>> replays_;  // by env
    std::vector<std::uint32_t> playing_;
    std::size_t num_held_ = 0;
    std::vector<Event> events_;
};

}  // namespace stepmill
