// The ledger after a fault: episodes that are cut short and marked, workers that come back, episodes that are played again.
//
// While a command is settled by a fault, or its worker is dead, the row's result words are the pool's to write: their owner
// has lost the claim to them, or is gone.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "ledger.hpp"

namespace stepmill {

bool Ledger::is_ended(std::uint32_t id) const {
    const std::uint32_t row = row_of(id);
    return !is_batched_ && (slab_->terminated()[row] | slab_->truncated()[row]) != 0;
}

void Ledger::mark_truncated(std::uint32_t id) {
    for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) {
        slab_->reward()[row] = 0.0;
        slab_->terminated()[row] = 0;
        slab_->truncated()[row] = 1;
    }
}

// ---- episodes that are cut short --------------------------------------------------------------------------------

// The result to come of a pending env says that its episode is over. NEXT_STEP and DISABLED have it at once, with the last good
// observation; under SAME_STEP the next episode's first observation belongs to it, so that its reset has to be waited for.
void Ledger::cut_short(std::uint32_t id) {
    EnvBook& env = envs_[id];
    if (env.is_lost) env.fault_info = env.lost_info;
    env.is_lost = false;
    env.needs_restore = true;
    if (autoreset_ == Autoreset::SAME_STEP) {
        env.final_obs = env_obs(id, env.opaques, false);
        return;
    }
    const Seat seat = slab_->seats[env.server];
    slab_->words[seat.worker].fault[seat.local].store(0, std::memory_order_relaxed);
    book_->unpin(env.target);
    env.target = env.latest;
    book_->pin(env.target);
}

// A pending env with a fault: a reset is tried again, a step's episode is over.
void Ledger::truncate(std::uint32_t env_id, nb::object fault_info) {
    const InUse in_use(*this);
    EnvBook& env = envs_.at(env_id);
    if (env.status != EnvStatus::PENDING || !is_done(env_id)) raise(errors().bug, "only an env that has a result can be cut short");
    scanned_ = 0;
    if (env.is_reset) {
        retry_reset(env_id);
        return;
    }
    if (!env.fault_info) env.fault_info = std::move(fault_info);  // the first cause is told, whatever came after
    cut_short(env_id);
    if (!env.final_obs) return;
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    begin_episode(env_id, words, seat.local);
    words.command[seat.local] = static_cast<std::uint8_t>(Command::RESET);
    note_command(env_id, words, seat.local, Command::STEP);
    give(env_id, Command::RESET, env.target);
}

// The command under way begins an episode: give it once more, with the seed that it had.
void Ledger::retry_reset(std::uint32_t id) {
    EnvBook& env = envs_[id];
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    const bool is_automatic = words.command[seat.local] == static_cast<std::uint8_t>(Command::STEP);
    if (is_automatic) words.flags[seat.local] = 0;
    if (!(words.flags[seat.local] & FLAG_SEED) && env.has_seed && seeding_ != Seeding::CONTINUE) {
        words.flags[seat.local] = static_cast<std::uint8_t>(words.flags[seat.local] | FLAG_SEED | FLAG_EPISODE);
        words.seed[seat.local] = env.base_seed;
        words.episode[seat.local] = env.episode;
    }
    give(id, Command::RESET, env.target);
}

// Gives a command outside of send: to an env that has one already, for which it stands in.
void Ledger::give(std::uint32_t id, Command command, std::uint32_t slot) {
    EnvBook& env = envs_[id];
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    words.row[seat.local] = row_of(id);
    words.command[seat.local] = static_cast<std::uint8_t>(command);
    words.slot[seat.local] = static_cast<std::uint8_t>(slot);
    words.ticket[seat.local].store(++env.ticket, std::memory_order_release);
    scanned_ = 0;
    if (inline_ != nullptr) return;
    ring_worker(*slab_->workers[seat.worker]);
    check_deaths_of(seat.worker);
}

// A new episode in place of the step that was commanded; with the seed that it would have had.
void Ledger::begin_episode(std::uint32_t id, ServerWords& words, std::uint32_t local) {
    EnvBook& env = envs_[id];
    env.needs_restore = false;
    words.flags[local] = 0;
    if (!env.has_seed || seeding_ == Seeding::CONTINUE) return;
    words.flags[local] = FLAG_SEED | FLAG_EPISODE;
    words.seed[local] = env.base_seed;
    words.episode[local] = env.episode + 1;
}

// ---- dead workers -----------------------------------------------------------------------------------------------

// Their env objects are gone, or in another state than the user thinks. Who waits for a command is told by its next step.
void Ledger::lose_envs(nb::handle env_ids, nb::object fault_info) {
    const InUse in_use(*this);
    Ids storage;
    mark_lost(parse_ids(env_ids, storage), fault_info);
}

void Ledger::mark_lost(const Ids& ids, const nb::object& fault_info) {
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        const bool is_settled = env.status == EnvStatus::IDLE || (env.status == EnvStatus::PENDING && is_done(id) && !has_fault(id));
        if (!is_settled) continue;
        env.needs_restore = true;
        if (is_ended(id) || env.fault_info) continue;
        env.is_lost = true;
        env.lost_info = fault_info;
    }
}

// The worker stays dead: its envs that wait for a command are FAULTED until a reset brings them back.
void Ledger::mark_failed(std::uint32_t worker) {
    is_restarting_[worker] = 0;
    for (const std::uint32_t id : slab_->plan.servers[worker]) {
        if (envs_[id].status == EnvStatus::IDLE || envs_[id].status == EnvStatus::NEW) envs_[id].status = EnvStatus::FAULTED;
    }
}

void Ledger::fail_worker(std::uint32_t worker) {
    const InUse in_use(*this);
    mark_failed(worker);
}

// FAULTED envs whose worker lives again: as good as new.
void Ledger::renew(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].status == EnvStatus::FAULTED) envs_[id].status = EnvStatus::NEW;
    }
}

// From any thread of the learner, with the GIL: the one that restarts workers is not the one that waits for them.
void Ledger::set_restarting(std::uint32_t worker, bool is_restarting) {
    if (!slab_) return;
    is_restarting_.at(worker) = is_restarting;
    if (!is_restarting) check_deaths_of(worker);
}

// ---- logs of episodes -------------------------------------------------------------------------------------------

void Ledger::note_command(std::uint32_t id, const ServerWords& words, std::uint32_t local, Command command) {
    EnvBook& env = envs_[id];
    const bool is_explicit = command == Command::RESET;
    env.is_reset = is_explicit || words.command[local] == static_cast<std::uint8_t>(Command::RESET) || (autoreset_ == Autoreset::NEXT_STEP && is_ended(id));
    if (is_explicit) env.is_lost = env.needs_restore = false, env.fault_info.reset(), env.final_obs.reset();
    if (is_explicit && (words.flags[local] & FLAG_SEED)) {
        env.base_seed = words.seed[local];
        env.has_seed = true;
        env.episode = 0;
    } else if (env.is_reset) {
        ++env.episode;
    }
}

EpisodeLog::Outcome Ledger::outcome_of(std::uint32_t id) const {
    const Seat seat = slab_->seats[envs_[id].server];
    const std::uint32_t row = row_of(id);
    EpisodeLog::Outcome outcome;
    outcome.reward = slab_->reward()[row];
    outcome.flags = static_cast<std::uint8_t>(slab_->terminated()[row] | slab_->truncated()[row] << 1);
    outcome.hash = slab_->words[seat.worker].hash[seat.local];
    return outcome;
}

void Ledger::note_result(std::uint32_t id) {
    EnvBook& env = envs_[id];
    const bool begins_next = autoreset_ == Autoreset::SAME_STEP && is_ended(id);
    if (begins_next && !env.is_reset) ++env.episode;
    if (log_limit_ != 0) record(env, id);
}

void Ledger::record(EnvBook& env, std::uint32_t id) {
    EpisodeLog& log = env.log;
    const bool begins_next = autoreset_ == Autoreset::SAME_STEP && is_ended(id);
    const bool begins = env.is_reset || begins_next;
    log_bytes_ -= log.size_bytes();
    if (begins) {
        log.actions.clear();
        log.outcomes.clear();
        log.is_whole = env.has_seed && action_.num_opaques == 0;
    } else if (log.is_whole) {
        for (const Leaf& leaf : action_.leaves) {
            const std::byte* action = slab_->base + leaf.column.at(0, row_of(id));
            log.actions.insert(log.actions.end(), action, action + leaf.row_bytes * batch_size_);
        }
    }
    if (log.is_whole) {
        EpisodeLog::Outcome outcome = outcome_of(id);
        if (begins_next) outcome.reward = 0.0, outcome.flags = 0;  // these end the old episode; played again, a reset is what begins it
        log.outcomes.push_back(outcome);
    }
    if (env.fault_info || log_bytes_ + log.size_bytes() > log_limit_) {
        log.is_whole = false;  // cut short, or too long: it cannot be played again
        log.actions = {};
        log.outcomes = {};
    }
    log_bytes_ += log.size_bytes();
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

// Plays the episode of an env again, up to the last result that the user has, then gives the command that was under way once more.
// By the same words as ever; each command is waited for alone. Results go to a private slot where nothing of the env lies.
int Ledger::replay(std::uint32_t env_id) {
    const InUse in_use(*this);
    EnvBook& env = envs_.at(env_id);
    const bool is_pending = env.status == EnvStatus::PENDING;
    if (is_pending && env.is_reset) {
        retry_reset(env_id);  // nothing of the old episode is needed
        return REPLAYED;
    }
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    std::uint32_t slot = 0;
    while (slot == env.latest || slot == env.target) ++slot;
    std::vector<std::byte> action(action_bytes());
    copy_action(env_id, action.data(), true);
    words.flags[seat.local] = FLAG_SEED | FLAG_EPISODE;
    words.seed[seat.local] = env.base_seed;
    words.episode[seat.local] = env.episode;
    if (env.episode == 0 && env.log.blob) write_blob(env_id, env.log.blob.ptr());
    int outcome = REPLAYED;
    try {
        outcome = replay_log(env_id, words, seat.local, slot);
    } catch (...) {  // Ctrl-C: where the env stands nobody knows
        copy_action(env_id, action.data(), false);
        if (is_pending) mark_faulted(env_id);
        env.status = EnvStatus::FAULTED;
        std::erase(pending_, env_id);
        scanned_ = 0;
        throw;
    }
    words.flags[seat.local] = 0;
    copy_action(env_id, action.data(), false);
    if (outcome == REPLAYED && is_pending) give(env_id, Command::STEP, env.target);
    return outcome;
}

// The reset and every step of the log, each compared with what it gave the first time.
int Ledger::replay_log(std::uint32_t env_id, ServerWords& words, std::uint32_t local, std::uint32_t slot) {
    EnvBook& env = envs_[env_id];
    const Ids only{env_id};
    for (std::size_t step = 0; step < env.log.outcomes.size(); ++step) {
        if (step == 1) words.flags[local] = 0;
        if (step > 0) copy_action(env_id, env.log.actions.data() + (step - 1) * action_bytes(), false);
        give(env_id, step == 0 ? Command::RESET : Command::STEP, slot);
        if (wait_ids(only, 1, nb::handle()) != WaitResult::READY) return REPLAY_FAULT;
        if (!(outcome_of(env_id) == env.log.outcomes[step])) return static_cast<int>(step);
    }
    return REPLAYED;
}

}  // namespace stepmill
