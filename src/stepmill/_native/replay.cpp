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
    note_begun(id, is_explicit, is_explicit || get_command(words, local) == Command::RESET || (autoreset_ == Autoreset::NEXT_STEP && is_ended(id)));
    const bool is_own_seed = env.is_reset && (words.flags[local] & FLAG_SEED) && !(words.flags[local] & FLAG_EPISODE);
    if (is_own_seed) {
        env.base_seed = words.seed[local];
        env.has_seed = true;
        env.episode = 0;
    } else if (env.is_reset && !env.log.has_next_seed()) {
        ++env.episode;  // as its worker counts: a seed that is no word leaves the count as it is
    }
}

void Ledger::note_begun(std::uint32_t id, bool is_explicit, bool is_reset) {
    EnvBook& env = envs_[id];
    env.is_reset = is_reset;
    if (is_reset && !is_explicit) env.log.next_blob.reset();
    if (is_explicit) env.is_lost = env.needs_restore = false, env.fault_info.reset(), env.final_obs.reset();
    env.is_own_reset = !is_reset && resets_itself(id);
    servers_[env.server].num_begun += is_reset;
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
        slab_->copy_rows(slab_->plan.outcome.terminated, 0, reinterpret_cast<std::byte*>(flags_.data()));
        for (const RowRun& run : slab_->plan.runs) {
            const std::uint8_t* truncated = slab_->truncated(run.first);
            for (std::size_t i = 0; i < run.num; ++i) flags_[run.first + i] = static_cast<std::uint8_t>(flags_[run.first + i] | truncated[i] << 1);
        }
        gather_hashes();
        slab_->copy_rows(slab_->plan.outcome.reward, 0, reinterpret_cast<std::byte*>(rewards_.data()));
    } else {
        for (std::uint32_t id = 0; id < num_envs_; ++id) {
            const Outcome outcome = outcome_of(id);
            rewards_[id] = outcome.reward, hashes_[id] = outcome.hash, flags_[id] = outcome.flags;
        }
    }
    journal_.write(rewards_.data());
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
    std::memcpy(sums.data() + returns, slab_->episode_length(row_of(id)), lengths);
    return sums;
}

void Ledger::restore_sums(std::uint32_t id, const std::vector<std::byte>& sums) {
    const std::size_t lengths = sizeof(std::int64_t) * batch_size_, returns = sums.size() - lengths;
    std::memcpy(slab_->episode_return(row_of(id)), sums.data(), returns);
    std::memcpy(slab_->episode_length(row_of(id)), sums.data() + returns, lengths);
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

// What the rows of an env say beside observation, return and length: copy(bytes, size) for each column.
template <typename Copy>
void Ledger::walk_outcome(std::uint32_t id, Copy copy) const {
    const OutcomePlan& plan = slab_->plan.outcome;
    for (const Column* column : {&plan.reward, &plan.terminated, &plan.truncated, &plan.alive}) copy(slab_->base + column->at(0, row_of(id)), column->row_bytes * batch_size_);
    for (const Column& column : slab_->plan.info) copy(slab_->base + column.at(0, row_of(id)), column.row_bytes * batch_size_);
    copy(reinterpret_cast<std::byte*>(slab_->over(row_of(id))), batch_size_);
}

// ---- envs that are held ------------------------------------------------------------------------------------------

void Ledger::hold(std::uint32_t env_id) {
    const InUse in_use(*this);
    hold_env(env_id);
}

// From here to release() the env counts as busy, whatever its worker publishes.
void Ledger::hold_env(std::uint32_t id) {
    EnvBook& env = envs_.at(id);
    if (env.replay) return;
    auto replay = std::make_unique<Replay>();
    const bool is_commanded = env.is_commanded();
    replay->was_ended = !is_commanded && is_ended(id);
    const bool is_counted = env.status == EnvStatus::EXHAUSTED || env.is_masked || replay->was_ended;
    replay->was_last = budget_ != 0 && env.num_ended + (is_counted ? 0 : 1) >= budget_;
    replay->action.resize(action_bytes());
    copy_action(id, replay->action.data(), true);
    replay->sums = copy_sums(id);
    if (env.is_kept) walk_outcome(id, [&](std::byte* row, std::size_t size) { replay->outcome.insert(replay->outcome.end(), row, row + size); });
    replay->never_done.store(env.ticket + (1u << 31), std::memory_order_relaxed);
    env.done = &replay->never_done;
    env.replay = std::move(replay);
    ++num_held_envs_;
    scanned_ = 0;
}

void Ledger::release_env(std::uint32_t id) {
    EnvBook& env = envs_[id];
    const Seat seat = slab_->seats[env.server];
    env.done = &slab_->words[seat.worker].done[seat.local];
    copy_action(id, env.replay->action.data(), false);
    env.replay.reset();
    --num_held_envs_;
    std::erase(playing_, id);
    scanned_ = 0;
}

// It is not replayed. What the slab says of its episode is again what the user knows, and a stale result is none.
void Ledger::end_hold_with_fault(std::uint32_t id) {
    EnvBook& env = envs_[id];
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    restore_sums(id, env.replay->sums);
    const std::byte* kept = env.replay->outcome.data();
    if (!env.replay->outcome.empty()) walk_outcome(id, [&](std::byte* row, std::size_t size) { std::memcpy(row, kept, size), kept += size; });
    if (!env.is_commanded() && !is_batched_) *slab_->over(row_of(id)) = env.replay->was_ended;
    if (env.is_masked) empty_row(id);
    words.flags[seat.local] = 0;
    release_env(id);
    if (words.done[seat.local].load(std::memory_order_acquire) != env.ticket) return;  // its worker is killed, and what it was at becomes a fault
    words.result[seat.local] = 0;
    words.payload_bytes[seat.local] = 0;
    words.fault[seat.local].store(static_cast<std::uint32_t>(env.is_commanded() ? Fault::DIED : Fault::NONE), std::memory_order_relaxed);
}

void Ledger::fail_replay(std::uint32_t env_id) {
    const InUse in_use(*this);
    if (envs_.at(env_id).replay) end_hold_with_fault(env_id);
}

nb::list Ledger::held_envs() const {
    nb::list ids;
    for (std::uint32_t id = 0; num_held_envs_ != 0 && id < num_envs_; ++id) {
        if (envs_[id].replay) ids.append(id);
    }
    return ids;
}

// A step that is sent to a held env: its action was kept beside the row by write_actions().
void Ledger::dispatch_held(std::uint32_t id) {
    EnvBook& env = envs_[id];
    note_begun(id, false, autoreset_ == Autoreset::NEXT_STEP && env.replay->was_ended);
    if (env.is_reset) ++env.episode;
    env.replay->is_sent = true;
}

// ---- replay -----------------------------------------------------------------------------------------------------

// Begins to play the episode of a held env again, up to the last result that the user has: by the same words as ever, one
// command after the other, while the pool waits (advance_replays). Results go to a private slot where nothing of the env lies.
bool Ledger::begin_replay(std::uint32_t env_id, nb::handle places) {
    const InUse in_use(*this);
    EnvBook& env = envs_.at(env_id);
    if (!env.replay) raise(errors().bug, "only an env that is held can be played again");
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    if (env.is_commanded() && env.is_reset) {  // nothing of the old episode is needed
        if (env.replay->is_sent) set_command(words, seat.local, Command::STEP);
        release_env(env_id);
        retry_reset(env_id);
        return false;
    }
    take_log(env_id);
    Replay& replay = *env.replay;
    replay.step = 0;
    replay.places = nb::cast<Ids>(places);
    replay.slot = 0;
    words.flags[seat.local] = FLAG_SEED | FLAG_EPISODE;
    words.seed[seat.local] = env.base_seed;
    words.episode[seat.local] = env.episode;
    if (env.log.blob) write_blob(env_id, env.log.blob.ptr());
    give_replayed(env_id);
    return true;
}

// Gives the next command of the log, or tells that there is none.
void Ledger::give_replayed(std::uint32_t id) {
    EnvBook& env = envs_[id];
    Replay& replay = *env.replay;
    const Seat seat = slab_->seats[env.server];
    std::erase(playing_, id);
    if (replay.step == env.log.outcomes.size()) {
        add_event(id, ReplayEvent::PLAYED, replay.step);
        return;
    }
    if (replay.step == 1) slab_->words[seat.worker].flags[seat.local] = replay.was_last ? FLAG_LAST : 0;
    if (replay.step > 0) copy_action(id, env.log.actions.data() + (replay.step - 1) * action_bytes(), false);
    replay.slot = 0;
    while (replay.slot == env.latest || replay.slot == env.target) ++replay.slot;
    replay.phase = Replay::Phase::PLAYING;
    playing_.push_back(id);
    give(id, replay.step == 0 ? Command::RESET : Command::STEP, replay.slot);
}

void Ledger::add_event(std::uint32_t id, ReplayEvent event, std::size_t step) {
    envs_[id].replay->phase = Replay::Phase::PAUSED;
    std::erase(playing_, id);
    events_.push_back({id, event, step});
}

// Each result is compared with what the same command gave the first time.
void Ledger::advance_replays() {
    for (std::size_t i = playing_.size(); i-- > 0;) {
        const std::uint32_t id = playing_[i];
        EnvBook& env = envs_[id];
        Replay& replay = *env.replay;
        const Seat seat = slab_->seats[env.server];
        if (slab_->words[seat.worker].done[seat.local].load(std::memory_order_acquire) != env.ticket) continue;
        if (has_fault(id)) {
            add_event(id, ReplayEvent::FAULT, replay.step);
        } else if (!(outcome_of(id) == env.log.outcomes[replay.step])) {
            add_event(id, ReplayEvent::DIFFERS, replay.step);
        } else if (std::ranges::count(replay.places, ++replay.step) != 0) {
            add_event(id, ReplayEvent::PLACE, replay.step);
        } else {
            give_replayed(id);
        }
    }
}

// A replay that waits for Python has no command that becomes a fault when its worker dies, in a repeated call for example.
void Ledger::find_lost_replays() {
    for (const std::uint32_t id : all_) {
        const EnvBook& env = envs_[id];
        if (!env.replay || env.replay->phase != Replay::Phase::PAUSED) continue;
        const std::uint32_t worker = slab_->seats[env.server].worker;
        if (is_restarting_[worker] || slab_->workers[worker]->buried.load(std::memory_order_acquire) == 0) continue;
        const bool has_event = std::ranges::any_of(events_, [id](const Event& event) { return event.env == id; });
        if (has_event) continue;
        env.replay->phase = Replay::Phase::WAITING;
        events_.push_back({id, ReplayEvent::FAULT, env.replay->step});
    }
}

void Ledger::continue_replay(std::uint32_t env_id) {
    const InUse in_use(*this);
    if (!envs_.at(env_id).replay || envs_[env_id].replay->phase != Replay::Phase::PAUSED) raise(errors().bug, "only a replay that has stopped can go on");
    give_replayed(env_id);
}

void Ledger::finish_replay(std::uint32_t env_id) {
    const InUse in_use(*this);
    EnvBook& env = envs_.at(env_id);
    if (!env.replay) raise(errors().bug, "only an env that is held can be released");
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    words.flags[seat.local] = 0;
    release_env(env_id);
    if (env.is_masked) empty_row(env_id);  // what it says is that nothing happened, once more
    if (!env.is_commanded()) return;
    if (is_last(env)) words.flags[seat.local] = FLAG_LAST;
    give(env_id, Command::STEP, env.target);
}

void Ledger::notify() {
    is_notified_.store(true, std::memory_order_release);
    if (slab_) ring_pool(*slab_->pool);
}

nb::list Ledger::take_events() {
    const InUse in_use(*this);
    is_notified_.store(false, std::memory_order_release);
    nb::list events;
    for (const Event& event : events_) events.append(nb::make_tuple(event.env, static_cast<int>(event.event), event.step));
    events_.clear();
    return events;
}

}  // namespace stepmill
