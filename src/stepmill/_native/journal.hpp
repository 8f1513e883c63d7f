// What episodes need to be played again. The results of all envs together go to a journal, one copy a batch; each env takes
// its own from there when somebody asks for its log, or when the journal is full.
//
//     journal:  actions of all envs, leaf by leaf | outcomes of all envs   ── the next batch ──►
//     log:      the env's rows of what came before, one after the other
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <nanobind/nanobind.h>

namespace stepmill {

namespace nb = nanobind;

// What a replay is compared with.
struct Outcome {
    double reward = 0.0;
    std::uint64_t hash = 0;
    std::uint8_t flags = 0;
    bool operator==(const Outcome&) const = default;
};

// One env's newest episode. Times are steps since its reset.
struct EpisodeLog {
    bool is_whole = false;           // from the reset on, nothing missing
    std::uint32_t first = 0;         // its first batch in the journal that is not among the following
    std::uint64_t length = 0;        // results received of this one, its reset's too; also of one that is not whole
    std::vector<std::byte> actions;  // of each step, leaf by leaf
    std::vector<Outcome> outcomes;   // of the reset, then of each step
    nb::object blob;                 // seed and options of the explicit reset that began it
    nb::object next_blob;            // the same of a reset under way
    std::uint64_t episode = 0;       // episodes begun so far
    std::uint64_t length_before = 0;  // the length of the one before

    bool has_next_seed() const { return next_blob && !nb::object(next_blob[0]).is_none(); }  // one that does not fit the seed word
    std::size_t size_bytes() const noexcept { return actions.size() + outcomes.size() * sizeof(Outcome); }
};

class Journal {
 public:
    // `leaf_bytes`: of one env's row, for each leaf of the actions. At most `limit_bytes`, but for one batch.
    Journal(std::size_t num_envs, std::vector<std::size_t> leaf_bytes, std::size_t limit_bytes) : num_envs_(num_envs), leaf_bytes_(std::move(leaf_bytes)) {
        for (const std::size_t size : leaf_bytes_) row_bytes_ += size;
        outcomes_at_ = (num_envs_ * row_bytes_ + alignof(Outcome) - 1) / alignof(Outcome) * alignof(Outcome);
        batch_bytes_ = outcomes_at_ + num_envs_ * sizeof(Outcome);
        max_batches_ = static_cast<std::uint32_t>(std::max<std::size_t>(limit_bytes / batch_bytes_, 1));
    }

    std::uint32_t num_batches() const noexcept { return num_batches_; }
    std::size_t size_bytes() const noexcept { return num_batches_ * batch_bytes_; }
    bool is_full() const noexcept { return num_batches_ == max_batches_; }

    // Of the batch that comes next. Memory is taken when it is first needed, and kept.
    std::byte* next_actions() {
        if (!bytes_) bytes_.reset(static_cast<std::byte*>(::operator new(max_batches_ * batch_bytes_)));
        return batch(num_batches_);
    }
    Outcome* next_outcomes() { return reinterpret_cast<Outcome*>(next_actions() + outcomes_at_); }
    void add() noexcept { ++num_batches_; }
    void clear() noexcept { num_batches_ = 0; }

    // Moves an env's rows to the end of its log.
    void move_to(EpisodeLog& log, std::size_t env_id) const {
        for (; log.first < num_batches_; ++log.first) {
            const std::byte* column = batch(log.first);
            const Outcome* outcomes = reinterpret_cast<const Outcome*>(column + outcomes_at_);
            if (log.outcomes.empty()) {
                log.outcomes.push_back({0.0, outcomes[env_id].hash, 0});  // reward and flags are of the episode before, if that ended in this batch
                continue;
            }
            log.outcomes.push_back(outcomes[env_id]);
            for (const std::size_t size : leaf_bytes_) {
                log.actions.insert(log.actions.end(), column + env_id * size, column + (env_id + 1) * size);
                column += num_envs_ * size;
            }
        }
    }

 private:
    struct Free {
        void operator()(std::byte* bytes) const noexcept { ::operator delete(bytes); }
    };
    std::byte* batch(std::uint32_t index) const noexcept { return bytes_.get() + index * batch_bytes_; }

    std::size_t num_envs_;
    std::vector<std::size_t> leaf_bytes_;
    std::size_t row_bytes_ = 0, outcomes_at_ = 0, batch_bytes_ = 0;
    std::uint32_t max_batches_ = 1, num_batches_ = 0;
    std::unique_ptr<std::byte, Free> bytes_;
};

}  // namespace stepmill
