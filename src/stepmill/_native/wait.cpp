// The ledger waits: which envs are ready, and how to sleep until more are.
#define NO_IMPORT_ARRAY
#include <algorithm>

#include "ledger.hpp"
#include "reaper.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t PARENT_SLICE_NS = 100'000'000;  // a signal that lands just before the wait is seen after this at the latest
constexpr std::uint64_t GIL_SPIN_NS = 10'000;            // the GIL is given up for longer spins: other threads may want it

}  // namespace

// How many of `ids` are done, at most `need`; stops at the first fault.
std::uint32_t Ledger::scan(const Ids& ids, std::uint32_t need, bool& is_fault) {
    std::uint32_t ready = 0;
    const bool is_pending = &ids == &pending_;
    std::uint32_t begin = 0;
    if (is_pending) begin = ready = scanned_;
    bool is_prefix = is_pending;
    for (std::uint32_t i = begin; i < ids.size() && ready < need; ++i) {
        if (!is_done(ids[i])) {
            is_prefix = false;
            continue;
        }
        if (has_fault(ids[i])) is_fault = true;
        ++ready;
        if (is_prefix && !is_fault) scanned_ = i + 1;
    }
    return ready;
}

int Ledger::wait(std::uint32_t min_envs, nb::handle timeout_s) {
    const InUse in_use(*this);
    if (min_envs > pending_.size() + kept_.size()) {
        raise(errors().usage, std::to_string(min_envs) + " envs are wanted, but only " + std::to_string(pending_.size() + kept_.size()) + " are stepping; send() them actions first");
    }
    return static_cast<int>(wait_ids(pending_, min_envs - std::min(min_envs, num_kept_ready()), timeout_s));
}

// Of the results that are kept those whose rows no replay is using.
std::uint32_t Ledger::num_kept_ready() const {
    return static_cast<std::uint32_t>(std::ranges::count_if(kept_, [&](std::uint32_t id) { return !envs_[id].replay; }));
}

int Ledger::wait_for(nb::handle env_ids, nb::handle timeout_s) {
    const InUse in_use(*this);
    Ids storage, busy;
    for (const std::uint32_t id : parse_ids(env_ids, storage)) {
        if (envs_[id].status == EnvStatus::PENDING || (!is_done(id) && !servers_[envs_[id].server].is_staged)) busy.push_back(id);  // also a held env that was commanded nothing
    }
    return static_cast<int>(wait_ids(busy, static_cast<std::uint32_t>(busy.size()), timeout_s));
}

int Ledger::wait_event(nb::handle timeout_s) {
    const InUse in_use(*this);
    Ids held;
    for (const std::uint32_t id : all_) {
        if (envs_[id].replay) held.push_back(id);
    }
    const bool is_threaded = inline_ == nullptr && !helper_;
    return static_cast<int>(is_threaded ? wait_ids({}, 1, timeout_s) : wait_ids(held, static_cast<std::uint32_t>(held.size()), timeout_s));
}

WaitResult Ledger::wait_ids(const Ids& ids, std::uint32_t need, nb::handle timeout_s) {
    if (inline_ != nullptr) return wait_inline(ids, need, timeout_s);
    if (helper_) return wait_helped(ids, need, timeout_s);
    PoolControl& pool = *slab_->pool;
    std::uint64_t deadline = UINT64_MAX;
    bool has_waited = false;
    for (;;) {
        // This order finds every result, or is woken for it: bell, count, resets that wait for others, rows, want, count again, wait.
        const std::uint32_t seen = pool.bell.load(std::memory_order_acquire);
        const std::uint32_t count = pool.count.load(std::memory_order_seq_cst);
        tend();
        if (has_event()) return WaitResult::EVENT;
        bool is_fault = false;
        const std::uint32_t ready = scan(ids, need, is_fault);
        if (is_fault) return WaitResult::FAULT;
        if (ready >= need) return WaitResult::READY;
        if (settle_dead(ids)) continue;
        if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool was closed while this call waited");
        if (!has_waited) deadline = deadline_of(timeout_s);
        if (deadline != UINT64_MAX && now_ns() >= deadline) return WaitResult::TIMED_OUT;
        has_waited = true;
        pool.want.store(count + (playing_.empty() ? need - ready : 1), std::memory_order_seq_cst);
        if (pool.count.load(std::memory_order_seq_cst) != count) continue;
        rest(seen, deadline);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

// A dead worker may have scrambled its own words before it died: what the parent knows is written once more, and condemned. Only when
// the reaper has let go of it: until then what is missing is about to be settled. Returns whether anything was.
bool Ledger::settle_dead(const Ids& ids) {
    auto is_buried = [&](std::uint32_t worker) { return slab_->workers[worker]->buried.load(std::memory_order_seq_cst) != 0 && !is_restarting_[worker]; };
    std::uint32_t first = 0;
    while (first < num_workers_ && !is_buried(first)) ++first;
    if (first == num_workers_) return false;
    bool is_any = false;
    for (const std::uint32_t id : ids) {
        const std::uint32_t server = envs_[id].server;
        const Seat seat = slab_->seats[server];
        if (!is_buried(seat.worker)) continue;
        ServerWords& words = slab_->words[seat.worker];
        const std::uint32_t ticket = published_ticket(server);
        if (words.done[seat.local].load(std::memory_order_acquire) == ticket) continue;
        words.ticket[seat.local].store(ticket, std::memory_order_seq_cst);
        words.state[seat.local].store(state_word(ticket - 1, Phase::IDLE), std::memory_order_seq_cst);
        check_deaths_of(seat.worker);
        is_any = true;
    }
    return is_any;
}

// Spins if that has lately been enough, for a moment with the GIL, then without; else parks for a slice.
void Ledger::rest(std::uint32_t seen, std::uint64_t until_ns) {
    PoolControl& pool = *slab_->pool;
    const std::uint64_t began = now_ns();
    std::uint64_t lost_ns = 0;
    const bool may_spin = patience_.may_spin(spin_ns_, began);
    bool is_rung = may_spin && holds_gil_ && spin_for(pool, PARENT, pool.bell, seen, std::min(GIL_SPIN_NS, spin_ns_), lost_ns);
    if (!is_rung) {
        PyThreadState* thread = PyEval_SaveThread();
        if (may_spin) is_rung = spin_for(pool, PARENT, pool.bell, seen, spin_ns_, lost_ns);
        const std::uint64_t now = now_ns();
        if (!is_rung) park(pool.bell, pool.parked, seen, until_ns > now ? std::min(PARENT_SLICE_NS, until_ns - now) : 0);
        PyEval_RestoreThread(thread);
    }
    const std::uint64_t ended = now_ns();
    patience_.note(ended - began, lost_ns, spin_ns_, ended);
}

// Whether Python has something to do before the wait goes on. Looks at the replays first.
bool Ledger::has_event() {
    if (!playing_.empty()) advance_replays();
    if (num_held_envs_ != playing_.size()) find_lost_replays();
    return !events_.empty() || is_notified_.load(std::memory_order_acquire);
}

// The serial backend: the caller is the worker. Envs run in the order of their commands until enough are ready.
WaitResult Ledger::wait_inline(const Ids& ids, std::uint32_t need, nb::handle timeout_s) {
    WorkerControl& control = *slab_->workers[0];
    const std::uint64_t began = now_ns();
    std::uint64_t deadline = 0;  // looked at between the steps of a replay: one that was begun is always done
    std::uint32_t ready = 0;
    bool is_fault = false;
    if (has_event()) return WaitResult::EVENT;
    for (std::size_t i = 0; i < ids.size() && ready < need;) {
        const std::uint32_t id = ids[i];
        if (!is_done(id)) inline_->run_server(slab_->seats[envs_[id].server].local);
        if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool was closed while it stepped its envs; make a new one");
        if (inline_->has_interrupt()) {
            // A replay that was interrupted begins again: what its env's fault says is found by the next wait.
            if (!envs_[id].replay && envs_[id].fault->load(std::memory_order_relaxed) == static_cast<std::uint32_t>(Fault::INTERRUPTED)) {
                mark_faulted(id);
                std::erase(pending_, id);
            }
            inline_->raise_interrupt();
        }
        if (num_held_envs_ != 0 && envs_[id].replay) {
            if (has_event()) return WaitResult::EVENT;
            if (deadline == 0) deadline = deadline_of(timeout_s);
            if (now_ns() >= deadline) return WaitResult::TIMED_OUT;
            continue;
        }
        is_fault |= has_fault(id);
        ++ready, ++i;
    }
    control.env_ns.store(control.env_ns.load(std::memory_order_relaxed) + now_ns() - began, std::memory_order_relaxed);
    return is_fault ? WaitResult::FAULT : WaitResult::READY;
}

std::uint64_t Ledger::deadline_of(nb::handle timeout_s) const {
    if (!timeout_s.is_valid() || timeout_s.is_none()) return UINT64_MAX;
    return now_ns() + static_cast<std::uint64_t>(std::min(std::max(nb::cast<double>(timeout_s), 0.0), 1e9) * 1e9);
}

// A pool that is not ours, in line: the caller brings its results himself. Each help is one wait of that pool, which has no
// deadline of its own: one is always done, and the deadline is looked at in between.
WaitResult Ledger::wait_helped(const Ids& ids, std::uint32_t need, nb::handle timeout_s) {
    const std::uint64_t deadline = deadline_of(timeout_s);
    for (bool has_helped = false;; has_helped = true) {
        if (has_event()) return WaitResult::EVENT;
        bool is_fault = false;
        const std::uint32_t ready = scan(ids, need, is_fault);
        if (is_fault) return WaitResult::FAULT;
        if (ready >= need) return WaitResult::READY;
        if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool was closed while this call waited");
        if (has_helped && now_ns() >= deadline) return WaitResult::TIMED_OUT;
        if (!nb::cast<bool>(helper_(true))) raise(errors().bug, "envs are awaited that are not at work; please report this");
    }
}

std::uint32_t Ledger::num_pending() {
    const InUse in_use(*this);
    return static_cast<std::uint32_t>(pending_.size() + kept_.size());
}

std::uint32_t Ledger::ticket_of(std::uint32_t env_id) {
    const InUse in_use(*this);
    return envs_.at(env_id).ticket;
}

std::uint32_t Ledger::ticket_of_server(std::uint32_t server) {
    const InUse in_use(*this);
    if (server >= servers_.size()) throw std::out_of_range("no such server");
    return ticket_word(server);
}

nb::list Ledger::ready_ids() {
    const InUse in_use(*this);
    nb::list ids;
    for (const std::uint32_t id : kept_) ids.append(id);
    for (const std::uint32_t id : pending_) {
        if (is_done(id) && !has_fault(id)) ids.append(id);
    }
    return ids;
}

nb::list Ledger::states() {
    const InUse in_use(*this);
    nb::list states;
    for (std::uint32_t id = 0; id < num_envs_; ++id) {
        const EnvStatus status = envs_[id].status;
        if (envs_[id].is_kept) {
            states.append(2);
            continue;
        }
        const int pending = is_done(id) ? (has_fault(id) ? 3 : 2) : 1;
        states.append(status == EnvStatus::PENDING ? pending : status == EnvStatus::FAULTED ? 3 : status == EnvStatus::EXHAUSTED ? 4 : 0);
    }
    return states;
}

nb::list Ledger::num_ended() {
    const InUse in_use(*this);
    nb::list ended;
    for (const EnvBook& env : envs_) ended.append(env.num_ended);
    return ended;
}

}  // namespace stepmill
