// What episodes need to be played again. The results of all envs together go to a journal, column by column; each env takes
// its own from there when somebody asks for its log, or when memory is short.
//
//     journal:  chunk ► chunk ► chunk, each: columns │ ... of a batch: where each of its columns lies
//     log:      the env's rows of what came before, one after the other
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include <nanobind/nanobind.h>

#include "platform.hpp"
#include "protocol.hpp"

namespace stepmill {

namespace nb = nanobind;

// What a replay is compared with.
struct Outcome {
    double reward = 0.0;
    ObsHash hash = 0;
    std::uint8_t flags = 0;
    bool operator==(const Outcome&) const = default;
};

// One env's newest episode. Times are steps since its reset.
struct EpisodeLog {
    std::uint64_t length = 0;        // results received of this one, its reset's too; also of one that is not whole
    bool is_whole = false;           // from the reset on, nothing missing
    std::uint64_t first = 0;         // its first batch in the journal that is not among the following
    std::vector<std::byte> actions;  // of each step, leaf by leaf
    std::vector<Outcome> outcomes;   // of the reset, then of each step
    nb::object blob;                 // seed and options of the explicit reset that began it
    nb::object next_blob;            // the same of a reset under way
    std::uint64_t episode = 0;       // episodes begun so far
    std::uint64_t length_before = 0;  // the length of the one before

    bool has_next_seed() const { return next_blob && !nb::object(next_blob[0]).is_none(); }  // one that does not fit the seed word
    std::size_t size_bytes() const noexcept { return actions.capacity() + outcomes.capacity() * sizeof(Outcome); }
    void free() noexcept {  // `= {}` would keep the memory
        std::vector<std::byte>().swap(actions);
        std::vector<Outcome>().swap(outcomes);
    }
};

// The batches since the oldest that somebody needs, numbered from 0 on. Fresh memory costs more than all the rest of a log (a page
// fault every few steps), hence three rules: chunks that nobody needs any more are the next to be used; a column that is the same as in
// the batch before is not written again, which flags nearly always are, and rewards often; and 64-bit integers that would fit bytes are
// kept as bytes, which is what discrete actions are.
class Journal {
 public:
    struct Kind {
        std::size_t row_bytes = 0;  // of one env
        bool is_int64 = false;
    };
    // actions: of each of their leaves.
    Journal(std::size_t num_envs, std::vector<Kind> actions, std::size_t limit_bytes) : num_envs_(num_envs), kinds_(std::move(actions)) {
        kinds_.insert(kinds_.end(), {Kind{sizeof Outcome::reward}, Kind{sizeof Outcome::hash}, Kind{sizeof Outcome::flags}});
        for (const Kind& kind : kinds_) batch_bytes_ += aligned(num_envs_ * kind.row_bytes);
        chunk_bytes_ = std::max(std::min<std::size_t>(limit_bytes / 4, 128 << 10), batch_bytes_);
        max_batches_ = std::max<std::size_t>(chunk_bytes_ / 2 / places_bytes(), 1);
    }

    std::uint64_t end() const noexcept { return end_; }
    std::size_t size_bytes() const noexcept { return size_bytes_; }                                 // of its batches
    std::size_t memory_bytes() const noexcept { return (chunks_.size() + spares_.size()) * (chunk_bytes_ + max_batches_ * places_bytes()); }

    // The batch that comes next: `begin`, its columns in order, and `add` if it is to stay.
    void begin() {
        if (chunks_.empty() || is_full()) {
            Chunk chunk = take_spare();
            chunk.begin_anew(end_);
            chunks_.push_back(std::move(chunk));
        }
        next_.clear();
        used_ = chunks_.back().used;
    }
    void write(const void* rows) {
        const Chunk& chunk = chunks_.back();
        const std::size_t column = next_.size();
        std::size_t size = num_envs_ * kinds_[column].row_bytes;
        const std::uint32_t mark = kinds_[column].is_int64 && narrow(rows, size / sizeof(std::int64_t)) ? NARROW : 0;
        if (mark != 0) rows = narrow_.data(), size = narrow_.size();
        if (!chunk.places.empty()) {
            const std::uint32_t before = chunk.places[chunk.places.size() - kinds_.size() + column];
            if ((before & NARROW) == mark && std::memcmp(chunk.at(before), rows, size) == 0) return next_.push_back(before);
        }
        std::memcpy(chunk.bytes.get() + used_, rows, size);
        next_.push_back(static_cast<std::uint32_t>(used_ / ALIGNMENT) | mark);
        used_ += aligned(size);
    }
    void add() {
        Chunk& chunk = chunks_.back();
        size_bytes_ -= chunk.size_bytes();
        chunk.places.insert(chunk.places.end(), next_.begin(), next_.end());
        chunk.used = used_;
        chunk.end = ++end_;
        size_bytes_ += chunk.size_bytes();
    }
    bool is_full() const noexcept {  // the newest chunk
        const Chunk& chunk = chunks_.back();
        return chunk_bytes_ - chunk.used < batch_bytes_ || chunk.end - chunk.first == max_batches_;
    }

    bool is_empty() const noexcept { return chunks_.empty(); }
    std::uint64_t oldest_end() const noexcept { return chunks_.front().end; }  // of the oldest chunk

    // Nobody needs what came before a batch.
    void release(std::uint64_t first) {
        for (; !chunks_.empty() && chunks_.front().end <= first; chunks_.pop_front()) {
            size_bytes_ -= chunks_.front().size_bytes();
            spares_.push_back(std::move(chunks_.front()));
        }
    }
    // Gives spare memory back where it is more than this in all.
    void trim(std::size_t limit_bytes) {
        while (!spares_.empty() && memory_bytes() > limit_bytes) spares_.pop_back();
    }

    // Moves an env's rows of the batches before `until` to the end of its log.
    void move_to(EpisodeLog& log, std::size_t env_id, std::uint64_t until) const {
        for (const Chunk& chunk : chunks_) {
            for (; log.first >= chunk.first && log.first < std::min(chunk.end, until); ++log.first) {
                const std::uint32_t* places = chunk.places.data() + (log.first - chunk.first) * kinds_.size();
                copy_row(chunk, places, env_id, log);
            }
        }
    }

 private:
    static constexpr std::size_t ALIGNMENT = 8;
    static constexpr std::uint32_t NARROW = 1u << 31;  // of a place: the column is kept as bytes
    struct Chunk {
        std::unique_ptr<std::byte[]> bytes;
        std::size_t used = 0;
        std::vector<std::uint32_t> places;  // of each batch's columns, in units of ALIGNMENT, with marks; a batch that changes nothing takes these alone
        std::uint64_t first = 0, end = 0;   // its batches

        std::size_t size_bytes() const noexcept { return used + places.size() * sizeof(std::uint32_t); }
        const std::byte* at(std::uint32_t place) const noexcept { return bytes.get() + (place & ~NARROW) * ALIGNMENT; }
        void begin_anew(std::uint64_t batch) {
            used = 0;
            places.clear();
            first = end = batch;
        }
    };
    std::size_t places_bytes() const noexcept { return kinds_.size() * sizeof(std::uint32_t); }  // of a batch
    Chunk take_spare() {
        Chunk chunk;
        if (spares_.empty()) {
            chunk.bytes = std::make_unique_for_overwrite<std::byte[]>(chunk_bytes_);
            prefault(chunk.bytes.get(), chunk_bytes_);
            chunk.places.reserve(max_batches_ * kinds_.size());
        } else {
            chunk = std::move(spares_.back());
            spares_.pop_back();
        }
        return chunk;
    }
    static constexpr std::size_t aligned(std::size_t size) noexcept { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

    void copy_row(const Chunk& chunk, const std::uint32_t* places, std::size_t env_id, EpisodeLog& log) const {
        const std::size_t num_leaves = kinds_.size() - 3;
        Outcome outcome;
        std::memcpy(&outcome.hash, chunk.at(places[num_leaves + 1]) + env_id * sizeof outcome.hash, sizeof outcome.hash);
        const bool is_first = log.outcomes.empty();  // reward and flags are of the episode before, if that ended in this batch
        if (!is_first) {
            std::memcpy(&outcome.reward, chunk.at(places[num_leaves]) + env_id * sizeof outcome.reward, sizeof outcome.reward);
            std::memcpy(&outcome.flags, chunk.at(places[num_leaves + 2]) + env_id, sizeof outcome.flags);
            for (std::size_t leaf = 0; leaf < num_leaves; ++leaf) {
                copy_action(chunk.at(places[leaf]), (places[leaf] & NARROW) != 0, env_id, kinds_[leaf].row_bytes, log.actions);
            }
        }
        log.outcomes.push_back(outcome);
    }

    static void copy_action(const std::byte* column, bool is_narrow, std::size_t env_id, std::size_t row_bytes, std::vector<std::byte>& actions) {
        const std::byte* row = column + env_id * row_bytes;
        if (!is_narrow) {
            actions.insert(actions.end(), row, row + row_bytes);
            return;
        }
        const std::size_t num = row_bytes / sizeof(std::int64_t), begin = actions.size();
        actions.resize(begin + row_bytes);
        for (std::size_t i = 0; i < num; ++i) {
            const std::int64_t value = static_cast<std::int8_t>(column[env_id * num + i]);
            std::memcpy(actions.data() + begin + i * sizeof value, &value, sizeof value);
        }
    }
    // Whether all would fit signed bytes, which are in narrow_ then.
    bool narrow(const void* rows, std::size_t num) {
        const auto* values = static_cast<const std::int64_t*>(rows);
        narrow_.resize(num);
        std::uint64_t is_any_wide = 0;
        for (std::size_t i = 0; i < num; ++i) {
            narrow_[i] = static_cast<std::int8_t>(values[i]);
            is_any_wide |= static_cast<std::uint64_t>(values[i] ^ narrow_[i]);
        }
        return is_any_wide == 0;
    }

    std::size_t num_envs_;
    std::vector<Kind> kinds_;           // by column
    std::vector<std::int8_t> narrow_;   // scratch
    std::size_t batch_bytes_ = 0, chunk_bytes_ = 0, max_batches_ = 1, used_ = 0;
    std::vector<std::uint32_t> next_;  // of the batch that is written
    std::deque<Chunk> chunks_;         // the oldest first
    std::vector<Chunk> spares_;
    std::uint64_t end_ = 0;
    std::size_t size_bytes_ = 0;
};

}  // namespace stepmill
