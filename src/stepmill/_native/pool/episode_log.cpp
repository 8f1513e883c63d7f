#define NO_IMPORT_ARRAY
#include "pool/episode_log.hpp"

#include <algorithm>
#include <utility>

namespace stepmill {

namespace {

constexpr std::size_t KEPT_LOG_BYTES = 4 << 10;  // an env keeps at most this much memory for its next episode

std::vector<BatchLog::Kind> action_kinds(const Tree& tree, std::uint32_t batch_size) {
    std::vector<BatchLog::Kind> kinds;
    for (const Leaf& leaf : tree.leaves) kinds.push_back({leaf.row_bytes * batch_size, leaf.type_num == NPY_INT64 && leaf.is_native});
    return kinds;
}

}  // namespace

EpisodeLog::EpisodeLog(const Slab& slab, const Tree& actions, std::uint32_t num_envs, bool is_batched, std::uint64_t limit_bytes)
    : slab_(slab),
      has_blobs_(actions.num_opaques != 0),
      is_simple_(slab.plan.outcome.is_plain() && !is_batched),
      limit_bytes_(limit_bytes),
      episodes_(num_envs),
      batches_(num_envs, action_kinds(actions, slab.plan.batch_size), limit_bytes),
      rewards_(num_envs),
      hashes_(num_envs),
      flags_(num_envs) {}

Outcome EpisodeLog::outcome_of(std::uint32_t id) const {
    const std::uint32_t row = id * slab_.plan.batch_size;
    const OutcomePlan& plan = slab_.plan.outcome;
    Outcome outcome;
    outcome.hash = *episodes_.at(id).hash;
    outcome.flags = static_cast<std::uint8_t>(*slab_.terminated(row) | *slab_.truncated(row) << 1);
    if (is_simple_) {
        outcome.reward = slab_.reward_item(row, 0);
        return outcome;
    }
    const std::size_t num_flags = std::max<std::size_t>(plan.num_agents, 1);
    for (std::uint32_t each = row; each < row + slab_.plan.batch_size; ++each) {
        for (std::size_t i = 0; i < plan.num_rewards; ++i) outcome.reward = 1.000000119 * outcome.reward + slab_.reward_item(each, i);
        for (std::size_t agent = each == row ? 1 : 0; agent < num_flags; ++agent) {
            const int flags = slab_.terminated(each)[agent] | slab_.truncated(each)[agent] << 1;
            outcome.flags = static_cast<std::uint8_t>(31 * outcome.flags + flags);
        }
    }
    return outcome;
}

void EpisodeLog::begin(std::uint32_t id, bool has_seed, nb::object reset_blob) {
    LoggedEpisode& episode = episodes_[id];
    ++episode.episode;
    episode.length_before = std::exchange(episode.length, 0);
    episodes_bytes_ -= episode.size_bytes();
    if (episode.size_bytes() > KEPT_LOG_BYTES) episode.free();
    episode.actions.clear();
    episode.outcomes.clear();
    episode.blobs.clear(), episode.blob_ends.clear();
    episodes_bytes_ += episode.size_bytes();
    episode.reset_blob = std::move(reset_blob);
    episode.first = batches_.end();
    episode.is_whole = has_seed;
}

void EpisodeLog::restore(std::uint32_t id, const LoggedEpisode& saved) {
    LoggedEpisode& episode = episodes_[id];
    const ObsHash* hash = episode.hash;
    episodes_bytes_ -= episode.size_bytes();
    episode = saved;
    episodes_bytes_ += episode.size_bytes();
    episode.first = batches_.end(), episode.hash = hash, episode.is_whole &= is_on();
    enforce_limit();
}

// A blob that alone exceeds the limit is not copied: its episode cannot be replayed.
void EpisodeLog::set_blob(std::uint32_t id, std::span<const std::uint8_t> blob) {
    LoggedEpisode& episode = episodes_[id];
    if (!episode.is_whole) return;
    if (blob.size() > limit_bytes_) return drop(episode);
    episodes_bytes_ -= episode.size_bytes();
    episode.newest_blob.assign(blob.begin(), blob.end());
    episodes_bytes_ += episode.size_bytes();
    enforce_limit();
}

void EpisodeLog::add_result(std::uint32_t id, bool is_in_batch) {
    count_in_batch(id);
    LoggedEpisode& episode = episodes_[id];
    if (is_in_batch || !episode.is_whole) return;
    move_rows(id, UINT64_MAX);
    Outcome outcome = outcome_of(id);
    episodes_bytes_ -= episode.size_bytes();
    if (episode.outcomes.empty()) {
        outcome.reward = 0.0, outcome.flags = 0;  // these belong to the previous episode; a replay begins with the reset
    } else {
        const std::size_t size = episode.actions.size();
        episode.actions.resize(size + slab_.action_bytes());
        slab_.read_action(id, episode.actions.data() + size);
        if (has_blobs_) {
            episode.blobs.insert(episode.blobs.end(), episode.newest_blob.begin(), episode.newest_blob.end());
            episode.blob_ends.push_back(episode.blobs.size());
            if (episode.newest_blob.capacity() > KEPT_LOG_BYTES) std::vector<std::uint8_t>().swap(episode.newest_blob);
        }
    }
    episode.outcomes.push_back(outcome);
    episodes_bytes_ += episode.size_bytes();
    enforce_limit();
}

void EpisodeLog::drop(LoggedEpisode& episode) {
    episodes_bytes_ -= episode.size_bytes();
    episode.is_whole = false;
    episode.free();
}

// ---- batches of all envs ----------------------------------------------------------------------------------------

void EpisodeLog::write_batch() {
    batches_.begin();
    for (std::size_t worker = 0; worker < slab_.words.size(); ++worker) __builtin_prefetch(slab_.words[worker].hash);  // fetches them while other columns are written
    for (const Column& column : slab_.plan.action) batches_.write(slab_.base + column.at(0, 0));
    if (is_simple_) {
        slab_.copy_rows(slab_.plan.outcome.terminated, 0, reinterpret_cast<std::byte*>(flags_.data()));
        for (const RowRun& run : slab_.plan.runs) {
            const std::uint8_t* truncated = slab_.truncated(run.first);
            for (std::size_t i = 0; i < run.num; ++i) flags_[run.first + i] = static_cast<std::uint8_t>(flags_[run.first + i] | truncated[i] << 1);
        }
        gather_hashes();
        slab_.copy_rows(slab_.plan.outcome.reward, 0, reinterpret_cast<std::byte*>(rewards_.data()));
    } else {
        for (std::uint32_t id = 0; id < episodes_.size(); ++id) {
            const Outcome outcome = outcome_of(id);
            rewards_[id] = outcome.reward, hashes_[id] = outcome.hash, flags_[id] = outcome.flags;
        }
    }
    batches_.write(rewards_.data());
    batches_.write(hashes_.data());
    batches_.write(flags_.data());
    is_needed_ = false;
}

// Worker by worker, so that each cache line that another core has written is fetched once.
void EpisodeLog::gather_hashes() {
    if (slab_.server_locations.size() != episodes_.size()) {  // with spares any server may serve an env
        for (std::uint32_t id = 0; id < episodes_.size(); ++id) hashes_[id] = *episodes_[id].hash;
        return;
    }
    for (std::size_t worker = 0; worker < slab_.words.size(); ++worker) {
        const ObsHash* hash = slab_.words[worker].hash;
        for (const std::uint32_t id : slab_.plan.servers[worker]) hashes_[id] = *hash++;
    }
}

void EpisodeLog::add_batch() {
    if (!is_needed_) return;
    batches_.add();
    if (batches_.is_full()) {
        std::uint64_t first = batches_.end();
        for (const LoggedEpisode& episode : episodes_) first = episode.is_whole ? std::min(first, episode.first) : first;
        batches_.release(first);
    }
    enforce_limit();
}

void EpisodeLog::skip_batch(std::uint32_t id) {
    move_rows(id, UINT64_MAX);
    episodes_[id].first = batches_.end() + 1;
}

// ---- memory -----------------------------------------------------------------------------------------------------

void EpisodeLog::set_limit(std::uint64_t limit_bytes) {
    limit_bytes_ = std::max<std::uint64_t>(limit_bytes, 1);
    enforce_limit();
}

void EpisodeLog::enforce_limit() {
    if (episodes_bytes_ + batches_.memory_bytes() <= limit_bytes_) return;
    if (size_bytes() > limit_bytes_) move_all_rows();
    batches_.trim(limit_bytes_ - std::min(episodes_bytes_, limit_bytes_));
}

void EpisodeLog::move_rows(std::uint32_t id, std::uint64_t until) {
    LoggedEpisode& episode = episodes_.at(id);
    if (!episode.is_whole) return;
    episodes_bytes_ -= episode.size_bytes();
    batches_.move_to(episode, id, until);
    episodes_bytes_ += episode.size_bytes();
}

// Empties the batch log chunk by chunk. First drops the longest episodes until a quarter of the limit is free.
void EpisodeLog::move_all_rows() {
    const std::size_t row_bytes = slab_.action_bytes() + sizeof(Outcome);
    std::vector<std::pair<std::size_t, std::uint32_t>> sizes;
    std::size_t total = 0;
    for (std::uint32_t id = 0; id < episodes_.size(); ++id) {
        const LoggedEpisode& episode = episodes_[id];
        if (!episode.is_whole) continue;
        sizes.emplace_back(std::max<std::size_t>(num_logged(episode) * row_bytes, episode.size_bytes()), id);
        total += sizes.back().first;
    }
    std::ranges::sort(sizes);
    for (; total > limit_bytes_ / 4 * 3 && !sizes.empty(); sizes.pop_back()) {
        total -= sizes.back().first;
        drop(sizes.back().second);
    }
    for (const auto& [_, id] : sizes) {
        LoggedEpisode& episode = episodes_[id];
        episodes_bytes_ -= episode.size_bytes();
        episode.outcomes.reserve(num_logged(episode));
        episode.actions.reserve(num_logged(episode) * slab_.action_bytes());
        episodes_bytes_ += episode.size_bytes();
    }
    while (!batches_.is_empty()) {
        const std::uint64_t until = batches_.oldest_end();
        for (const auto& [_, id] : sizes) move_rows(id, until);
        batches_.release(until);
        batches_.trim(limit_bytes_ - std::min(episodes_bytes_, limit_bytes_));
    }
}

}  // namespace stepmill
