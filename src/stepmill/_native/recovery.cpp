// The ledger after a fault: episodes that are cut short and marked, workers that come back.
//
// While a command is settled by a fault, or its worker is dead, the row's result words are the pool's to write: their owner
// has lost the claim to them, or is gone.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <cstring>

#include "ledger.hpp"
#include "reaper.hpp"

namespace stepmill {

bool Ledger::is_ended(std::uint32_t id) const {
    return !is_batched_ && !envs_[id].is_taking && *slab_->over(row_of(id)) != 0;
}

// A batched env whose rows have all ended begins anew with its next step: between episodes there is nothing to cut short.
bool Ledger::resets_itself(std::uint32_t id, bool is_received) const {
    return is_batched_ && autoreset_ == Autoreset::NEXT_STEP && have_all_ended(id, is_received);
}

bool Ledger::have_all_ended(std::uint32_t id, bool is_received) const {
    const std::uint8_t* over = is_batched_ && is_received ? ended_.data() + row_of(id) : slab_->over(row_of(id));
    return std::all_of(over, over + batch_size_, [](std::uint8_t flag) { return flag != 0; });
}

// Asked of the books, not of the slab: who died over a result may have written half of it.
void Ledger::note_ended(std::uint32_t id, bool is_cut) {
    std::uint8_t* ended = ended_.data() + row_of(id);
    if (is_cut) std::fill_n(ended, batch_size_, std::uint8_t{1});
    else std::copy_n(slab_->over(row_of(id)), batch_size_, ended);
}

// Each row says so, but for one whose episode had ended before, and whose next one was to begin now: it waits once more.
void Ledger::mark_truncated(std::uint32_t id) {
    const bool goes_on = static_cast<bool>(envs_[id].final_obs);  // SAME_STEP: who is alive is so in the next episode
    for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) {
        const Column& flags = slab_->plan.outcome.truncated;
        const Column& alive = slab_->plan.outcome.alive;
        const std::vector<std::uint8_t> before(slab_->alive(row), slab_->alive(row) + alive.row_bytes);
        slab_->clear_outcome(row);
        if (is_batched_ && ended_[row] && autoreset_ != Autoreset::SAME_STEP) {
            std::memset(slab_->alive(row), 0, alive.row_bytes);
            continue;
        }
        std::memset(slab_->truncated(row), 1, flags.row_bytes);
        const bool is_any = std::ranges::any_of(before, [](std::uint8_t flag) { return flag != 0; });
        if (is_any) std::memcpy(slab_->truncated(row), before.data(), before.size());  // the dead do not end twice
        std::memset(slab_->alive(row), goes_on, alive.row_bytes);
        *slab_->over(row) = 1;
    }
}

// ---- episodes that are cut short --------------------------------------------------------------------------------

// What cutting short needs of memory, before anything is changed: SAME_STEP hands out the last observation beside the next first one.
void Ledger::keep_final_obs(const Ids& ids) {
    if (autoreset_ != Autoreset::SAME_STEP) return;
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        if ((env.is_lost || env.fault_info) && !env.final_obs) env.final_obs = env_obs(id, env.opaques, false);
    }
}

// The result to come of a pending env says that its episode is over. NEXT_STEP and DISABLED have it at once, with the last good
// observation; under SAME_STEP the next episode's first observation belongs to it, so that its reset has to be waited for.
void Ledger::cut_short(std::uint32_t id) {
    EnvBook& env = envs_[id];
    if (env.is_lost) env.fault_info = env.lost_info;
    env.is_lost = false;
    env.needs_restore = true;
    // Of an episode whose end was received: what the slab says of its return was told. Of what it says else one may have died in the middle.
    for (std::uint32_t row = row_of(id); row < row_of(id) + batch_size_; ++row) {
        if (ended_[row] != 0) slab_->clear_episode(row);
    }
    if (autoreset_ == Autoreset::SAME_STEP) return;  // keep_final_obs() was there
    const Seat seat = slab_->seats[env.server];
    slab_->words[seat.worker].fault[seat.local].store(0, std::memory_order_relaxed);
    book_->unpin(env.target);
    env.target = env.latest;
    book_->pin(env.target);
}

void Ledger::empty_row(std::uint32_t id) {
    slab_->clear_outcome(row_of(id));
    std::memset(slab_->alive(row_of(id)), 0, slab_->plan.outcome.alive.row_bytes);
}

// An exhausted env in a step of all: it is given no command, and its row says that nothing happened.
void Ledger::mask(std::uint32_t id) {
    EnvBook& env = envs_[id];
    env.is_masked = true;
    empty_row(id);
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
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    if (!env.is_own_reset) {
        if (!env.fault_info) env.fault_info = std::move(fault_info);  // the first cause is told, whatever came after
        keep_final_obs({env_id});
        cut_short(env_id);
        if (!env.final_obs) return;
    }
    begin_episode(env_id, words, seat.local);
    set_command(words, seat.local, Command::RESET);
    note_command(env_id, words, seat.local, Command::STEP);
    give(env_id, Command::RESET, env.target);
}

// The command under way begins an episode: give it once more, with the seed that it had.
void Ledger::retry_reset(std::uint32_t id) {
    EnvBook& env = envs_[id];
    const Seat seat = slab_->seats[env.server];
    ServerWords& words = slab_->words[seat.worker];
    const bool is_automatic = get_command(words, seat.local) == Command::STEP;
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
    if (env.is_taking) drop_staged(id);  // what stands in for it goes to its own row
    words.row[seat.local] = row_of(id);
    set_command(words, seat.local, command);
    words.slot[seat.local] = static_cast<std::uint8_t>(slot);
    publish_ticket(seat, ++env.ticket);
    scanned_ = 0;
    if (inline_ != nullptr || helper_) return;
    ring_worker(*slab_->workers[seat.worker]);
    check_deaths_of(seat.worker);
}

// A new episode in place of the step that was commanded; with the seed that it would have had.
void Ledger::begin_episode(std::uint32_t id, ServerWords& words, std::uint32_t local) {
    EnvBook& env = envs_[id];
    env.needs_restore = false;
    words.flags[local] = autoreset_ == Autoreset::SAME_STEP ? FLAG_AUTO : 0;
    if (num_spares_ != 0) {
        begin_drawn(env.server, words, local);
        return;
    }
    if (!env.has_seed || seeding_ == Seeding::CONTINUE) return;
    words.flags[local] = static_cast<std::uint8_t>(words.flags[local] | FLAG_SEED | FLAG_EPISODE);
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
        if (!is_settled || env.is_masked) continue;
        ServerBook& server = servers_[env.server];
        if (server.is_staged && env.status == EnvStatus::IDLE) {
            if (!is_done(id)) continue;  // its worker's successor will do it
            server.is_staged = false;
        }
        env.needs_restore = true;
        // Under SAME_STEP no env is between episodes: with the end of one the beginning of the next was told, or will be.
        const bool is_between = is_ended(id) || resets_itself(id, env.status == EnvStatus::IDLE) || env.fault_info;
        if (is_between && autoreset_ != Autoreset::SAME_STEP) continue;
        env.is_lost = true;
        env.lost_info = fault_info;
    }
}

// ---- workers that are replaced ----------------------------------------------------------------------------------

void Ledger::attach_reaper(nb::object reaper) {
    reaper_ = nb::cast<Reaper*>(reaper);
    reaper_object_ = std::move(reaper);
}

void Ledger::declare_dead(std::uint32_t worker) {
    const InUse in_use(*this);
    if (reaper_ != nullptr) reaper_->declare_dead(worker);
}

// Tickets are held until finish_replacement(): the one that is to be replaced may live, its successor may fail although it
// serves already, and calls that are repeated come before any command.
void Ledger::begin_replacement(std::uint32_t worker, bool is_replayed) {
    const InUse in_use(*this);
    is_restarting_.at(worker) = 1;
    for (const std::uint32_t server : slab_->plan.servers[worker]) {
        servers_[server].lost_with = published_ticket(server);
        if (is_replayed) stage_once_more(server);
    }
    for (const std::uint32_t id : served_by(worker)) {
        EnvBook& env = envs_[id];
        std::erase(playing_, id);
        std::erase_if(events_, [id](const Event& event) { return event.env == id; });
        if (env.replay) env.replay->phase = Replay::Phase::WAITING;
        const bool has_episode = env.status == EnvStatus::PENDING || env.status == EnvStatus::EXHAUSTED || (env.status == EnvStatus::IDLE && !servers_[env.server].is_staged);
        if (is_replayed && has_episode && !env.needs_restore) hold_env(id);
        if (!is_replayed && env.replay) end_hold_with_fault(id);
    }
}

void Ledger::clear_dead_worker(std::uint32_t worker) {
    if (!slab_) return;
    if (reaper_ != nullptr) reaper_->declare_dead(worker);
    rewrite_control_words(worker);
    free_overflow(worker);
}

void Ledger::finish_replacement(std::uint32_t worker, int pidfd) {
    const InUse in_use(*this);
    if (reaper_ != nullptr) reaper_->watch(worker, pidfd);
    end_restart(worker);
    check_deaths_of(worker);
}

// There is no successor: pending commands become faults.
void Ledger::cancel_replacement(std::uint32_t worker) {
    const InUse in_use(*this);
    end_restart(worker);
    for (const std::uint32_t id : served_by(worker)) {
        if (envs_[id].replay) end_hold_with_fault(id);
    }
    check_deaths_of(worker);
}

// The worker stays dead: its envs that wait for a command are FAULTED until a reset brings them back.
void Ledger::fail_worker(std::uint32_t worker) {
    cancel_replacement(worker);
    for (const std::uint32_t id : served_by(worker)) {
        if (envs_[id].status == EnvStatus::IDLE || envs_[id].status == EnvStatus::NEW) envs_[id].status = EnvStatus::FAULTED;
    }
}

// Of a worker that is gone: what it may have scribbled over its words is written anew, as far as the pool knows it. What it had
// been commanded is done by now, or lost; what was commanded since its restart began is its successor's.
void Ledger::rewrite_control_words(std::uint32_t worker) {
    note_rebuilt(worker);
    WorkerControl& control = *slab_->workers.at(worker);
    ServerWords& words = slab_->words[worker];
    control.requests.store(num_posted_[worker], std::memory_order_relaxed);
    control.stop.store(is_closed_.load(), std::memory_order_relaxed);
    control.parked.store(0, std::memory_order_relaxed);
    control.serving.store(0, std::memory_order_relaxed);
    control.current.store(NO_SERVER, std::memory_order_relaxed);
    const std::vector<std::uint32_t>& servers = slab_->plan.servers[worker];
    for (std::uint32_t local = 0; local < servers.size(); ++local) {
        const std::uint32_t ticket = published_ticket(servers[local]);
        const bool is_done = words.done[local].load(std::memory_order_acquire) == ticket;
        const bool is_lost = !is_done && (!is_restarting_[worker] || ticket == servers_[servers[local]].lost_with);
        const std::uint32_t last = is_done || is_lost ? ticket : ticket - 1;
        words.ticket[local].store(is_restarting_[worker] ? last : ticket, std::memory_order_relaxed);
        if (is_lost) {
            words.result[local] = 0;
            words.payload_bytes[local] = 0;
            words.fault[local].store(static_cast<std::uint32_t>(Fault::DIED), std::memory_order_relaxed);
        }
        words.state[local].store(state_word(last, Phase::IDLE), std::memory_order_relaxed);
        words.done[local].store(last, std::memory_order_release);
    }
    ring_pool(*slab_->pool);
}

// A dead worker's values that nobody will read any more give their memory back; its successor writes behind them.
void Ledger::free_overflow(std::uint32_t worker) {
    std::vector<OverflowRef> kept;
    for (std::uint32_t id = 0; id < num_envs_; ++id) {
        const Seat seat = slab_->seats[envs_[id].server];
        const ServerWords& words = slab_->words[seat.worker];
        const bool is_awaited = envs_[id].status == EnvStatus::PENDING && is_done(id) && (words.result[seat.local] & RESULT_REMOTE);
        if (seat.worker == worker && is_awaited) kept.push_back({words.payload_offset[seat.local], words.payload_bytes[seat.local], 0});
    }
    free_all_but(slab_->result_fds.at(worker), std::move(kept));
}

// FAULTED envs whose worker lives again: as good as new.
void Ledger::renew(nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].status == EnvStatus::FAULTED) envs_[id].status = EnvStatus::NEW;
    }
}

// There is no successor, or it serves by now.
void Ledger::end_restart(std::uint32_t worker) {
    if (!is_restarting_[worker]) return;
    is_restarting_[worker] = 0;
    for (const std::uint32_t server : slab_->plan.servers[worker]) publish_ticket(slab_->seats[server], published_ticket(server));
    ring_worker(*slab_->workers[worker]);
}

}  // namespace stepmill
