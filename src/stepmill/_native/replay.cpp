// The ledger's logs of episodes, and episodes that are played again from them.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>
#include <utility>

#include <nanobind/stl/vector.h>

#include "ledger.hpp"

namespace stepmill {

namespace {

constexpr std::size_t KEPT_LOG_BYTES = 4 << 10;  // memory that an env's next log begins with

}  // namespace

// ---- logs of episodes -------------------------------------------------------------------------------------------

void Ledger::note_command(std::uint32_t id, const ServerWords& words, std::uint32_t local, Command command) {
    EnvBook& env = envs_[id];
    const bool is_explicit = command == Command::RESET;
    env.is_reset = is_explicit || get_command(words, local) == Command::RESET || (autoreset_ == Autoreset::NEXT_STEP && is_ended(id));
    if (env.is_reset && !is_explicit) env.log.next_blob.reset();
    if (is_explicit) env.is_lost = env.needs_restore = false, env.fault_info.reset(), env.final_obs.reset();
    env.is_own_reset = !env.is_reset && resets_itself(id);
    servers_[env.server].num_begun += env.is_reset;
    const bool is_own_seed = env.is_reset && (words.flags[local] & FLAG_SEED) && !(words.flags[local] & FLAG_EPISODE);
    if (is_own_seed) {
        env.base_seed = words.seed[local];
        env.has_seed = true;
        env.episode = 0;
    } else if (env.is_reset && !env.log.has_next_seed()) {
        ++env.episode;  // as its worker counts: a seed that is no word leaves the count as it is
    }
}

Outcome Ledger::outcome_of(std::uint32_t id) const {
    const std::uint32_t row = row_of(id);
    const OutcomePlan& plan = slab_->plan.outcome;
    Outcome outcome;
    outcome.hash = *envs_[id].hash;
    outcome.flags = static_cast<std::uint8_t>(*slab_->terminated(row) | *slab_->truncated(row) << 1);
    if (is_plain_ && !is_batched_) {
        outcome.reward = slab_->reward_item(row, 0);
        return outcome;
    }
    const std::size_t num_flags = std::max<std::size_t>(plan.num_agents, 1);
    for (std::uint32_t each = row; each < row + batch_size_; ++each) {
        for (std::size_t i = 0; i < plan.num_rewards; ++i) outcome.reward = 1.000000119 * outcome.reward + slab_->reward_item(each, i);
        for (std::size_t agent = each == row ? 1 : 0; agent < num_flags; ++agent) {
            const int flags = slab_->terminated(each)[agent] | slab_->truncated(each)[agent] << 1;
            outcome.flags = static_cast<std::uint8_t>(31 * outcome.flags + flags);
        }
    }
    return outcome;
}

// Received. What comes with the results of all other envs is in the journal already.
void Ledger::note_result(std::uint32_t id, bool is_journaled) {
    EnvBook& env = envs_[id];
    const bool begins_next = autoreset_ == Autoreset::SAME_STEP && is_ended(id) && !is_last(env);
    if (begins_next && !env.is_reset) ++env.episode;
    if (log_limit_ == 0) return;
    if (env.is_reset || begins_next) note_episode(env);
    ++env.log.length;
    if (env.fault_info) drop_log(env.log);  // cut short: it cannot be played again
    if (!env.log.is_whole) return;
    is_recorded_ = true;
    if (!is_journaled) record(id);
}

void Ledger::note_episode(EnvBook& env) {
    EpisodeLog& log = env.log;
    ++log.episode;
    log.length_before = std::exchange(log.length, 0);
    log_bytes_ -= log.size_bytes();
    if (log.size_bytes() > KEPT_LOG_BYTES) log.free();
    log.actions.clear();
    log.outcomes.clear();
    log_bytes_ += log.size_bytes();
    log.blob = std::exchange(log.next_blob, nb::object());
    log.first = journal_.end();
    log.is_whole = env.has_seed && action_.num_opaques == 0;
}

// A result that came without those of all other envs.
void Ledger::record(std::uint32_t id) {
    take_log(id);
    EpisodeLog& log = envs_[id].log;
    Outcome outcome = outcome_of(id);
    log_bytes_ -= log.size_bytes();
    if (log.outcomes.empty()) {
        outcome.reward = 0.0, outcome.flags = 0;  // these end the old episode; played again, a reset is what begins it
    } else {
        const std::size_t size = log.actions.size();
        log.actions.resize(size + action_bytes());
        copy_action(id, log.actions.data() + size, true);
    }
    log.outcomes.push_back(outcome);
    log_bytes_ += log.size_bytes();
    mind_limit();
}

// Writes the results of all envs behind the journal's last batch, before anything else is done about them.
void Ledger::write_batch() {
    journal_.begin();
    if (num_spares_ == 0) {  // on their way from the workers' caches meanwhile
        for (std::uint32_t worker = 0; worker < num_workers_; ++worker) __builtin_prefetch(slab_->words[worker].hash);
    }
    for (const Leaf& leaf : action_.leaves) journal_.write(slab_->base + leaf.column.at(0, 0));
    if (is_plain_ && !is_batched_) {
        const std::uint8_t *terminated = slab_->terminated(0), *truncated = slab_->truncated(0);
        for (std::uint32_t id = 0; id < num_envs_; ++id) flags_[id] = static_cast<std::uint8_t>(terminated[id] | truncated[id] << 1);
        gather_hashes();
        journal_.write(slab_->reward(0));
    } else {
        for (std::uint32_t id = 0; id < num_envs_; ++id) {
            const Outcome outcome = outcome_of(id);
            rewards_[id] = outcome.reward, hashes_[id] = outcome.hash, flags_[id] = outcome.flags;
        }
        journal_.write(rewards_.data());
    }
    journal_.write(hashes_.data());
    journal_.write(flags_.data());
    is_recorded_ = false;
}

// Worker by worker: what others have written comes a cache line at a time.
void Ledger::gather_hashes() {
    if (num_spares_ != 0) {
        for (std::uint32_t id = 0; id < num_envs_; ++id) hashes_[id] = *envs_[id].hash;
        return;
    }
    for (std::uint32_t worker = 0; worker < num_workers_; ++worker) {
        const ObsHash* hash = slab_->words[worker].hash;
        for (const std::uint32_t id : slab_->plan.servers[worker]) hashes_[id] = *hash++;
    }
}

// It becomes a part of the journal, unless nobody's log is whole.
void Ledger::add_batch() {
    if (!is_recorded_) return;
    journal_.add();
    if (journal_.is_full()) {
        std::uint64_t first = journal_.end();
        for (const EnvBook& env : envs_) first = env.log.is_whole ? std::min(first, env.log.first) : first;
        journal_.release(first);
    }
    mind_limit();
}

// At most so much memory for all logs together, but for the newest batch.
void Ledger::limit_logs(std::uint64_t size_bytes) {
    const InUse in_use(*this);
    log_limit_ = std::max<std::uint64_t>(size_bytes, 1);
    mind_limit();
}

void Ledger::mind_limit() {
    if (log_bytes_ + journal_.memory_bytes() <= log_limit_) return;
    if (log_bytes() > log_limit_) take_logs();
    journal_.trim(log_limit_ - std::min(log_bytes_, log_limit_));
}

// Its own results and those that the journal has for it.
std::uint64_t Ledger::num_logged(const EpisodeLog& log) const { return log.outcomes.size() + (journal_.end() - std::min(log.first, journal_.end())); }

// An env's log as a whole.
void Ledger::take_log(std::uint32_t id, std::uint64_t until) {
    EpisodeLog& log = envs_[id].log;
    if (!log.is_whole) return;
    log_bytes_ -= log.size_bytes();
    journal_.move_to(log, id, until);
    log_bytes_ += log.size_bytes();
}

// Empties the journal, chunk by chunk. Before that the longest logs go, until a quarter of the memory is free.
void Ledger::take_logs() {
    const std::size_t row_bytes = action_bytes() + sizeof(Outcome);
    std::vector<std::pair<std::size_t, std::uint32_t>> sizes;
    std::size_t total = 0;
    for (const std::uint32_t id : all_) {
        const EpisodeLog& log = envs_[id].log;
        if (!log.is_whole) continue;
        sizes.emplace_back(std::max<std::size_t>(num_logged(log) * row_bytes, log.size_bytes()), id);
        total += sizes.back().first;
    }
    std::ranges::sort(sizes);
    for (; total > log_limit_ / 4 * 3 && !sizes.empty(); sizes.pop_back()) {
        total -= sizes.back().first;
        drop_log(envs_[sizes.back().second].log);
    }
    for (const auto& [_, id] : sizes) {
        EpisodeLog& log = envs_[id].log;
        log_bytes_ -= log.size_bytes();
        log.outcomes.reserve(num_logged(log));
        log.actions.reserve(num_logged(log) * action_bytes());
        log_bytes_ += log.size_bytes();
    }
    while (!journal_.is_empty()) {
        const std::uint64_t until = journal_.oldest_end();
        for (const auto& [_, id] : sizes) take_log(id, until);
        journal_.release(until);
        journal_.trim(log_limit_ - std::min(log_bytes_, log_limit_));
    }
}

void Ledger::drop_log(EpisodeLog& log) {
    log_bytes_ -= log.size_bytes();
    log.is_whole = false;
    log.free();
}

// ---- replay -----------------------------------------------------------------------------------------------------

std::size_t Ledger::action_bytes() const {
    std::size_t size = 0;
    for (const Leaf& leaf : action_.leaves) size += leaf.row_bytes * batch_size_;
    return size;
}

// An env's row of actions, all leaves one after the other: read into `bytes`, or written from them.
void Ledger::copy_action(std::uint32_t id, std::byte* bytes, bool is_read) const {
    for (const Leaf& leaf : action_.leaves) {
        std::byte* row = slab_->base + leaf.column.at(0, row_of(id));
        const std::size_t size = leaf.row_bytes * batch_size_;
        std::memcpy(is_read ? bytes : row, is_read ? row : bytes, size);
        bytes += size;
    }
}

// Return and length of the episode of each of an env's rows.
std::vector<std::byte> Ledger::copy_sums(std::uint32_t id) const {
    const std::size_t returns = slab_->plan.outcome.episode_return.row_bytes * batch_size_, lengths = sizeof(std::int64_t) * batch_size_;
    std::vector<std::byte> sums(returns + lengths);
    std::memcpy(sums.data(), slab_->episode_return(row_of(id)), returns);
    std::memcpy(sums.data() + returns, slab_->episode_length() + row_of(id), lengths);
    return sums;
}

void Ledger::restore_sums(std::uint32_t id, const std::vector<std::byte>& sums) {
    const std::size_t lengths = sizeof(std::int64_t) * batch_size_, returns = sums.size() - lengths;
    std::memcpy(slab_->episode_return(row_of(id)), sums.data(), returns);
    std::memcpy(slab_->episode_length() + row_of(id), sums.data() + returns, lengths);
}

// Where in its episodes an env object stands, and what was commanded: for who must do something at the same place again.
// Spares are numbered by what they were commanded, since whom they serve changes; else by what was received, since only the
// result of a step says whether it has begun an episode (SAME_STEP).
nb::tuple Ledger::log_place(std::uint32_t server) const {
    const ServerBook& book = servers_.at(server);
    if (book.env == NO_ENV) return nb::make_tuple(book.num_begun, 0, UINT64_MAX, false, true, book.is_staged);
    const EnvBook& env = envs_[book.env];
    const bool is_pending = env.is_commanded();
    const bool is_staged = book.is_staged && !is_pending;
    const bool is_beginning = is_staged || (is_pending && env.is_reset);
    const bool is_between = is_beginning || env.status == EnvStatus::NEW || env.status == EnvStatus::FAULTED;
    if (num_spares_ == 0) return nb::make_tuple(env.log.episode, env.log.length, env.log.length_before, is_pending, is_between, false);
    return nb::make_tuple(book.num_begun, is_beginning ? 0 : env.log.length, UINT64_MAX, is_pending, is_between, is_staged);
}

// Plays the episode of an env again, up to the last result that the user has, then gives the command that was under way once more.
// By the same words as ever; each command is waited for alone. Results go to a private slot where nothing of the env lies.
// between(n, ticket) is called after the first n commands, where n is in `places`. Whatever it or Ctrl-C raises leaves the env
// in the middle; all else is as it was, so that it can be tried again.
int Ledger::replay(std::uint32_t env_id, nb::handle places, nb::handle between) {
    const InUse in_use(*this);
    EnvBook& env = envs_.at(env_id);
    const bool is_pending = env.is_commanded();  // else nothing is under way
    if (is_pending && env.is_reset) {
        retry_reset(env_id);  // nothing of the old episode is needed
        return REPLAYED;
    }
    take_log(env_id);
    if (!is_pending && servers_[env.server].is_staged) return REPLAYED;  // `tend` stages its next episode again
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    std::uint32_t slot = 0;
    while (slot == env.latest || slot == env.target) ++slot;
    std::vector<std::byte> action(action_bytes());
    copy_action(env_id, action.data(), true);
    // Its return and length so far: should it be cut short in the middle of this, they are to be told.
    const std::vector<std::byte> sums = copy_sums(env_id);
    words.flags[seat.local] = FLAG_SEED | FLAG_EPISODE;
    words.seed[seat.local] = env.base_seed;
    words.episode[seat.local] = env.episode;
    if (env.log.blob) write_blob(env_id, env.log.blob.ptr());
    int outcome = REPLAYED;
    auto fail = [&] {
        restore_sums(env_id, sums);
        if (!is_pending) words.fault[seat.local].store(0, std::memory_order_relaxed);  // nobody waits for it: it would be found for ever
    };
    try {
        outcome = replay_log(env_id, slot, nb::cast<Ids>(places), between);
    } catch (...) {
        fail();
        words.flags[seat.local] = 0;
        copy_action(env_id, action.data(), false);
        scanned_ = 0;
        throw;
    }
    words.flags[seat.local] = 0;
    copy_action(env_id, action.data(), false);
    if (outcome != REPLAYED) fail();
    if (env.is_masked) empty_row(env_id);  // what it says is that nothing happened, once more
    if (outcome == REPLAYED && is_pending) {
        if (is_last(env)) words.flags[seat.local] = FLAG_LAST;
        give(env_id, Command::STEP, env.target);
    }
    return outcome;
}

// The reset and every step of the log, each compared with what it gave the first time.
int Ledger::replay_log(std::uint32_t env_id, std::uint32_t slot, const Ids& places, nb::handle between) {
    EnvBook& env = envs_[env_id];
    const Seat seat = slab_->seats[env.server];
    const Ids only{env_id};
    const bool is_counted = env.status == EnvStatus::EXHAUSTED || env.is_masked || (env.status != EnvStatus::PENDING && is_ended(env_id));
    const bool was_last = budget_ != 0 && env.num_ended + (is_counted ? 0 : 1) >= budget_;
    for (std::size_t step = 0; step < env.log.outcomes.size(); ++step) {
        if (step == 1) slab_->words[seat.worker].flags[seat.local] = was_last ? FLAG_LAST : 0;
        if (step > 0) copy_action(env_id, env.log.actions.data() + (step - 1) * action_bytes(), false);
        give(env_id, step == 0 ? Command::RESET : Command::STEP, slot);
        if (wait_ids(only, 1, nb::handle()) != WaitResult::READY) return REPLAY_FAULT;
        if (!(outcome_of(env_id) == env.log.outcomes[step])) return static_cast<int>(step);
        if (std::ranges::count(places, step + 1) != 0) between(step + 1, env.ticket);
    }
    return REPLAYED;
}

// Its replay was broken off, and where it stands nobody knows. What it was last commanded may still go on: wait_for() waits for it.
void Ledger::abandon(std::uint32_t env_id) {
    const InUse in_use(*this);
    EnvBook& env = envs_.at(env_id);
    if (env.status == EnvStatus::PENDING) mark_faulted(env_id);
    env.status = EnvStatus::FAULTED;
    std::erase(pending_, env_id);
    scanned_ = 0;
}

}  // namespace stepmill
