#include "reaper.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "native_thread.hpp"
#include "pidfd.hpp"

namespace stepmill {

namespace {

constexpr std::uint64_t WAKE = UINT64_MAX;  // epoll's name for the eventfd; the others are generation << 32 | worker
constexpr int MAX_EVENTS = 16;
constexpr int NO_TICK = -1;                // epoll's timeout: wait for events alone
constexpr double FOREVER_NS = 1e18;
constexpr std::uint64_t ABSENT_TICKS = 4;  // longer between two ticks: the learner did not run
constexpr std::uint64_t MILLISECOND_NS = 1'000'000;
constexpr std::uint64_t LAST_WORDS_NS = 100 * MILLISECOND_NS;  // how long an overdue worker has to write down where it stands
constexpr std::uint64_t PUBLISHING_GRACE_NS = 1'000 * MILLISECOND_NS;  // on top of the limit, for writing a result

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

// Takes a command from its owner for good. False: it is condemned already, or its results are (being) published.
bool take_from(Word& state, std::uint32_t ticket, bool is_gone) noexcept {
    std::uint32_t old = state.load(std::memory_order_acquire);
    for (;;) {
        if (old == state_word(ticket, Phase::CONDEMNED)) return false;
        // A later command is not the one to be taken: whoever is slow here would settle it by the number of its predecessor.
        if (state_ticket(old) != ticket_part(ticket) && state_ticket(old) != ticket_part(ticket - 1)) return false;
        // Only the dead can be robbed in the middle of publishing: the living still writes.
        if (old == state_word(ticket, Phase::PUBLISHING) && !is_gone) return false;
        if (state.compare_exchange_weak(old, state_word(ticket, Phase::CONDEMNED), std::memory_order_acq_rel)) return true;
    }
}

// Who condemned a command writes its outcome, which has no payload.
void settle(ServerWords& words, std::uint32_t local, std::uint32_t ticket, Fault fault) noexcept {
    words.result[local] = 0;
    words.payload_bytes[local] = 0;
    words.fault[local].store(static_cast<std::uint32_t>(fault), std::memory_order_relaxed);
    words.done[local].store(ticket, std::memory_order_release);
}

}  // namespace

std::uint32_t condemn_worker(Slab& slab, std::uint32_t worker, Fault fault) {
    // `dead` was written before, and the tickets are read after it, all seq_cst. Ledger::dispatch writes tickets and then
    // reads `dead`: one of the two sees what the other wrote.
    WorkerControl& control = *slab.workers[worker];
    const bool is_gone = control.dead.load(std::memory_order_seq_cst) == static_cast<std::uint32_t>(Death::DIED);
    ServerWords& words = slab.words[worker];
    const auto num_servers = static_cast<std::uint32_t>(slab.plan.servers[worker].size());
    std::uint32_t num_settled = 0;
    for (std::uint32_t local = 0; local < num_servers; ++local) {
        const std::uint32_t ticket = words.ticket[local].load(std::memory_order_seq_cst);
        if (words.done[local].load(std::memory_order_acquire) == ticket) continue;
        if (!take_from(words.state[local], ticket, is_gone)) continue;
        settle(words, local, ticket, fault);
        ++num_settled;
    }
    if (num_settled != 0) count_results(*slab.pool, num_settled);
    // Whatever the count says: the dead may have stored results that they never counted.
    ring_pool(*slab.pool);
    return num_settled;
}

Reaper::Reaper(std::shared_ptr<Slab> slab, Limits limits)
    : slab_(std::move(slab)), limits_(limits), owner_(getpid()), watched_(slab_->workers.size()) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = WAKE;
    int error = epoll_ < 0 || wake_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0 ? errno : 0;
    if (error == 0) error = start_native_thread(thread_, &Reaper::run, this);
    if (error != 0) {
        close_all();
        fail(error, "the thread that watches over workers cannot be started");
    }
    is_running_ = true;
}

Reaper::~Reaper() {
    stop();
    close_all();
}

bool Reaper::is_forked() const { return getpid() != owner_; }

void Reaper::close_all() {
    for (std::uint32_t worker = 0; worker < watched_.size(); ++worker) drop(worker);
    for (int* fd : {&epoll_, &wake_}) {
        if (*fd >= 0) close(*fd);
        *fd = -1;
    }
}

void Reaper::drop(std::uint32_t worker) {
    Watched& watched = watched_[worker];
    // Of those that were posted to it none is answered any more.
    if (watched.is_watched) watched.num_answered = slab_->workers[worker]->requests.load(std::memory_order_acquire);
    if (watched.pidfd != NO_PIDFD) {
        // In a forked child the epoll set is shared with the learner, and not ours to change.
        if (!is_forked()) epoll_ctl(epoll_, EPOLL_CTL_DEL, watched.pidfd, nullptr);
        close(watched.pidfd);
    }
    watched.pidfd = NO_PIDFD;
    watched.is_watched = false;
    watched.kill_at_ns = 0;
    ++watched.generation;
}

void Reaper::wake() const {
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the thread is awake already.
    [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
}

void Reaper::stop() {
    if (is_forked() || !is_running_) return;
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    wake();
    pthread_join(thread_, nullptr);
    is_running_ = false;
}

void Reaper::watch(std::uint32_t worker, int pidfd) {
    if (is_forked()) return;
    const std::lock_guard lock(mutex_);
    Watched& watched = watched_.at(worker);
    drop(worker);
    if (pidfd != NO_PIDFD) {
        watched.pidfd = fcntl(pidfd, F_DUPFD_CLOEXEC, 3);
        if (watched.pidfd < 0) fail(errno, "a worker's process descriptor cannot be duplicated");
    }
    WorkerControl& control = *slab_->workers[worker];
    watched.progress = control.progress.load(std::memory_order_acquire);
    watched.since_ns = now_ns();
    watched.untaken_ns = 0;
    watched.stuck = NO_SERVER;
    watched.is_watched = true;
    watched.is_overdue = false;
    watched.commands.assign(slab_->plan.servers[worker].size(), Outstanding{});
    control.buried.store(0, std::memory_order_release);
    control.dead.store(static_cast<std::uint32_t>(Death::NONE), std::memory_order_seq_cst);

    if (pidfd == NO_PIDFD) return;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = std::uint64_t{watched.generation} << 32 | worker;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, watched.pidfd, &event) == 0) return;
    const int error = errno;
    drop(worker);
    fail(error, "a worker's process cannot be watched");
}

void Reaper::forget(std::uint32_t worker) {
    if (is_forked()) return;
    const std::lock_guard lock(mutex_);
    drop(worker);
}

void Reaper::declare_dead(std::uint32_t worker) {
    if (is_forked()) return;
    const std::lock_guard lock(mutex_);
    if (watched_.at(worker).is_watched) bury(worker);
}

// ---- the thread -------------------------------------------------------------------------------------------------

void* Reaper::run(void* self) {
    static_cast<Reaper*>(self)->loop();
    return nullptr;
}

// An eighth of the shorter limit, so that a hang is known a few milliseconds after its time. NO_TICK without limits: only events count.
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
        const int num_events = epoll_wait(epoll_, events, MAX_EVENTS, timeout_ms);
        const std::lock_guard lock(mutex_);
        if (is_stopping_) return;
        for (int i = 0; i < num_events; ++i) on_event(events[i].data.u64);
        if (timeout_ms == NO_TICK) continue;
        const std::uint64_t now = now_ns(), elapsed = now - looked;
        looked = now;
        if (elapsed > ABSENT_TICKS * tick_ns) skip_absence(elapsed - tick_ns);
        check_deadlines(now);
    }
}

// The learner was stopped (Ctrl-Z), or got no core: its workers probably were, too. A deadline counts time in which the learner ran.
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
    if (data == WAKE) return;  // only stop() wakes
    const auto worker = static_cast<std::uint32_t>(data);
    const Watched& watched = watched_[worker];
    if (watched.pidfd != NO_PIDFD && watched.generation == data >> 32) bury(worker);
}

void Reaper::bury(std::uint32_t worker) {
    WorkerControl& control = *slab_->workers[worker];
    const std::uint32_t stuck = std::exchange(watched_[worker].stuck, NO_SERVER);
    drop(worker);
    const std::uint32_t before = control.dead.exchange(static_cast<std::uint32_t>(Death::DIED), std::memory_order_seq_cst);
    release_spin(*slab_->pool, worker);
    control.parked.store(0, std::memory_order_relaxed);  // nobody sleeps there: ringing needs no system call
    ServerWords& words = slab_->words[worker];
    if (stuck != NO_SERVER) {
        const std::uint32_t ticket = words.ticket[stuck].load(std::memory_order_seq_cst);
        const bool is_done = words.done[stuck].load(std::memory_order_acquire) == ticket;
        if (!is_done && take_from(words.state[stuck], ticket, true)) settle(words, stuck, ticket, Fault::TIMED_OUT);
    }
    // Of who was killed for being overdue, the culprit has its fault already; what is left are its neighbours.
    condemn_worker(*slab_, worker, before == static_cast<std::uint32_t>(Death::OVERDUE) ? Fault::NEIGHBOUR : Fault::DIED);
    // Who was woken by that too early, and sleeps again, looks once more: the dead may have scrambled the words that told of them.
    control.buried.store(1, std::memory_order_seq_cst);
    ring_pool(*slab_->pool);
}

void Reaper::check_deadlines(std::uint64_t now) {
    for (std::uint32_t worker = 0; worker < watched_.size(); ++worker) check_deadline(worker, now);
}

void Reaper::check_deadline(std::uint32_t worker, std::uint64_t now) {
    Watched& watched = watched_[worker];
    const WorkerControl& control = *slab_->workers[worker];
    if (!watched.is_watched) return;
    if (watched.kill_at_ns != 0 && now >= watched.kill_at_ns) kill(watched);
    if (watched.is_overdue) return;
    check_outstanding(worker, now);
    const std::uint64_t progress = control.progress.load(std::memory_order_acquire);
    if (progress != watched.progress) {
        watched.progress = progress;
        watched.since_ns = now;
        watched.untaken_ns = 0;
        return;
    }
    if (watched.is_overdue) return;
    const std::uint32_t local = control.current.load(std::memory_order_acquire);
    // What was noted just before counts from a later moment than `now` if the learner was away.
    if (local < slab_->plan.servers[worker].size() && !is_finished(worker, local)) check_current(worker, local, now - std::min(now, watched.since_ns));
    else check_untaken(worker, now);
}

// A worker whose words are lies may seem to move for ever, or to be done. A command that is outstanding is not done, whatever they say.
void Reaper::check_outstanding(std::uint32_t worker, std::uint64_t now) {
    Watched& watched = watched_[worker];
    const ServerWords& words = slab_->words[worker];
    const std::uint32_t num_requests = slab_->workers[worker]->requests.load(std::memory_order_acquire);
    for (std::uint32_t local = 0; local < watched.commands.size(); ++local) {
        Outstanding& command = watched.commands[local];
        const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
        const bool is_done = words.done[local].load(std::memory_order_acquire) == ticket;
        if (!is_done && command.since_ns != 0 && command.ticket == ticket) {
            const std::uint64_t longest = longest_ns(worker, num_requests - watched.num_answered);
            if (longest != 0 && now > command.since_ns && now - command.since_ns > longest) return end_stuck(worker, local);
            continue;
        }
        // Requests come before the commands that are given after them.
        const bool was_outstanding = command.since_ns != 0;
        if (was_outstanding && static_cast<std::int32_t>(command.num_requests - watched.num_answered) > 0) watched.num_answered = command.num_requests;
        command = {ticket, num_requests, is_done ? 0 : now};
    }
}

// How long a command may be outstanding, if every command before it and every one of `num_requests` slow requests takes all of its
// time; 0: for ever. Each request lets the worker begin again with its first server.
std::uint64_t Reaper::longest_ns(std::uint32_t worker, std::uint32_t num_requests) const {
    if (limits_.step_ns == 0 || limits_.reset_ns == 0 || (num_requests != 0 && limits_.call_ns == 0)) return 0;
    const auto reset_ns = static_cast<double>(std::max(limits_.reset_ns, limits_.attempts_ns));
    const double sweep_ns = static_cast<double>(watched_[worker].commands.size()) * (static_cast<double>(limits_.step_ns + PUBLISHING_GRACE_NS) + reset_ns);
    const double num_sweeps = 2.0 + num_requests + (slab_->plan.staging.empty() ? 0.0 : MAX_PASSED);
    const double longest = num_sweeps * sweep_ns + reset_ns + static_cast<double>(num_requests) * static_cast<double>(limits_.call_ns);
    return static_cast<std::uint64_t>(std::min(longest, FOREVER_NS));
}

// Whether the command that the worker is still at is done: then it is between commands, and the next is untaken.
bool Reaper::is_finished(std::uint32_t worker, std::uint32_t local) const {
    const ServerWords& words = slab_->words[worker];
    if (slab_->workers[worker]->running.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Activity::EARLY_RESET)) return false;
    const std::uint32_t state = words.state[local].load(std::memory_order_acquire);
    return ticket_part(words.done[local].load(std::memory_order_acquire)) == state_ticket(state);
}

// Whether the worker has made no progress since it was looked at first. Asked after all else was read: what was read then
// is of what hangs.
bool Reaper::is_still(std::uint32_t worker) const {
    return slab_->workers[worker]->progress.load(std::memory_order_acquire) == watched_[worker].progress;
}

// The worker is at something of this server, and has been for so long.
void Reaper::check_current(std::uint32_t worker, std::uint32_t local, std::uint64_t elapsed_ns) {
    const ServerWords& words = slab_->words[worker];
    const auto activity = static_cast<Activity>(slab_->workers[worker]->running.load(std::memory_order_acquire));
    const std::uint64_t limit = limit_ns(activity == Activity::RESET || activity == Activity::EARLY_RESET);
    if (limit == 0 || elapsed_ns <= limit) return;
    const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
    const std::uint32_t state = words.state[local].load(std::memory_order_acquire);
    if (!is_still(worker)) return;
    // An early reset hangs between commands: the last is done, and the next, if there is one, waits for it.
    const bool is_early = activity == Activity::EARLY_RESET;
    const bool is_asked = words.done[local].load(std::memory_order_acquire) != ticket;
    const bool is_late = is_early ? state_ticket(state) == ticket_part(ticket - 1) : state == state_word(ticket, Phase::RUNNING);
    if (is_early && !is_asked) end_overdue(worker);
    else if (is_late) give_up(worker, local, ticket, state);
    else if (elapsed_ns > limit + PUBLISHING_GRACE_NS) end_stuck(worker, local);
}

// A worker that is stopped, or stuck between commands, takes none: the first that waits is the one that is late.
void Reaper::check_untaken(std::uint32_t worker, std::uint64_t now) {
    Watched& watched = watched_[worker];
    ServerWords& words = slab_->words[worker];
    std::uint32_t local = 0;
    const auto num_servers = static_cast<std::uint32_t>(slab_->plan.servers[worker].size());
    while (local < num_servers && words.ticket[local].load(std::memory_order_acquire) == words.done[local].load(std::memory_order_acquire)) ++local;
    const bool is_serving = slab_->workers[worker]->serving.load(std::memory_order_acquire) != 0;
    if (local == num_servers || (is_serving && limits_.call_ns == 0)) {
        watched.untaken_ns = 0;
        return;
    }
    if (watched.untaken_ns == 0) watched.untaken_ns = now;
    const std::uint64_t waited_ns = now - std::min(now, watched.untaken_ns);
    const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
    const std::uint64_t limit = limit_ns(get_command(words, local) == Command::RESET);
    // A slow request comes first; but nobody waits for one that never ends, or that a worker only claims to be at.
    const std::uint64_t allowed = limit + (is_serving ? limits_.call_ns : 0);
    if (limit == 0 || waited_ns <= allowed) return;
    const std::uint32_t state = words.state[local].load(std::memory_order_acquire);
    // RUNNING: it was stopped between taking the command and saying so.
    const bool is_untaken = state_ticket(state) == ticket_part(ticket - 1) || state == state_word(ticket, Phase::RUNNING);
    if (!is_still(worker)) return;
    if (is_untaken) give_up(worker, local, ticket, state);
    else if (waited_ns > allowed + PUBLISHING_GRACE_NS) end_stuck(worker, local);
}

// Its words tell of no command that could be condemned. Who publishes is not late, unless it never ends: a value in an info may
// hang when it is pickled. Or they are words that no worker of ours writes. It is robbed once it is gone.
void Reaper::end_stuck(std::uint32_t worker, std::uint32_t local) {
    if (watched_[worker].pidfd == NO_PIDFD) return;
    watched_[worker].stuck = local;
    end_overdue(worker);
}

// Condemns the command that is late, if it is still where it was seen, and ends its worker.
void Reaper::give_up(std::uint32_t worker, std::uint32_t local, std::uint32_t ticket, std::uint32_t state) {
    ServerWords& words = slab_->words[worker];
    // It may have come to its end just now.
    if (!words.state[local].compare_exchange_strong(state, state_word(ticket, Phase::CONDEMNED), std::memory_order_acq_rel)) return;
    slab_->workers[worker]->dead.store(static_cast<std::uint32_t>(Death::OVERDUE), std::memory_order_seq_cst);
    settle(words, local, ticket, Fault::TIMED_OUT);
    count_results(*slab_->pool, 1);
    end_overdue(worker);
}

void Reaper::end_overdue(std::uint32_t worker) {
    slab_->workers[worker]->dead.store(static_cast<std::uint32_t>(Death::OVERDUE), std::memory_order_seq_cst);
    watched_[worker].untaken_ns = 0;
    watched_[worker].is_overdue = true;
    kill(watched_[worker]);
    condemn_worker(*slab_, worker, Fault::NEIGHBOUR);
    ring_worker(*slab_->workers[worker]);  // a thread that came back just now, and sleeps already, is to hear of it
}

// A process that has ended meanwhile is buried at the next event; one that does not die is condemned all the same.
void Reaper::kill(Watched& watched) const {
    if (watched.pidfd == NO_PIDFD) return;
    const bool may_speak = limits_.dump_signal != 0 && watched.kill_at_ns == 0;
    watched.kill_at_ns = may_speak ? now_ns() + LAST_WORDS_NS : 0;
    [[maybe_unused]] const int error = signal_pidfd(watched.pidfd, may_speak ? limits_.dump_signal : SIGKILL);
}

}  // namespace stepmill
