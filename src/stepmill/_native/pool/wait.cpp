// How the pool waits: which envs are ready, and how to sleep until more are.
#define NO_IMPORT_ARRAY
#include <algorithm>
#include <iterator>

#include "pool/pool_state.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t PARENT_SLICE_NS = 100'000'000;  // a signal that arrives just before the wait is handled after at most this time
constexpr std::uint64_t GIL_SPIN_NS = 10'000;  // longer spins release the GIL for other threads

}  // namespace

// Returns how many of `ids` are done, at most `num_needed`; sets is_fault if one of those has a fault. The pending envs at the front that
// earlier calls found done (scanned_) are not looked at again.
std::uint32_t PoolState::scan(const Ids& ids, std::uint32_t num_needed, bool& is_fault) {
    std::uint32_t num_ready = 0;
    const bool is_pending = &ids == &pending_;
    std::uint32_t begin = 0;
    if (is_pending) begin = num_ready = scanned_;
    bool is_prefix = is_pending;
    for (std::uint32_t i = begin; i < ids.size() && num_ready < num_needed; ++i) {
        if (!is_done(ids[i])) {
            is_prefix = false;
            continue;
        }
        if (has_fault(ids[i])) is_fault = true;
        ++num_ready;
        if (is_prefix && !is_fault) scanned_ = i + 1;
    }
    return num_ready;
}

// For num_envs of the pending envs, for those of env_ids that are busy, or else for an event. A wait for some envs lets workers report each
// result at once, in place of a group at a time.
int PoolState::wait(nb::handle timeout_s, std::optional<std::uint32_t> num_envs, nb::handle env_ids) {
    const InUse in_use(*this);
    if (!num_envs && env_ids.is_none()) return static_cast<int>(wait_for_event(timeout_s));
    Ids storage, busy;
    const std::size_t num_pending = pending_.size() + unclaimed_.ids().size(), num_wanted = num_envs ? *num_envs : parse_ids(env_ids, storage).size();
    if (num_envs && num_wanted > num_pending) {
        raise(errors().usage, "cannot wait for " + std::to_string(num_wanted) + " envs: only " + std::to_string(num_pending) + " are stepping; send() actions to more envs first");
    }
    slab_->pool->own.eager.store(num_wanted < num_envs_, std::memory_order_relaxed);
    if (num_envs) return static_cast<int>(wait_until_done(pending_, *num_envs - std::min(*num_envs, num_unclaimed_ready()), timeout_s));
    std::ranges::copy_if(storage, std::back_inserter(busy), [&](std::uint32_t id) { return is_busy(id); });
    return static_cast<int>(wait_until_done(busy, static_cast<std::uint32_t>(busy.size()), timeout_s));
}

// Also a suspended env without a command.
bool PoolState::is_busy(std::uint32_t id) const { return envs_[id].phase() == EnvPhase::PENDING || (!is_done(id) && !spares_.is_staged(envs_[id].server)); }

// Returns how many unclaimed results have rows that no replay uses.
std::uint32_t PoolState::num_unclaimed_ready() const {
    return static_cast<std::uint32_t>(std::ranges::count_if(unclaimed_.ids(), [&](std::uint32_t id) { return !envs_[id].is_suspended(); }));
}

WaitResult PoolState::wait_for_event(nb::handle timeout_s) {
    const Ids ids = commands_.has_workers() ? Ids() : suspended_;
    waits_for_replays_ = true;
    return wait_until_done(ids, commands_.has_workers() ? 1 : static_cast<std::uint32_t>(ids.size()), timeout_s);
}

WaitResult PoolState::wait_until_done(const Ids& ids, std::uint32_t num_needed, nb::handle timeout_s) {
    if (commands_.loop() != nullptr) return wait_inline(ids, num_needed, timeout_s);
    if (commands_.advance()) return wait_by_advancing(ids, num_needed, timeout_s);
    std::uint64_t deadline = UINT64_MAX;
    for (bool has_waited = false;; has_waited = true) {
        std::uint32_t seen = 0;
        if (const std::optional<WaitResult> found = prepare_wait(ids, num_needed, seen)) return *found;
        if (!has_waited) deadline = deadline_of(timeout_s);
        if (deadline != UINT64_MAX && now_ns() >= deadline) return WaitResult::TIMED_OUT;
        wait_for_bell(seen, deadline);
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

// Looks for results and events. If there are none, sets `ring_at`; the caller waits until the bell moves from `seen`.
std::optional<WaitResult> PoolState::prepare_wait(const Ids& ids, std::uint32_t num_needed, std::uint32_t& seen) {
    PoolControl& pool = *slab_->pool;
    for (;;) {
        // This order sees every result or is woken by it: bell, count, deferred resets, rows, `ring_at`, count again, wait.
        seen = pool.shared.bell.load(std::memory_order_acquire);
        const std::uint32_t count = pool.shared.count.load(std::memory_order_seq_cst);
        flush_deferred_resets();
        if (has_event()) return WaitResult::EVENT;
        bool is_fault = false;
        const std::uint32_t num_ready = scan(ids, num_needed, is_fault);
        if (is_fault) return WaitResult::FAULT;
        if (num_ready >= num_needed) return WaitResult::READY;
        if (abort_commands_of_dead_workers(ids)) continue;
        if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool was closed during this call; make a new one");
        pool.own.ring_at.store(count + (is_replaying() ? 1 : num_needed - num_ready), std::memory_order_seq_cst);
        if (pool.shared.count.load(std::memory_order_seq_cst) == count) return std::nullopt;
    }
}

// An event loop waits for the pool's eventfd, between the calls of its other tasks: commands may be sent meanwhile. If nothing is pending,
// it waits for an event.
bool PoolState::watch(std::uint32_t num_envs) {
    const InUse in_use(*this);
    PoolControl& pool = *slab_->pool;
    pool.own.eager.store(1, std::memory_order_relaxed);
    num_envs -= std::min(num_envs, num_unclaimed_ready());
    if (!pending_.empty()) num_envs = std::min(num_envs, static_cast<std::uint32_t>(pending_.size()));
    std::uint32_t seen = 0;
    do {
        stop_watching(pool);
        if (prepare_wait(pending_, num_envs, seen)) return false;
    } while (!watch_bell(pool, seen));
    return true;
}

// Aborts outstanding commands of dead workers. Only after the reaper has finished with them: before that it is about to do the same.
// Returns whether it aborted any.
bool PoolState::abort_commands_of_dead_workers(const Ids& ids) {
    auto is_reaped = [&](std::uint32_t lane) { return slab_->workers[lane]->learner.reaped.load(std::memory_order_seq_cst) != 0 && !commands_.is_restarting(lane); };
    const auto num_lanes = static_cast<std::uint32_t>(slab_->workers.size());
    std::uint32_t first = 0;
    while (first < num_lanes && !is_reaped(first)) ++first;
    if (first == num_lanes) return false;
    bool is_any = false;
    for (const std::uint32_t id : ids) is_any |= is_reaped(lane_of(id)) && commands_.abort_outstanding(envs_[id].server);
    return is_any;
}

// Spins if the spin policy permits it, first with the GIL, then without; then parks for at most PARENT_SLICE_NS. If the last wait was long,
// OpenMP's threads do not spin meanwhile.
void PoolState::wait_for_bell(std::uint32_t seen, std::uint64_t until_ns) {
    PoolControl& pool = *slab_->pool;
    const std::uint64_t began = now_ns();
    std::uint64_t lost_ns = 0;
    const bool may_spin = spin_policy_.may_spin(spin_ns_, began);
    bool is_rung = may_spin && holds_gil_ && spin_for(pool, PARENT, pool.shared.bell, seen, std::min(GIL_SPIN_NS, spin_ns_), lost_ns);
    if (!is_rung) {
        PyThreadState* thread = PyEval_SaveThread();
        if (may_spin) is_rung = spin_for(pool, PARENT, pool.shared.bell, seen, spin_ns_, lost_ns);
        if (!is_rung) openmp_.end_idle(spin_policy_.waited_ns());
        const std::uint64_t now = now_ns();
        if (!is_rung) park(pool.shared.bell, pool.own.parked, seen, until_ns > now ? std::min(PARENT_SLICE_NS, until_ns - now) : 0);
        PyEval_RestoreThread(thread);
    }
    const std::uint64_t ended = now_ns();
    spin_policy_.record_wait(ended - began, lost_ns, spin_ns_, ended);
    add_to(pool.own.counters.wait_ns, unclaimed_time_.claim(ended - began, ended));
    if (LearnerTrace* trace = slab_->learner_trace()) trace->add(TraceKind::WAIT, 0, began, ended);
}

// Whether Python must act before the wait continues. Advances the replays first.
bool PoolState::has_event() {
    if (!suspended_.empty()) advance_replays();
    return has_news_ || is_notified_.load(std::memory_order_acquire);
}

// The serial backend: runs the envs in the calling thread, in the order of their commands, until enough are ready.
WaitResult PoolState::wait_inline(const Ids& ids, std::uint32_t num_needed, nb::handle timeout_s) {
    WorkerControl& control = *slab_->workers[0];
    const std::uint64_t began = now_ns();
    std::uint64_t deadline = 0;  // checked between the steps of a replay; a step always completes
    std::uint32_t num_ready = 0;
    bool is_fault = false;
    if (has_event()) return WaitResult::EVENT;
    for (std::size_t i = 0; i < ids.size() && num_ready < num_needed;) {
        const std::uint32_t id = ids[i];
        if (!is_done(id)) commands_.loop()->run_server(slab_->server_locations[envs_[id].server].local);
        if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool was closed during this call; make a new one");
        if (commands_.loop()->has_interrupt()) {
            // An interrupted replay starts again: the next wait finds the fault.
            if (!envs_[id].is_suspended() && envs_[id].fault->load(std::memory_order_relaxed) == static_cast<std::uint32_t>(Fault::INTERRUPTED)) {
                mark_faulted(id);
                std::erase(pending_, id);
            }
            commands_.loop()->raise_interrupt();
        }
        if (envs_[id].is_suspended()) {
            if (has_event()) return WaitResult::EVENT;
            if (deadline == 0) deadline = deadline_of(timeout_s);
            if (now_ns() >= deadline) return WaitResult::TIMED_OUT;
            continue;
        }
        is_fault |= has_fault(id);
        ++num_ready, ++i;
    }
    const std::uint64_t ended = now_ns();
    add_to(control.own.counters.busy_ns, ended - began);
    add_to(slab_->pool->own.counters.wait_ns, unclaimed_time_.claim(ended - began, ended));
    if (LearnerTrace* trace = slab_->learner_trace()) trace->add(TraceKind::WAIT, 0, began, ended);
    return is_fault ? WaitResult::FAULT : WaitResult::READY;
}

std::uint64_t PoolState::deadline_of(nb::handle timeout_s) const {
    if (!timeout_s.is_valid() || timeout_s.is_none()) return UINT64_MAX;
    return now_ns() + to_ns(nb::cast<double>(timeout_s));
}

// An external pool or a kernel without a thread of its own: advance() runs it in this thread and stores its results. A call may take longer
// than the deadline allows: one call is always made, and the deadline is checked between calls.
WaitResult PoolState::wait_by_advancing(const Ids& ids, std::uint32_t num_needed, nb::handle timeout_s) {
    const std::uint64_t deadline = deadline_of(timeout_s);
    for (bool has_advanced = false;; has_advanced = true) {
        if (has_event()) return WaitResult::EVENT;
        bool is_fault = false;
        const std::uint32_t num_ready = scan(ids, num_needed, is_fault);
        if (is_fault) return WaitResult::FAULT;
        if (num_ready >= num_needed) return WaitResult::READY;
        if (is_closed_.load(std::memory_order_acquire)) raise(errors().closed, "the pool was closed during this call; make a new one");
        if (has_advanced && now_ns() >= deadline) return WaitResult::TIMED_OUT;
        const SampledTime timed(run_sampler_, slab_->pool->own.counters.wait_ns, unclaimed_time_, TraceKind::WAIT, slab_->learner_trace());
        if (!nb::cast<bool>(commands_.advance()(true))) raise(errors().bug, "the pool waits for envs that are not stepping; please report this bug");
    }
}

std::uint32_t PoolState::num_pending() {
    const InUse in_use(*this);
    return static_cast<std::uint32_t>(pending_.size() + unclaimed_.ids().size());
}

std::vector<int> PoolState::states() {
    const InUse in_use(*this);
    auto state_of = [&](std::uint32_t id) {
        if (unclaimed_.is_unclaimed(id)) return EnvState::READY;
        switch (envs_[id].phase()) {
            case EnvPhase::PENDING:
                if (!is_done(id)) return EnvState::BUSY;
                return has_fault(id) ? EnvState::FAULTED : EnvState::READY;
            case EnvPhase::FAULTED: return EnvState::FAULTED;
            case EnvPhase::EXHAUSTED: return EnvState::EXHAUSTED;
            case EnvPhase::NEW: return EnvState::NEEDS_RESET;
            case EnvPhase::IDLE: break;
        }
        return EnvState::IDLE;
    };
    std::vector<int> states(num_envs_);
    std::ranges::transform(all_, states.begin(), [&](std::uint32_t id) { return static_cast<int>(state_of(id)); });
    return states;
}

}  // namespace stepmill
