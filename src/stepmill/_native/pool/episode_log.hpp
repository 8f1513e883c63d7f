// The log of each env's newest episode: its actions and their outcomes, for replays.
#pragma once

#include <vector>

#include "pool/batch_log.hpp"
#include "shared/slab.hpp"
#include "shared/tree.hpp"

namespace stepmill {

// The newest episode of each env, within one memory limit. Results of steps of all envs go to the batch log, column by column. An env's
// rows move from there to its episode when they are needed, or when memory is short. Used by the pool's thread, with the GIL.
class EpisodeLog {
   public:
    EpisodeLog(const Slab& slab, const Tree& actions, std::uint32_t num_envs, bool is_batched, std::uint64_t limit_bytes);

    bool is_on() const noexcept { return limit_bytes_ != 0; }
    bool logs_batches() const noexcept { return is_on() && !has_blobs_; }
    bool has_blobs() const noexcept { return is_on() && has_blobs_; }
    const LoggedEpisode& of(std::uint32_t id) const { return episodes_.at(id); }
    const LoggedEpisode& complete(std::uint32_t id) { return move_rows(id, UINT64_MAX), episodes_.at(id); }  // including its rows in the batch log
    void set_server(std::uint32_t id, ServerLocation location) { episodes_[id].hash = &slab_.words[location.worker].hash[location.local]; }
    Outcome outcome_of(std::uint32_t id) const;  // of the newest result

    void begin(std::uint32_t id, bool has_seed, nb::object reset_blob);
    void set_blob(std::uint32_t id, std::span<const std::uint8_t> blob);  // of the step that is about to be sent
    void drop(std::uint32_t id) { drop(episodes_[id]); }
    void restore(std::uint32_t id, const LoggedEpisode& saved);  // of a saved position
    void add_result(std::uint32_t id, bool is_in_batch);
    void count_in_batch(std::uint32_t id) {  // the fast case of add_result()
        ++episodes_[id].length;
        is_needed_ |= episodes_[id].is_whole;
    }
    void skip_batch(std::uint32_t id);           // the batch being written has no result of this env
    void write_batch();                          // writes the results of all envs; called before other changes, since it may throw bad_alloc
    void add_batch();                            // keeps the batch if an env in it has a complete log

    void set_limit(std::uint64_t limit_bytes);   // of all memory except the newest batch
    void clear() { episodes_.clear(); }          // drops all references to Python objects
    std::uint64_t size_bytes() const noexcept { return episodes_bytes_ + batches_.size_bytes(); }

   private:
    void move_rows(std::uint32_t id, std::uint64_t until);
    void move_all_rows();
    void gather_hashes();
    void enforce_limit();
    void drop(LoggedEpisode& episode);
    std::uint64_t num_logged(const LoggedEpisode& episode) const noexcept { return episode.outcomes.size() + (batches_.end() - std::min(episode.first, batches_.end())); }

    const Slab& slab_;
    bool has_blobs_;        // actions have parts without a fixed size
    bool is_simple_;        // an outcome is one number and two flags
    bool is_needed_ = false;  // an env in the batch being written has a complete log
    std::uint64_t limit_bytes_, episodes_bytes_ = 0;  // limit 0: logging is off
    std::vector<LoggedEpisode> episodes_;  // by env
    BatchLog batches_;
    std::vector<double> rewards_;          // by env; these three are scratch of write_batch
    std::vector<ObsHash> hashes_;
    std::vector<std::uint8_t> flags_;
};

}  // namespace stepmill
