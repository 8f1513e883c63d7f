// The pool's record of each env. Only EnvTable::move() changes a phase; phases.def has the moves.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <nanobind/nanobind.h>

#include "pool/phases.hpp"
#include "pool/replay.hpp"

namespace stepmill {

namespace nb = nanobind;

// The states that the user sees. The numbers are those of EnvState in spec/choices.py.
enum class EnvState : int { IDLE = 0, BUSY = 1, READY = 2, FAULTED = 3, EXHAUSTED = 4, NEEDS_RESET = 5 };

#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(STEPMILL_CHECK_MOVES)
constexpr bool CHECKS_MOVES = true;
#else
constexpr bool CHECKS_MOVES = false;
#endif

// Which episode the pending command begins.
enum class Begins : std::uint8_t {
    NOTHING,
    EPISODE,
    EPISODE_OF_EACH_ROW,  // a batched env resets itself in this step
};

// Where the result of the pending command comes from.
enum class Source : std::uint8_t {
    OWN_ROW,
    STAGING_ROW,  // its server has begun the episode in advance
};

// What becomes of the episode of an env that has a fault, or whose object is lost; the numbers are those of pool/events.py.
enum class Remedy : std::uint8_t { RAISE, CUT, KEEP };

// The command of a PENDING env.
struct PendingCommand {
    Command kind = Command::STEP;  // NONE: the env is EXHAUSTED, and in a step of all envs it gets no command and an empty row
    Begins begins = Begins::NOTHING;
    Source source = Source::OWN_ROW;
};

// The replay of a suspended env. A copy of the env's record has none.
struct OwnReplay : std::unique_ptr<Replay> {
    OwnReplay() = default;
    OwnReplay(OwnReplay&&) = default;
    OwnReplay(const OwnReplay&) noexcept : unique_ptr() {}
    OwnReplay& operator=(OwnReplay&&) = default;
    OwnReplay& operator=(const OwnReplay&) noexcept { return reset(), *this; }
    using unique_ptr::operator=;
};

// The pool's record of one env.
struct alignas(CACHE_LINE) EnvRecord {
    // The fields that every step reads come first.
    EnvPhase phase() const noexcept { return phase_; }
    ObjectPhase object() const noexcept { return object_; }

   private:
    friend class EnvTable;
    EnvPhase phase_ = EnvPhase::NEW;
    ObjectPhase object_ = ObjectPhase::CURRENT;

   public:
    std::uint8_t latest = 0;     // slot of the newest result received
    std::uint8_t target = 0;     // slot that the outstanding command writes to
    PendingCommand command;
    bool has_seed = false;       // of the last explicit reset
    bool is_recycled = false;    // its object is new, and its generator does not continue: the next reset has a seed if there ever was one
    bool is_blob_seeded = false;  // reset_blob has a seed
    std::uint32_t server = 0;
    const std::uint32_t* ticket = nullptr;  // of its server's newest command
    const Word* done = nullptr;
    const Word* fault = nullptr;
    nb::object cut_info;         // the pending command is cut short: its result is marked truncated, and its info has this
    nb::object final_obs;        // SAME_STEP: the last observation of the episode that was cut short
    nb::object lost_info;        // of an object that is LOST or DOOMED: the later cut_info
    nb::object opaques;          // the newest opaque parts of the observation, a list
    nb::object fault_record;     // of a fault that the pool found when it read the result of command `recorded_ticket`
    OwnReplay replay;            // null: not suspended
    std::uint32_t recorded_ticket = 0;
    std::uint32_t counted_ticket = 0;  // of the last command whose fault was counted
    std::uint64_t num_ended = 0;  // episodes that ended, of the budget
    std::uint64_t base_seed = 0;
    std::uint64_t episode = 0;   // resets since then
    nb::object reset_blob;       // bytes: seed and options of the outstanding explicit reset, as they were sent; null: none

    bool has_blob_seed() const noexcept { return reset_blob && is_blob_seeded; }  // a seed that does not fit the seed word
    bool is_commanded() const noexcept { return phase_ == EnvPhase::PENDING && command.kind != Command::NONE; }
    bool is_masked() const noexcept { return phase_ == EnvPhase::PENDING && command.kind == Command::NONE; }
    bool uses_staged() const noexcept { return command.source == Source::STAGING_ROW; }
    bool begins_episode() const noexcept { return command.begins == Begins::EPISODE; }
    bool is_cut() const noexcept { return static_cast<bool>(cut_info); }
    void drop_cut() { cut_info.reset(), final_obs.reset(); }
    bool is_from_pool() const noexcept { return is_cut() || is_masked(); }  // its result is not what its worker has written
    bool is_suspended() const noexcept { return stepmill::is_suspended(object_); }
    bool begins_episode_next() const noexcept { return object_ == ObjectPhase::RENEWED || object_ == ObjectPhase::LOST; }
};

static_assert(sizeof(EnvRecord) == 2 * CACHE_LINE, "an index of the table is a shift");

// Owns the records. Used by the pool's thread. Debug and sanitizer builds end the program at a move that phases.def does not list.
class EnvTable {
   public:
    EnvRecord& operator[](std::uint32_t id) { return records_[id]; }
    const EnvRecord& operator[](std::uint32_t id) const { return records_[id]; }
    EnvRecord& at(std::uint32_t id) { return records_.at(id); }
    const EnvRecord& at(std::uint32_t id) const { return records_.at(id); }
    auto begin() { return records_.begin(); }
    auto end() { return records_.end(); }
    auto begin() const { return records_.begin(); }
    auto end() const { return records_.end(); }
    void resize(std::size_t num_envs) { records_.resize(num_envs); }
    void clear() { records_.clear(); }

    void move(std::uint32_t id, EnvPhase phase) {
        EnvRecord& env = records_[id];
        if constexpr (CHECKS_MOVES) check(id, can_move(env.phase_, phase) && is_legal(phase, env.object_), name_of(phase));
        env.phase_ = phase;
    }
    void move(std::uint32_t id, ObjectPhase phase) {
        EnvRecord& env = records_[id];
        if constexpr (CHECKS_MOVES) check(id, can_move(env.object_, phase) && is_legal(env.phase_, phase), name_of(phase));
        env.object_ = phase;
    }
    // Gives an env the phases and the record of a saved position. This is not a move of the table.
    void restore(std::uint32_t id, const EnvRecord& record, EnvPhase phase, ObjectPhase object) {
        records_[id] = record;
        records_[id].phase_ = phase;
        restore(id, object);
    }
    void restore(std::uint32_t id, ObjectPhase object) { records_[id].object_ = object; }
    // The env must be reset, so it does not matter any more what has become of its object.
    void fail(std::uint32_t id) {
        move(id, ObjectPhase::CURRENT);
        move(id, EnvPhase::FAULTED);
    }

   private:
    void check(std::uint32_t id, bool is_allowed, const char* phase) const {
        if (is_allowed) return;
        std::fprintf(stderr, "env %u cannot move from %s and %s to %s\n", id, name_of(records_[id].phase_), name_of(records_[id].object_), phase);
        std::abort();
    }

    std::vector<EnvRecord> records_;  // by env
};

}  // namespace stepmill
