// The ledger's commands: what is checked before anything is written, and how commands reach their workers.
#define NO_IMPORT_ARRAY
#include <algorithm>

#include <nanobind/stl/vector.h>

#include "ledger.hpp"
#include "reaper.hpp"

namespace stepmill {

namespace {

std::string list_ids(const std::vector<std::uint32_t>& ids) {
    std::string text = "[";
    for (std::size_t i = 0; i < ids.size() && i < 16; ++i) text += (i ? ", " : "") + std::to_string(ids[i]);
    return text + (ids.size() > 16 ? ", …]" : "]");
}

[[noreturn]] void raise_busy(const std::vector<std::uint32_t>& busy) {
    const std::string text = "envs " + list_ids(busy) + " are still stepping or not received; receive them, or reset them, before they are commanded again";
    nb::list ids;
    for (const std::uint32_t id : busy) ids.append(id);
    const nb::object error = errors().busy(text, nb::arg("env_ids") = ids);
    PyErr_SetObject(errors().busy.ptr(), error.ptr());
    throw nb::python_error();
}

}  // namespace

// Steps all envs and waits; false if a fault came. The caller holds InUse.
bool Ledger::step_all(nb::handle actions) {
    check_idle(all_, Asked::STEP_ALL);
    std::vector<nb::list> opaques;
    write_actions(actions, all_, opaques);
    dispatch(all_, Command::STEP);
    return wait_ids(pending_, num_envs_, nb::handle()) == WaitResult::READY;
}

nb::object Ledger::step(nb::handle actions) {
    const InUse in_use(*this);
    return step_all(actions) ? collect_all() : nb::none();
}

nb::object Ledger::step_obs(nb::handle actions) {
    const InUse in_use(*this);
    if (!step_all(actions)) return nb::none();
    // Infos are gathered only where take_back() could not do it later.
    const bool is_special = obs_.num_opaques != 0 || num_spares_ != 0 || budget_ != 0 || std::ranges::any_of(envs_, [](const EnvBook& env) { return bool(env.fault_info); });
    Payloads payloads;
    if (is_special && !gather_payloads(all_, false, payloads)) return nb::none();
    receive(all_, {}, std::move(payloads), is_special);
    return gather_obs(all_, nullptr);
}

void Ledger::send(nb::handle actions, nb::handle env_ids) {
    const InUse in_use(*this);
    Ids storage;
    const Ids& ids = parse_ids(env_ids, storage);
    check_idle(ids, Asked::STEP);
    std::vector<nb::list> opaques;
    write_actions(actions, ids, opaques);
    dispatch(ids, Command::STEP);
}

void Ledger::send_all(nb::handle actions) {
    const InUse in_use(*this);
    check_idle(all_, Asked::STEP_ALL);
    std::vector<nb::list> opaques;
    write_actions(actions, all_, opaques);
    dispatch(all_, Command::STEP);
}

// seeds: a list of int | None per env; blobs: a list of (seed, options, None) | None per env.
void Ledger::send_reset(nb::handle env_ids, nb::handle seeds, nb::handle blobs) {
    const InUse in_use(*this);
    Ids storage;
    const Ids& ids = parse_ids(env_ids, storage);
    check_idle(ids, Asked::RESET);
    for (const std::uint32_t id : ids) {
        if (envs_[id].replay) raise(errors().bug, "env " + std::to_string(id) + " is held for a replay and cannot be reset; please report this");
    }
    check_workers(ids, Command::RESET);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const std::uint32_t server = envs_[ids[i]].server;
        const Seat seat = slab_->seats[server];
        ServerWords& words = slab_->words[seat.worker];
        nb::object seed = seeds[i], blob = blobs[i];
        envs_[ids[i]].is_taking = servers_[server].is_staged && envs_[ids[i]].status == EnvStatus::IDLE && seed.is_none() && blob.is_none();
        if (envs_[ids[i]].is_taking) continue;
        servers_[server].is_staged = false;
        envs_[ids[i]].log.next_blob = blob.is_none() ? nb::object() : blob;
        write_reset_seed(ids[i], words, seat.local, seed);
        if (!blob.is_none()) write_blob(ids[i], blob.ptr());
        if (num_spares_ != 0) note_own_seed(ids[i], ids.size() == num_envs_);
    }
    dispatch(ids, Command::RESET);
}

// The seed of an explicit reset. Where none is given and episodes derive theirs the worker knows it, unless the object is new.
void Ledger::write_reset_seed(std::uint32_t id, ServerWords& words, std::uint32_t local, nb::handle seed) const {
    const EnvBook& env = envs_[id];
    words.flags[local] = 0;
    if (!seed.is_none()) {
        words.seed[local] = nb::cast<std::uint64_t>(seed);
        words.flags[local] = FLAG_SEED;
        return;
    }
    const bool is_new = env.status != EnvStatus::IDLE || env.is_lost || env.needs_restore;
    if (!is_new || !env.has_seed || seeding_ == Seeding::CONTINUE || num_spares_ != 0) return;
    words.flags[local] = FLAG_SEED | FLAG_EPISODE;
    words.seed[local] = env.base_seed;
    words.episode[local] = env.episode + (env.log.has_next_seed() ? 0 : 1);
}

void Ledger::check_idle(const Ids& ids, Asked asked) const {
    const bool is_reset = asked == Asked::RESET;
    bool is_good = kept_.empty();
    for (const std::uint32_t id : ids) is_good &= envs_[id].status == EnvStatus::IDLE || (is_reset && envs_[id].status != EnvStatus::PENDING);
    if (is_good && (is_reset || autoreset_ != Autoreset::DISABLED)) return;
    Ids busy, faulted, fresh, ended, exhausted;
    for (const std::uint32_t id : ids) {
        if (envs_[id].status == EnvStatus::PENDING || envs_[id].is_kept) busy.push_back(id);
        if (envs_[id].status == EnvStatus::FAULTED) faulted.push_back(id);
        if (envs_[id].status == EnvStatus::NEW) fresh.push_back(id);
        if (envs_[id].status == EnvStatus::EXHAUSTED) exhausted.push_back(id);
        else if (autoreset_ == Autoreset::DISABLED && is_ended(id)) ended.push_back(id);
    }
    if (!busy.empty()) raise_busy(busy);
    if (is_reset) return;
    if (!faulted.empty()) raise(errors().usage, "envs " + list_ids(faulted) + " have a fault; bring them back with reset(env_ids=...) or revive() before stepping them");
    const bool is_over = exhausted.size() == ids.size() && !ids.empty();
    if (is_over || (asked == Asked::STEP && !exhausted.empty())) {
        raise(errors().usage, "envs " + list_ids(exhausted) + " have played their num_episodes and are exhausted; leave them out, or begin anew with reset(env_ids=...)");
    }
    if (!fresh.empty()) raise(errors().usage, "envs " + list_ids(fresh) + " were never reset; call reset() before stepping them");
    if (!ended.empty()) raise(errors().usage, "the episodes of envs " + list_ids(ended) + " are over and autoreset is DISABLED; reset them before stepping them");
}

// Nothing is sent to envs whose worker is found dead: Python decides first what becomes of it, and sends again.
void Ledger::check_workers(const Ids& ids, Command command) const {
    Ids dead;
    for (const std::uint32_t id : ids) {
        if (command == Command::STEP && envs_[id].status == EnvStatus::EXHAUSTED) continue;  // it will be given none
        const std::uint32_t worker = slab_->seats[envs_[id].server].worker;
        if (slab_->workers[worker]->dead.load(std::memory_order_acquire) == 0 || is_restarting_[worker]) continue;
        if (std::ranges::count(dead, worker) == 0) dead.push_back(worker);
    }
    if (dead.empty()) return;
    PyErr_SetObject(errors().dead_workers.ptr(), nb::cast(dead).ptr());
    throw nb::python_error();
}

// Where results go: never into a slot that a lease holds, never over the env's own newest result.
void Ledger::choose_slots(const Ids& ids) {
    const std::uint32_t num_private = slab_->plan.private_slots;
    const bool is_whole = is_all(ids) && !is_copy_;
    const int common = is_whole ? book_->find_free(num_private) : book_->find_private(num_private);
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        env.target = common >= 0 ? static_cast<std::uint8_t>(common) : static_cast<std::uint8_t>(env.latest == 0 ? 1 : 0);
        book_->pin(env.target);
    }
}

void Ledger::dispatch(const Ids& ids, Command command) {
    if (command == Command::STEP) keep_final_obs(ids);
    tend();
    choose_slots(ids);
    const auto first = static_cast<std::ptrdiff_t>(pending_.size());
    std::fill(is_touched_.begin(), is_touched_.end(), std::uint8_t{0});
    for (const std::uint32_t id : ids) {
        EnvBook& env = envs_[id];
        const bool is_exhausted = env.status == EnvStatus::EXHAUSTED;
        env.status = EnvStatus::PENDING;
        pending_.push_back(id);
        if (is_exhausted && command == Command::STEP) {
            mask(id);
            continue;
        }
        if (is_exhausted) env.num_ended = 0;
        if (num_held_envs_ != 0 && env.replay) {
            dispatch_held(id);
            continue;
        }
        if (command == Command::STEP && env.is_lost) cut_short(id);
        if (is_done_early(env, command)) continue;
        if (takes_staged(id, command)) {
            take(id);
            continue;
        }
        const Seat seat = slab_->seats[env.server];
        ServerWords& words = slab_->words[seat.worker];
        const bool is_restored = command == Command::STEP && env.needs_restore;
        if (is_restored) begin_episode(id, words, seat.local);
        put(words.row[seat.local], row_of(id));
        set_command(words, seat.local, is_restored ? Command::RESET : command);
        put(words.slot[seat.local], env.target);
        if (command == Command::STEP && !is_restored && is_last(env)) words.flags[seat.local] |= FLAG_LAST;
        note_command(id, words, seat.local, command);
        is_touched_[seat.worker] = 1;
        // Tickets grow before the doorbell rings: a worker that wakes early must already see its command.
        publish_ticket(seat, ++env.ticket);
    }
    if (!is_all(ids)) std::sort(pending_.begin() + first, pending_.end());
    if (helper_) {
        helper_(false);
    } else if (inline_ == nullptr) {
        for (std::uint32_t w = 0; w < num_workers_; ++w) {
            if (is_touched_[w]) ring_worker(*slab_->workers[w]);
        }
        for (std::uint32_t w = 0; w < num_workers_; ++w) {
            if (is_touched_[w]) check_deaths_of(w);
        }
    }
}

// A worker that died before its tickets were written was reaped without them: settle them here.
// The reaper writes `dead` and then reads the tickets: because of the fence it sees these, or this sees the death.
void Ledger::check_deaths_of(std::uint32_t worker) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (is_restarting_[worker] || slab_->workers[worker]->dead.load(std::memory_order_seq_cst) == 0) return;
    condemn_worker(*slab_, worker, Fault::DIED);
}

}  // namespace stepmill
