#include "shared/reaper.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "shared/native_thread.hpp"
#include "shared/pidfd.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t WAKE = UINT64_MAX;  // epoll data of the eventfd; that of a worker is generation << 32 | worker
constexpr int MAX_EVENTS = 16;
constexpr int NO_TICK = -1;                // timeout of epoll_wait: only events
constexpr double FOREVER_NS = 1e18;
constexpr std::uint64_t ABSENT_TICKS = 4;  // after a longer pause between two ticks, the learner did not run
constexpr std::uint64_t MILLISECOND_NS = 1'000'000;
constexpr std::uint64_t DUMP_NS = 100 * MILLISECOND_NS;  // how long an overdue worker has to write a traceback before SIGKILL
constexpr std::uint64_t PUBLISHING_GRACE_NS = 1'000 * MILLISECOND_NS;  // on top of the limit, for writing a result

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

// Aborts a command, so that its owner cannot publish it. Returns false if it is aborted already, or published or being published.
bool abort_command(Word& state, std::uint32_t ticket, bool is_gone) noexcept {
    std::uint32_t old = state.load(std::memory_order_acquire);
    for (;;) {
        if (old == state_word(ticket, Phase::ABORTED)) return false;
        // Not a later command: a slow caller would finish it with the number of its predecessor.
        if (state_ticket(old) != ticket_part(ticket) && state_ticket(old) != ticket_part(ticket - 1)) return false;
        // A worker that still runs may be writing its result.
        if (old == state_word(ticket, Phase::PUBLISHING) && !is_gone) return false;
        if (state.compare_exchange_weak(old, state_word(ticket, Phase::ABORTED), std::memory_order_acq_rel)) return true;
    }
}

// Writes the outcome of an aborted command: a fault without a payload.
void write_fault(ServerWords& words, std::uint32_t local, std::uint32_t ticket, Fault fault) noexcept {
    words.clear_result(local);
    words.fault[local].store(static_cast<std::uint32_t>(fault), std::memory_order_relaxed);
    words.done[local].store(ticket, std::memory_order_release);
}

}  // namespace

std::uint32_t abort_commands(Slab& slab, std::uint32_t lane, Fault fault) {
    // `dead` is written before the tickets are read, both seq_cst. PoolState::dispatch writes tickets and then reads `dead`: at least one
    // side sees what the other wrote.
    WorkerControl& control = *slab.workers[lane];
    const bool is_gone = control.learner.dead.load(std::memory_order_seq_cst) == static_cast<std::uint32_t>(Death::DIED);
    ServerWords& words = slab.words[lane];
    const auto num_servers = static_cast<std::uint32_t>(slab.plan.servers[lane].size());
    std::uint32_t num_aborted = 0;
    for (std::uint32_t local = 0; local < num_servers; ++local) {
        const std::uint32_t ticket = words.ticket[local].load(std::memory_order_seq_cst);
        if (words.done[local].load(std::memory_order_acquire) == ticket) continue;
        if (!abort_command(words.state[local], ticket, is_gone)) continue;
        write_fault(words, local, ticket, fault);
        ++num_aborted;
    }
    if (num_aborted != 0) count_results(*slab.pool, num_aborted);
    // Ring whatever the count says: the dead worker may have stored results without counting them.
    ring_pool(*slab.pool);
    return num_aborted;
}

Reaper::Reaper(std::shared_ptr<Slab> slab, Limits limits)
    : slab_(std::move(slab)), limits_(limits), owner_(getpid()), epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), watched_(slab_->workers.size()) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = WAKE;
    int error = epoll_.number() < 0 || wake_.number() < 0 || epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, wake_.number(), &event) != 0 ? errno : 0;
    if (error == 0) error = start_native_thread(thread_, &Reaper::run, this);
    if (error != 0) fail(error, "the thread that watches the workers cannot be started");
    is_running_ = true;
}

Reaper::~Reaper() { stop(); }

bool Reaper::is_forked() const { return getpid() != owner_; }

std::unique_lock<std::mutex> Reaper::lock_for(std::uint32_t number, std::size_t stop) const {
    if (number >= stop) throw std::out_of_range("worker " + std::to_string(number) + " does not exist; the pool has workers 0 to " + std::to_string(stop - 1));
    return is_forked() ? std::unique_lock<std::mutex>() : std::unique_lock(mutex_);
}

void Reaper::unwatch(std::uint32_t worker) {
    for (const std::uint32_t lane : slab_->lanes[worker]) {
        // Nobody answers the requests that were posted to this lane.
        if (watched_[lane].is_watched) watched_[lane].num_answered = slab_->workers[lane]->learner.requests.load(std::memory_order_acquire);
        watched_[lane].is_watched = false;
    }
    Watched& process = watched_[slab_->lanes[worker].front()];
    if (process.pidfd.number() != NO_PIDFD) epoll_ctl(epoll_.number(), EPOLL_CTL_DEL, process.pidfd.number(), nullptr);
    process.pidfd.close();
    process.kill_at_ns = 0;
    ++process.generation;
}

void Reaper::stop() {
    if (is_forked() || !is_running_) return;
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    set_event(wake_.number());
    pthread_join(thread_, nullptr);
    is_running_ = false;
}

void Reaper::watch(std::uint32_t worker, int pidfd) {
    const auto lock = lock_for(worker, slab_->lanes.size());
    if (!lock) return;
    unwatch(worker);
    Watched& process = watched_[slab_->lanes[worker].front()];
    if (pidfd != NO_PIDFD) {
        process.pidfd = OwnedFd(fcntl(pidfd, F_DUPFD_CLOEXEC, 3));
        if (process.pidfd.number() < 0) fail(errno, "a worker's process descriptor cannot be duplicated");
    }
    for (const std::uint32_t lane : slab_->lanes[worker]) {
        WorkerControl& control = *slab_->workers[lane];
        Watched& watched = watched_[lane];
        watched.progress = control.own.progress.load(std::memory_order_acquire);
        watched.since_ns = now_ns();
        watched.untaken_ns = 0;
        watched.stuck = NO_SERVER;
        watched.is_watched = true;
        watched.is_overdue = false;
        watched.commands.assign(slab_->plan.servers[lane].size(), Outstanding{});
        control.learner.reaped.store(0, std::memory_order_release);
        control.learner.dead.store(static_cast<std::uint32_t>(Death::NONE), std::memory_order_seq_cst);
    }

    if (pidfd == NO_PIDFD) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = std::uint64_t{process.generation} << 32 | worker;
    if (epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, process.pidfd.number(), &event) == 0) return;
    const int error = errno;
    unwatch(worker);
    fail(error, "a worker's process cannot be watched");
}

void Reaper::forget(std::uint32_t worker) {
    if (const auto lock = lock_for(worker, slab_->lanes.size())) unwatch(worker);
}

void Reaper::declare_dead(std::uint32_t worker) {
    const auto lock = lock_for(worker, slab_->lanes.size());
    if (lock && watched_[slab_->lanes[worker].front()].is_watched) mark_dead(worker);
}

void Reaper::record_answered(std::uint32_t lane, std::uint32_t num_requests) {
    const auto lock = lock_for(lane, watched_.size());
    if (lock && is_later(num_requests, watched_[lane].num_answered)) watched_[lane].num_answered = num_requests;
}

// ---- the thread -------------------------------------------------------------------------------------------------

void* Reaper::run(void* self) {
    static_cast<Reaper*>(self)->loop();
    return nullptr;
}

// Returns an eighth of the shorter limit, so that a hang is found a few milliseconds late. NO_TICK without limits.
int Reaper::tick_ms() const {
    std::uint64_t shortest_ns = UINT64_MAX;
    for (const std::uint64_t limit_ns : {limits_.step_ns, limits_.reset_ns}) {
        if (limit_ns != 0) shortest_ns = std::min(shortest_ns, limit_ns);
    }
    if (shortest_ns == UINT64_MAX) return NO_TICK;
    return static_cast<int>(std::clamp<std::uint64_t>(shortest_ns / 8 / MILLISECOND_NS, 1, 15));
}

void Reaper::loop() {
    const int timeout_ms = tick_ms();
    const std::uint64_t tick_ns = static_cast<std::uint64_t>(std::max(timeout_ms, 0)) * MILLISECOND_NS;
    std::uint64_t looked = now_ns();
    epoll_event events[MAX_EVENTS];
    for (;;) {
        const int num_events = epoll_wait(epoll_.number(), events, MAX_EVENTS, timeout_ms);
        const std::lock_guard lock(mutex_);
        if (is_stopping_) return;
        for (int i = 0; i < num_events; ++i) on_event(events[i].data.u64);
        if (timeout_ms == NO_TICK) continue;
        const std::uint64_t now = now_ns(), elapsed = now - looked;
        looked = now;
        if (elapsed > ABSENT_TICKS * tick_ns) skip_absence(elapsed - tick_ns);
        for (std::uint32_t lane = 0; lane < watched_.size(); ++lane) check_deadline(lane, now);
    }
}

// Excludes time in which the learner did not run (stopped by Ctrl-Z, or without a core): probably its workers did not run either.
void Reaper::skip_absence(std::uint64_t absent_ns) {
    for (Watched& watched : watched_) {
        watched.since_ns += absent_ns;
        if (watched.untaken_ns != 0) watched.untaken_ns += absent_ns;
        if (watched.kill_at_ns != 0) watched.kill_at_ns += absent_ns;
        for (Outstanding& command : watched.commands) {
            if (command.since_ns != 0) command.since_ns += absent_ns;
        }
    }
}

void Reaper::on_event(std::uint64_t data) {
    if (data == WAKE) return;  // written only by stop()
    const auto worker = static_cast<std::uint32_t>(data);
    const Watched& process = watched_[slab_->lanes[worker].front()];
    if (process.pidfd.number() != NO_PIDFD && process.generation == data >> 32) mark_dead(worker);
}

void Reaper::mark_dead(std::uint32_t worker) {
    unwatch(worker);
    for (const std::uint32_t lane : slab_->lanes[worker]) mark_lane_dead(lane);
}

void Reaper::mark_lane_dead(std::uint32_t lane) {
    WorkerControl& control = *slab_->workers[lane];
    const std::uint32_t stuck = std::exchange(watched_[lane].stuck, NO_SERVER);
    const std::uint32_t before = control.learner.dead.exchange(static_cast<std::uint32_t>(Death::DIED), std::memory_order_seq_cst);
    release_spin(*slab_->pool, lane);
    control.own.parked.store(0, std::memory_order_relaxed);  // nobody sleeps there: a ring needs no system call
    ServerWords& words = slab_->words[lane];
    if (stuck != NO_SERVER) {
        const std::uint32_t ticket = words.ticket[stuck].load(std::memory_order_seq_cst);
        const bool is_done = words.done[stuck].load(std::memory_order_acquire) == ticket;
        if (!is_done && abort_command(words.state[stuck], ticket, true)) write_fault(words, stuck, ticket, Fault::TIMED_OUT);
    }
    // After a time limit, the command that exceeded it has its fault already; the rest are its neighbours' commands.
    abort_commands(*slab_, lane, before == static_cast<std::uint32_t>(Death::OVERDUE) ? Fault::NEIGHBOUR : Fault::DIED);
    // Rings again: the learner may have looked too early, or the dead worker may have overwritten the words that it looked at.
    control.learner.reaped.store(1, std::memory_order_seq_cst);
    ring_pool(*slab_->pool);
}

void Reaper::check_deadline(std::uint32_t lane, std::uint64_t now) {
    Watched& watched = watched_[lane];
    const WorkerControl& control = *slab_->workers[lane];
    if (!watched.is_watched) return;
    if (watched.kill_at_ns != 0 && now >= watched.kill_at_ns) kill(watched);
    if (watched.is_overdue) return;
    check_outstanding(lane, now);
    const std::uint64_t progress = control.own.progress.load(std::memory_order_acquire);
    if (progress != watched.progress) {
        watched.progress = progress;
        watched.since_ns = now;
        watched.untaken_ns = 0;
        return;
    }
    if (watched.is_overdue) return;
    const std::uint32_t local = control.own.current.load(std::memory_order_acquire);
    // since_ns is later than `now` if the learner did not run meanwhile.
    if (local < slab_->plan.servers[lane].size() && !is_finished(lane, local)) check_current(lane, local, now - std::min(now, watched.since_ns));
    else check_untaken(lane, now);
}

// A faulty worker's words may always show progress, or claim that commands are done. So each command also has a limit of its own, which
// only the pool's words decide.
void Reaper::check_outstanding(std::uint32_t lane, std::uint64_t now) {
    Watched& watched = watched_[lane];
    const ServerWords& words = slab_->words[lane];
    const std::uint32_t num_requests = slab_->workers[lane]->learner.requests.load(std::memory_order_acquire);
    for (std::uint32_t local = 0; local < watched.commands.size(); ++local) {
        Outstanding& command = watched.commands[local];
        const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
        const bool is_done = words.done[local].load(std::memory_order_acquire) == ticket;
        if (!is_done && command.since_ns != 0 && command.ticket == ticket) {
            const std::uint64_t longest = longest_ns(lane, num_requests - watched.num_answered);
            if (longest != 0 && now > command.since_ns && now - command.since_ns > longest) return end_stuck(lane, local);
            continue;
        }
        // Requests precede the commands that are given after them.
        const bool was_outstanding = command.since_ns != 0;
        if (was_outstanding && is_later(command.num_requests, watched.num_answered)) watched.num_answered = command.num_requests;
        command = {ticket, num_requests, is_done ? 0 : now};
    }
}

// Returns how long a command may be outstanding if every command before it and each of `num_requests` slow requests takes its full
// limit; 0: without limit. After each request the worker starts again with its first server.
std::uint64_t Reaper::longest_ns(std::uint32_t lane, std::uint32_t num_requests) const {
    if (limits_.step_ns == 0 || limits_.reset_ns == 0 || (num_requests != 0 && limits_.call_ns == 0)) return 0;
    const auto reset_ns = static_cast<double>(std::max(limits_.reset_ns, limits_.attempts_ns));
    const double sweep_ns = static_cast<double>(watched_[lane].commands.size()) * (static_cast<double>(limits_.step_ns + PUBLISHING_GRACE_NS) + reset_ns);
    const double num_sweeps = 2.0 + num_requests + (slab_->plan.staging.empty() ? 0.0 : MAX_PASSED);
    const double longest = num_sweeps * sweep_ns + reset_ns + static_cast<double>(num_requests) * static_cast<double>(limits_.call_ns);
    return static_cast<std::uint64_t>(std::min(longest, FOREVER_NS));
}

// Whether the command in `current` is done: then the worker is between commands.
bool Reaper::is_finished(std::uint32_t lane, std::uint32_t local) const {
    const ServerWords& words = slab_->words[lane];
    if (slab_->workers[lane]->own.running.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Activity::EARLY_RESET)) return false;
    const std::uint32_t state = words.state[local].load(std::memory_order_acquire);
    return ticket_part(words.done[local].load(std::memory_order_acquire)) == state_ticket(state);
}

// Whether the worker has made no progress since the last look. Called after the other words were read: then they belong to the activity
// that hangs.
bool Reaper::has_stalled(std::uint32_t lane) const {
    return slab_->workers[lane]->own.progress.load(std::memory_order_acquire) == watched_[lane].progress;
}

// Checks the limit of the activity in `current`, which has run for elapsed_ns.
void Reaper::check_current(std::uint32_t lane, std::uint32_t local, std::uint64_t elapsed_ns) {
    const ServerWords& words = slab_->words[lane];
    const auto activity = static_cast<Activity>(slab_->workers[lane]->own.running.load(std::memory_order_acquire));
    const std::uint64_t limit = limit_ns(activity == Activity::RESET || activity == Activity::EARLY_RESET);
    if (activity != Activity::GIVEN_UP && (limit == 0 || elapsed_ns <= limit)) return;
    const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
    const std::uint32_t state = words.state[local].load(std::memory_order_acquire);
    if (!has_stalled(lane)) return;
    // An early reset hangs between commands: the last command is done, and the next one, if any, is late.
    const bool is_early = activity == Activity::EARLY_RESET;
    const bool is_asked = words.done[local].load(std::memory_order_acquire) != ticket;
    const bool is_late = is_early ? state_ticket(state) == ticket_part(ticket - 1) : state == state_word(ticket, Phase::RUNNING);
    if (is_early && !is_asked) end_overdue(lane);
    else if (is_late) abandon(lane, local, ticket, state);
    else if (elapsed_ns > limit + PUBLISHING_GRACE_NS) end_stuck(lane, local);
}

// Checks commands that the worker does not start because it is stopped or stuck: the first outstanding one counts as late.
void Reaper::check_untaken(std::uint32_t lane, std::uint64_t now) {
    Watched& watched = watched_[lane];
    ServerWords& words = slab_->words[lane];
    std::uint32_t local = 0;
    const auto num_servers = static_cast<std::uint32_t>(slab_->plan.servers[lane].size());
    while (local < num_servers && words.ticket[local].load(std::memory_order_acquire) == words.done[local].load(std::memory_order_acquire)) ++local;
    const bool is_busy = is_serving(lane);
    if (local == num_servers || (is_busy && limits_.call_ns == 0)) {
        watched.untaken_ns = 0;
        return;
    }
    if (watched.untaken_ns == 0) watched.untaken_ns = now;
    const std::uint64_t waited_ns = now - std::min(now, watched.untaken_ns);
    const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
    const std::uint64_t limit = limit_ns(get_command(words, local) == Command::RESET);
    // A slow request runs first; its limit also bounds a worker that falsely claims to serve one.
    const std::uint64_t allowed = limit + (is_busy ? limits_.call_ns : 0);
    if (limit == 0 || waited_ns <= allowed) return;
    const std::uint32_t state = words.state[local].load(std::memory_order_acquire);
    // RUNNING: the worker was stopped after it started the command and before it set `current`.
    const bool is_untaken = state_ticket(state) == ticket_part(ticket - 1) || state == state_word(ticket, Phase::RUNNING);
    if (!has_stalled(lane)) return;
    if (is_untaken) abandon(lane, local, ticket, state);
    else if (waited_ns > allowed + PUBLISHING_GRACE_NS) end_stuck(lane, local);
}

// A faulty worker may claim it although no request waits for a reply.
bool Reaper::is_serving(std::uint32_t lane) const {
    return slab_->workers[lane]->own.serving.load(std::memory_order_acquire) != 0 && slab_->workers[lane]->learner.requests.load(std::memory_order_acquire) != watched_[lane].num_answered;
}

// Ends a worker whose late command cannot be aborted while it lives, since its state says PUBLISHING: pickling a value of an info may
// hang. Or a faulty worker wrote the state. The command is aborted when the worker is dead.
void Reaper::end_stuck(std::uint32_t lane, std::uint32_t local) {
    if (process_of(lane).pidfd.number() == NO_PIDFD) return;
    watched_[lane].stuck = local;
    end_overdue(lane);
}

// Aborts the late command, if its state has not changed, and ends its worker.
void Reaper::abandon(std::uint32_t lane, std::uint32_t local, std::uint32_t ticket, std::uint32_t state) {
    ServerWords& words = slab_->words[lane];
    // The command may have finished just now.
    if (!words.state[local].compare_exchange_strong(state, state_word(ticket, Phase::ABORTED), std::memory_order_acq_rel)) return;
    slab_->workers[lane]->learner.dead.store(static_cast<std::uint32_t>(Death::OVERDUE), std::memory_order_seq_cst);
    write_fault(words, local, ticket, Fault::TIMED_OUT);
    count_results(*slab_->pool, 1);
    end_overdue(lane);
}

void Reaper::end_overdue(std::uint32_t lane) {
    const std::vector<std::uint32_t>& lanes = slab_->lanes[slab_->worker_of[lane]];
    for (const std::uint32_t each : lanes) {
        slab_->workers[each]->learner.dead.store(static_cast<std::uint32_t>(Death::OVERDUE), std::memory_order_seq_cst);
        watched_[each].untaken_ns = 0;
        watched_[each].is_overdue = true;
    }
    kill(process_of(lane));
    for (const std::uint32_t each : lanes) {
        abort_commands(*slab_, each, Fault::NEIGHBOUR);
        ring_worker(*slab_->workers[each]);  // wakes a thread that came back just now and sleeps already
    }
}

// A process that has ended meanwhile is marked dead at the next event. Commands of one that does not die are aborted too.
void Reaper::kill(Watched& process) const {
    if (process.pidfd.number() == NO_PIDFD) return;
    const bool may_dump = limits_.dump_signal != 0 && process.kill_at_ns == 0;
    process.kill_at_ns = may_dump ? now_ns() + DUMP_NS : 0;
    [[maybe_unused]] const int error = signal_pidfd(process.pidfd.number(), may_dump ? limits_.dump_signal : SIGKILL);
}

}  // namespace stepmill
