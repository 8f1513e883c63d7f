// The newest results of all envs, column by column.
//
// chunk ► chunk ► chunk, each: columns │ for each of its batches: where each of its columns is
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <nanobind/nanobind.h>

#include "shared/platform.hpp"
#include "shared/protocol.hpp"

namespace stepmill {

namespace nb = nanobind;

// What a replay compares.
struct Outcome {
    double reward = 0.0;
    ObsHash hash = 0;
    std::uint8_t flags = 0;
    bool operator==(const Outcome& other) const {  // NaN equals itself
        return std::bit_cast<std::uint64_t>(reward) == std::bit_cast<std::uint64_t>(other.reward) && hash == other.hash && flags == other.flags;
    }
};

// The newest episode of one env.
struct LoggedEpisode {
    std::uint64_t length = 0;         // results received, including that of the reset; counted also if the log is incomplete
    bool is_whole = false;            // every result since the reset is logged
    std::uint64_t first = 0;          // number of the first batch in the batch log whose row is not yet in `actions` and `outcomes`
    const ObsHash* hash = nullptr;    // where the server publishes the hash of the newest observation
    std::vector<std::byte> actions;   // of each step, all leaves one after another
    std::vector<Outcome> outcomes;    // of the reset, then of each step
    std::vector<std::uint8_t> blobs;  // of each step, the blob of its command: the parts of its action without a fixed size
    std::vector<std::uint64_t> blob_ends;  // of each step, in `blobs`
    std::vector<std::uint8_t> newest_blob; // of the newest step sent; empty if the log is incomplete
    nb::object reset_blob;            // bytes: seed and options of the explicit reset that began the episode
    std::uint64_t episode = 0;        // number of episodes begun so far
    std::uint64_t length_before = 0;  // length of the previous episode

    std::span<const std::uint8_t> blob_of(std::size_t step) const {  // of the steps in `outcomes`, from 1 on
        const std::size_t begin = step > 1 ? blob_ends.at(step - 2) : 0;
        return {blobs.data() + begin, blob_ends.at(step - 1) - begin};
    }
    std::size_t size_bytes() const noexcept {
        return actions.capacity() + outcomes.capacity() * sizeof(Outcome) + blobs.capacity() + blob_ends.capacity() * sizeof blob_ends[0] + newest_blob.capacity();
    }
    void free() noexcept {  // `= {}` would keep the memory
        std::vector<std::byte>().swap(actions);
        std::vector<Outcome>().swap(outcomes);
        std::vector<std::uint8_t>().swap(blobs), std::vector<std::uint8_t>().swap(newest_blob);
        std::vector<std::uint64_t>().swap(blob_ends);
    }
};

// The batches since the oldest one that is still needed, numbered from 0. Fresh memory is the main cost of a log (a page fault every
// few steps), hence three rules: chunks that are not needed any more are reused; a column that equals the same column of the previous
// batch is not written again, which holds for nearly all flags and many rewards; 64-bit integers that fit in a byte are stored as
// bytes, which holds for most discrete actions.
// Used only by EpisodeLog.
class BatchLog {
   public:
    struct Kind {
        std::size_t row_bytes = 0;  // per env
        bool is_int64 = false;
    };
    // actions: one per leaf of the action.
    BatchLog(std::size_t num_envs, std::vector<Kind> actions, std::size_t limit_bytes) : num_envs_(num_envs), kinds_(std::move(actions)) {
        kinds_.insert(kinds_.end(), {Kind{sizeof Outcome::reward}, Kind{sizeof Outcome::hash}, Kind{sizeof Outcome::flags}});
        for (const Kind& kind : kinds_) batch_bytes_ += aligned(num_envs_ * kind.row_bytes);
        chunk_bytes_ = std::max(std::min<std::size_t>(limit_bytes / 4, 128 << 10), batch_bytes_);
        max_batches_ = std::max<std::size_t>(chunk_bytes_ / 2 / places_bytes(), 1);
    }

    std::uint64_t end() const noexcept { return end_; }
    std::size_t size_bytes() const noexcept { return size_bytes_; }                                 // of all batches
    std::size_t memory_bytes() const noexcept { return (chunks_.size() + free_.size()) * (chunk_bytes_ + max_batches_ * places_bytes()); }

    // Writes one batch: begin(), then write() for each column in order, then add() to keep the batch.
    void begin() {
        if (chunks_.empty() || is_full()) {
            Chunk chunk = unused_chunk();
            chunk.start_at(end_);
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
    bool is_full() const noexcept {  // whether the newest chunk is full
        const Chunk& chunk = chunks_.back();
        return chunk_bytes_ - chunk.used < batch_bytes_ || chunk.end - chunk.first == max_batches_;
    }

    bool is_empty() const noexcept { return chunks_.empty(); }
    std::uint64_t oldest_end() const noexcept { return chunks_.front().end; }  // of the oldest chunk

    // Frees the batches before `first`.
    void release(std::uint64_t first) {
        for (; !chunks_.empty() && chunks_.front().end <= first; chunks_.pop_front()) {
            size_bytes_ -= chunks_.front().size_bytes();
            free_.push_back(std::move(chunks_.front()));
        }
    }
    // Frees unused chunks until the log takes at most limit_bytes.
    void trim(std::size_t limit_bytes) {
        while (!free_.empty() && memory_bytes() > limit_bytes) free_.pop_back();
    }

    // Appends an env's rows of the batches before `until` to its episode.
    void move_to(LoggedEpisode& episode, std::size_t env_id, std::uint64_t until) const {
        for (const Chunk& chunk : chunks_) {
            for (; episode.first >= chunk.first && episode.first < std::min(chunk.end, until); ++episode.first) {
                const std::uint32_t* places = chunk.places.data() + (episode.first - chunk.first) * kinds_.size();
                copy_row(chunk, places, env_id, episode);
            }
        }
    }

   private:
    static constexpr std::size_t ALIGNMENT = 8;
    static constexpr std::uint32_t NARROW = 1u << 31;  // bit of a place: the column is stored as bytes
    struct Chunk {
        std::unique_ptr<std::byte[]> bytes;
        std::size_t used = 0;
        std::vector<std::uint32_t> places;  // one per batch and column, in units of ALIGNMENT, with the NARROW bit; a batch that changes nothing adds only these
        std::uint64_t first = 0, end = 0;   // batches first … end-1

        std::size_t size_bytes() const noexcept { return used + places.size() * sizeof(std::uint32_t); }
        const std::byte* at(std::uint32_t place) const noexcept { return bytes.get() + (place & ~NARROW) * ALIGNMENT; }
        void start_at(std::uint64_t batch) {
            used = 0;
            places.clear();
            first = end = batch;
        }
    };
    std::size_t places_bytes() const noexcept { return kinds_.size() * sizeof(std::uint32_t); }  // per batch
    Chunk unused_chunk() {
        Chunk chunk;
        if (free_.empty()) {
            chunk.bytes = std::make_unique_for_overwrite<std::byte[]>(chunk_bytes_);
            prefault(chunk.bytes.get(), chunk_bytes_);
            chunk.places.reserve(max_batches_ * kinds_.size());
        } else {
            chunk = std::move(free_.back());
            free_.pop_back();
        }
        return chunk;
    }
    static constexpr std::size_t aligned(std::size_t size) noexcept { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

    void copy_row(const Chunk& chunk, const std::uint32_t* places, std::size_t env_id, LoggedEpisode& episode) const {
        const std::size_t num_leaves = kinds_.size() - 3;
        Outcome outcome;
        std::memcpy(&outcome.hash, chunk.at(places[num_leaves + 1]) + env_id * sizeof outcome.hash, sizeof outcome.hash);
        const bool is_first = episode.outcomes.empty();  // reward and flags of this row belong to the previous episode
        if (!is_first) {
            std::memcpy(&outcome.reward, chunk.at(places[num_leaves]) + env_id * sizeof outcome.reward, sizeof outcome.reward);
            std::memcpy(&outcome.flags, chunk.at(places[num_leaves + 2]) + env_id, sizeof outcome.flags);
            for (std::size_t leaf = 0; leaf < num_leaves; ++leaf) {
                copy_action(chunk.at(places[leaf]), (places[leaf] & NARROW) != 0, env_id, kinds_[leaf].row_bytes, episode.actions);
            }
        }
        episode.outcomes.push_back(outcome);
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
    // Whether all values fit in signed bytes. If so, narrow_ holds them.
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
    std::vector<std::uint32_t> next_;  // places of the batch being written
    std::deque<Chunk> chunks_;         // oldest first
    std::vector<Chunk> free_;
    std::uint64_t end_ = 0;
    std::size_t size_bytes_ = 0;
};

}  // namespace stepmill
