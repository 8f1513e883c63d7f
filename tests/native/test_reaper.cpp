// The reaper with real processes and signals: children that start a command and then hang, die or answer.
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "engine.hpp"
#include "shared/pidfd.hpp"
#include "shared/reaper.hpp"

using namespace stepmill;

namespace {

constexpr std::uint64_t LIMIT_NS = 100'000'000;
constexpr std::uint64_t NEVER_NS = 3'600'000'000'000;

enum class Habit { ANSWERS, LIES, LIES_BUSILY, MOVES, HANGS, HANGS_PUBLISHING, HANGS_EARLY, STOPS, STOPS_DONE, SLEEPS, SERVES, GARBLES };

// Overwrites every word that a worker may write, without limit, with changing values.
[[noreturn]] void lie(Slab& slab, bool is_busy) {
    WorkerControl& control = *slab.workers[0];
    ServerWords& words = slab.words[0];
    for (std::uint32_t lie = 0x9e3779b9;; lie = is_busy ? lie * 1664525u + 1013904223u : lie) {
        for (Word* word : {&control.own.parked, &control.own.current, &control.own.running, &control.own.serving}) word->store(lie, std::memory_order_release);
        control.own.progress.store(lie, std::memory_order_release);
        for (std::uint32_t local : {0u, 1u}) {
            words.state[local].store(lie, std::memory_order_release);
            words.fault[local].store(lie, std::memory_order_release);
            if (words.ticket[local].load() != lie) words.done[local].store(lie, std::memory_order_release);
        }
        std::this_thread::yield();
    }
}

[[noreturn]] void live(Slab& slab, Habit habit) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a check that fails ends the test at once
    WorkerControl& control = *slab.workers[0];
    ServerWords& words = slab.words[0];
    std::uint32_t done = 0;
    for (;;) {
        const std::uint32_t seen = control.learner.bell.load(std::memory_order_acquire);
        const std::uint32_t ticket = words.ticket[0].load(std::memory_order_acquire);
        if (habit == Habit::SERVES) control.own.serving.store(1, std::memory_order_release);
        if (ticket == done || habit == Habit::SLEEPS || habit == Habit::SERVES) {
            park(control.learner.bell, control.own.parked, seen, LONG_NS);
            continue;
        }
        done = ticket;
        if (!start_command(words.state[0], ticket)) continue;
        if (habit == Habit::LIES || habit == Habit::LIES_BUSILY) lie(slab, habit == Habit::LIES_BUSILY);
        if (habit == Habit::STOPS) raise(SIGSTOP);
        begin_activity(control, 0, static_cast<Activity>(get_command(words, 0)));
        if (habit == Habit::GARBLES) words.state[0].store(0x12345678, std::memory_order_release);
        if (habit == Habit::HANGS || habit == Habit::GARBLES) pause();
        for (int part = 0; habit == Habit::MOVES && part < 15; ++part) {  // as repeated attempts of a reset do
            std::this_thread::sleep_for(std::chrono::nanoseconds(LIMIT_NS));
            begin_activity(control, 0, Activity::RESET);
        }
        if (!claim_result(words.state[0], ticket)) continue;
        if (habit == Habit::HANGS_PUBLISHING) pause();
        observation(slab, 0) = answer(0, ticket);
        words.fault[0].store(0, std::memory_order_relaxed);
        words.done[0].store(ticket, std::memory_order_release);
        count_results(*slab.pool, 1);
        if (habit == Habit::STOPS_DONE) raise(SIGSTOP);
        end_activity(control);
        if (habit == Habit::HANGS_EARLY) {
            begin_activity(control, 0, Activity::EARLY_RESET);
            pause();
        }
    }
}

// A worker process, and a reaper that watches it. Forked before the reaper has its thread.
class Household {
   public:
    // num_lanes: 1, with two servers; or 2 with a server each. The process runs the first.
    Household(Habit habit, Limits limits, std::uint32_t num_lanes = 1) : slab(make_lanes(num_lanes)), pid(fork()) {
        if (pid == 0) {
            mprotect(slab->base, slab->plan.size_bytes, PROT_READ | PROT_WRITE);  // as if the worker had mapped it
            live(*slab, habit);
        }
        CHECK(pid > 0);
        reaper = std::make_unique<Reaper>(slab, limits);
        const int pidfd = open_pidfd(pid);
        CHECK(pidfd >= 0);
        reaper->watch(0, pidfd);
        close(pidfd);  // the reaper has a duplicate
    }
    ~Household() {
        kill(pid, SIGKILL);
        int status = 0;
        waitpid(pid, &status, 0);
    }
    Household(const Household&) = delete;
    Household& operator=(const Household&) = delete;

    // Waits until the child has started its command.
    void wait_until_running(std::uint32_t ticket) const {
        while (slab->words[0].state[0].load(std::memory_order_acquire) != state_word(ticket, Phase::RUNNING)) std::this_thread::yield();
    }
    void wait_until_dead() const {
        for (const WorkerControl* lane : slab->workers) {
            while (lane->learner.dead.load() != static_cast<std::uint32_t>(Death::DIED)) std::this_thread::yield();
        }
    }

    static std::shared_ptr<Slab> make_lanes(std::uint32_t num_lanes) {
        std::shared_ptr<Slab> made = make_arena(num_lanes, 2 / num_lanes);
        if (num_lanes == 2) made->lanes = {{0, 1}}, made->worker_of = {0, 0};
        return made;
    }

    std::shared_ptr<Slab> slab;
    pid_t pid;
    std::unique_ptr<Reaper> reaper;
};

void all_commands_of_a_killed_process_become_faults() {
    const Household house(Habit::HANGS, Limits{});
    Parent parent(*house.slab);
    parent.command({0, 1});
    house.wait_until_running(1);
    const std::uint64_t began = now_ns();
    kill(house.pid, SIGKILL);
    parent.wait({0, 1}, 2);
    CHECK(now_ns() - began < 1'000'000'000);
    CHECK(parent.fault(0) == Fault::DIED && parent.fault(1) == Fault::DIED);
    CHECK(house.slab->pool->shared.count.load() == 2);
}

void a_process_that_dies_idle_is_only_marked() {
    const Household house(Habit::ANSWERS, Limits{});
    Parent parent(*house.slab);
    parent.command({0});
    parent.wait({0}, 1);
    const std::uint32_t bell = house.slab->pool->shared.bell.load();
    kill(house.pid, SIGKILL);
    house.wait_until_dead();
    parent.check(0);
    CHECK(parent.fault(0) == Fault::NONE);
    while (house.slab->pool->shared.bell.load() == bell) std::this_thread::yield();
}

void a_command_to_a_dead_worker_becomes_a_fault_at_once() {
    const Household house(Habit::ANSWERS, Limits{});
    kill(house.pid, SIGKILL);
    house.wait_until_dead();
    Parent parent(*house.slab);
    parent.command({0, 1});
    parent.wait({0, 1}, 2);
    CHECK(parent.fault(1) == Fault::DIED);
}

void a_hanging_process_is_killed_at_its_limit() {
    const Household house(Habit::HANGS, Limits{LIMIT_NS, NEVER_NS});
    Parent parent(*house.slab);
    const std::uint64_t began = now_ns();
    parent.command({0, 1});
    parent.wait({0, 1}, 2);
    const std::uint64_t elapsed = now_ns() - began;
    CHECK(elapsed >= LIMIT_NS && elapsed < LIMIT_NS + 1'000'000'000);
    CHECK(parent.fault(0) == Fault::TIMED_OUT && parent.fault(1) == Fault::NEIGHBOUR);
    house.wait_until_dead();
    CHECK(parent.fault(0) == Fault::TIMED_OUT && parent.fault(1) == Fault::NEIGHBOUR);
    CHECK(house.slab->pool->shared.count.load() == 2);
}

void a_killed_process_takes_all_its_lanes_with_it() {
    const Household house(Habit::HANGS, Limits{}, 2);
    Parent parent(*house.slab);
    parent.command({0, 1});
    house.wait_until_running(1);
    kill(house.pid, SIGKILL);
    parent.wait({0, 1}, 2);
    CHECK(parent.fault(0) == Fault::DIED && parent.fault(1) == Fault::DIED);
    house.wait_until_dead();
}

void a_lane_that_hangs_ends_the_process_and_the_others_are_its_neighbours() {
    const Household house(Habit::HANGS, Limits{LIMIT_NS, LIMIT_NS}, 2);
    Parent parent(*house.slab);
    house.slab->workers[1]->own.serving.store(1);  // lane 1 is in a request: its command may wait without limit
    house.slab->workers[1]->learner.requests.store(1);
    parent.command({0, 1});
    parent.wait({0, 1}, 2);
    CHECK(parent.fault(0) == Fault::TIMED_OUT && parent.fault(1) == Fault::NEIGHBOUR);
    house.wait_until_dead();
    house.reaper->watch(0, Reaper::NO_PIDFD);
    for (const WorkerControl* lane : house.slab->workers) CHECK(lane->learner.dead.load() == 0 && lane->learner.reaped.load() == 0);
}

void a_reset_has_a_limit_of_its_own() {
    const Household house(Habit::HANGS, Limits{NEVER_NS, LIMIT_NS});
    house.slab->words[0].command[0] = static_cast<std::uint8_t>(Command::RESET);
    house.slab->words[0].ticket[0].store(1, std::memory_order_seq_cst);
    ring_worker(*house.slab->workers[0]);
    house.wait_until_dead();
    CHECK(house.slab->words[0].fault[0].load() == static_cast<std::uint32_t>(Fault::TIMED_OUT));
}

void an_idle_worker_is_never_overdue() {
    const Household house(Habit::ANSWERS, Limits{250'000'000, 250'000'000});
    Parent parent(*house.slab);
    for (int round = 0; round < 2; ++round) {
        parent.command({0});
        parent.wait({0}, 1);
        CHECK(parent.fault(0) == Fault::NONE);
        const std::uint64_t until = now_ns() + 600'000'000;  // the test needs time to pass
        while (now_ns() < until) std::this_thread::yield();
    }
    CHECK(house.slab->workers[0]->learner.dead.load() == 0);
}

void a_forgotten_worker_may_end() {
    const Household house(Habit::SLEEPS, Limits{});
    house.reaper->forget(0);
    kill(house.pid, SIGKILL);
    CHECK(waitid(P_PID, static_cast<id_t>(house.pid), nullptr, WEXITED | WNOWAIT) == 0);
    house.reaper->stop();
    house.reaper->stop();
    CHECK(house.slab->workers[0]->learner.dead.load() == 0);
}

// A thread cannot be killed. When it returns, its result rows may belong to another worker.
void a_hanging_thread_loses_its_command() {
    const auto slab = make_arena(1, 2);
    Reaper reaper(slab, Limits{LIMIT_NS, 0});
    reaper.watch(0, Reaper::NO_PIDFD);
    ServerWords& words = slab->words[0];
    std::atomic<bool> is_open{false};
    bool has_published = true;
    std::thread owner([&] {
        while (words.ticket[0].load(std::memory_order_acquire) == 0) std::this_thread::yield();
        CHECK(start_command(words.state[0], 1));
        begin_activity(*slab->workers[0], 0, static_cast<Activity>(get_command(words, 0)));
        while (!is_open.load()) std::this_thread::yield();
        has_published = claim_result(words.state[0], 1);
    });
    Parent parent(*slab);
    parent.command({0, 1});
    parent.wait({0, 1}, 2);
    CHECK(parent.fault(0) == Fault::TIMED_OUT && parent.fault(1) == Fault::NEIGHBOUR);
    CHECK(slab->workers[0]->learner.dead.load() == static_cast<std::uint32_t>(Death::OVERDUE));
    is_open.store(true);
    owner.join();
    CHECK(!has_published);
}

// A worker that is killed for one hanging env may be writing the result of another.
void what_an_overdue_worker_left_half_written_is_a_neighbours_fault() {
    const auto slab = make_arena(1, 1);
    Reaper reaper(slab, Limits{});
    reaper.watch(0, Reaper::NO_PIDFD);
    ServerWords& words = slab->words[0];
    words.ticket[0].store(1);
    CHECK(start_command(words.state[0], 1) && claim_result(words.state[0], 1));
    slab->workers[0]->learner.dead.store(static_cast<std::uint32_t>(Death::OVERDUE));
    CHECK(abort_commands(*slab, 0, Fault::NEIGHBOUR) == 0);
    reaper.declare_dead(0);
    CHECK(words.done[0].load() == 1 && words.fault[0].load() == static_cast<std::uint32_t>(Fault::NEIGHBOUR));
}

void a_worker_that_never_ends_publishing_is_killed_and_its_command_timed_out() {
    const Household house(Habit::HANGS_PUBLISHING, Limits{LIMIT_NS, 0});
    Parent parent(*house.slab);
    parent.command({0, 1});
    parent.wait({0, 1}, 2);
    CHECK(parent.fault(0) == Fault::TIMED_OUT && parent.fault(1) == Fault::NEIGHBOUR);
}

void a_worker_stopped_while_it_starts_a_command_is_late() {
    const Household house(Habit::STOPS, Limits{LIMIT_NS, 0});
    Parent parent(*house.slab);
    parent.command({0});
    parent.wait({0}, 1);
    CHECK(parent.fault(0) == Fault::TIMED_OUT);
    house.wait_until_dead();
}

void a_worker_stopped_while_it_ends_a_command_is_late_with_the_next() {
    for (const std::uint32_t next : {0u, 1u}) {
        const Household house(Habit::STOPS_DONE, Limits{LIMIT_NS, 0});
        Parent parent(*house.slab);
        parent.command({0});
        parent.wait({0}, 1);
        parent.check(0);
        parent.command({next});
        parent.wait({next}, 1);
        CHECK(parent.fault(next) == Fault::TIMED_OUT);
        house.wait_until_dead();
    }
}

void a_slow_request_may_keep_a_command_waiting_for_its_own_limit_and_no_longer() {
    const Household house(Habit::SERVES, Limits{LIMIT_NS, 0, 0, 3 * LIMIT_NS});
    house.slab->workers[0]->learner.requests.store(1);
    while (house.slab->workers[0]->own.serving.load() == 0) std::this_thread::yield();
    const std::uint64_t began = now_ns();
    Parent parent(*house.slab);
    parent.command({0});
    parent.wait({0}, 1);
    CHECK(now_ns() - began >= 4 * LIMIT_NS);
    CHECK(parent.fault(0) == Fault::TIMED_OUT);
    house.wait_until_dead();
}

void a_worker_whose_words_name_no_command_is_killed_too() {
    const Household house(Habit::GARBLES, Limits{LIMIT_NS, 0});
    Parent parent(*house.slab);
    parent.command({0});
    house.wait_until_dead();
}

void a_worker_with_invalid_words_does_not_escape_its_deadline() {
    for (const Habit habit : {Habit::LIES, Habit::LIES_BUSILY}) {
        const Household house(habit, Limits{LIMIT_NS / 5, LIMIT_NS / 5});
        Parent parent(*house.slab);
        parent.command({0});
        house.wait_until_dead();
    }
}

void a_command_that_makes_progress_is_not_late_though_it_is_outstanding_for_longer_than_its_limit() {
    const Household house(Habit::MOVES, Limits{10 * LIMIT_NS, 10 * LIMIT_NS});
    Parent parent(*house.slab);
    const std::uint64_t began = now_ns();
    parent.command({0});
    parent.wait({0}, 1);
    CHECK(now_ns() - began > 10 * LIMIT_NS);
    parent.check(0);
    CHECK(parent.fault(0) == Fault::NONE);
}

// A thread that never wakes is never replaced.
void a_reaper_without_limits_sleeps_until_something_happens() {
    const auto num_switches = [](const std::string& thread) {
        std::ifstream status("/proc/self/task/" + thread + "/status");
        std::uint64_t sum = 0;
        for (std::string word, count; status >> word;) {
            if (word.find("ctxt_switches:") != std::string::npos && status >> count) sum += std::stoull(count);
        }
        return sum;
    };
    const auto threads = [] {
        std::set<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) names.insert(entry.path().filename());
        return names;
    };
    const std::set<std::string> before = threads();
    const Household house(Habit::SLEEPS, Limits{});
    std::set<std::string> after = threads();
    for (const std::string& name : before) after.erase(name);
    CHECK(after.size() == 1);
    std::uint64_t at_rest = 0, seen = 1;
    while (at_rest != seen) {  // it sleeps
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        at_rest = std::exchange(seen, num_switches(*after.begin()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1200));
    CHECK(num_switches(*after.begin()) == at_rest);
}

// The death becomes a fault only when a command is outstanding.
void a_hanging_early_reset_ends_the_worker_but_faults_no_finished_command() {
    const Household house(Habit::HANGS_EARLY, Limits{NEVER_NS, LIMIT_NS});
    Parent parent(*house.slab);
    parent.command({0});
    parent.wait({0}, 1);
    house.wait_until_dead();
    parent.check(0);
    CHECK(parent.fault(0) == Fault::NONE);
    parent.command({0});
    parent.wait({0}, 1);
    CHECK(parent.fault(0) == Fault::DIED);
}

void a_command_that_waits_for_a_hanging_early_reset_is_timed_out() {
    const Household house(Habit::HANGS_EARLY, Limits{NEVER_NS, 5 * LIMIT_NS});
    Parent parent(*house.slab);
    parent.command({0});
    parent.wait({0}, 1);
    parent.command({0});
    parent.wait({0}, 1);
    CHECK(parent.fault(0) == Fault::TIMED_OUT);
}

// abort_commands may be slow. It must not abort commands given meanwhile.
void a_later_command_is_not_aborted_by_the_number_of_an_earlier_one() {
    const auto slab = make_arena(1, 1);
    ServerWords& words = slab->words[0];
    words.ticket[0].store(6);
    words.done[0].store(6);
    words.state[0].store(state_word(7, Phase::ABORTED));
    words.done[0].store(5);  // as the slow thread has read it
    slab->workers[0]->learner.dead.store(static_cast<std::uint32_t>(Death::DIED));
    CHECK(abort_commands(*slab, 0, Fault::DIED) == 0);
    CHECK(words.done[0].load() == 5 && words.state[0].load() == state_word(7, Phase::ABORTED));
}

void a_reaper_is_inert_in_a_forked_child() {
    const Household house(Habit::ANSWERS, Limits{});
    const pid_t child = fork();
    if (child == 0) {
        Reaper& reaper = *house.reaper;
        reaper.forget(0);
        reaper.declare_dead(0);
        reaper.stop();
        reaper.~Reaper();
        _exit(house.slab->workers[0]->learner.dead.load() == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    kill(house.pid, SIGKILL);
    house.wait_until_dead();
}

}  // namespace

int main() {
    return run_cases({
        {"all commands of a killed process become faults", all_commands_of_a_killed_process_become_faults},
        {"a process that dies idle is only marked", a_process_that_dies_idle_is_only_marked},
        {"a command to a dead worker becomes a fault at once", a_command_to_a_dead_worker_becomes_a_fault_at_once},
        {"a hanging process is killed at its limit", a_hanging_process_is_killed_at_its_limit},
        {"a killed process takes all its lanes with it", a_killed_process_takes_all_its_lanes_with_it},
        {"a lane that hangs ends the process, and the others are its neighbours", a_lane_that_hangs_ends_the_process_and_the_others_are_its_neighbours},
        {"a reset has a limit of its own", a_reset_has_a_limit_of_its_own},
        {"an idle worker is never overdue", an_idle_worker_is_never_overdue},
        {"a reaper without limits sleeps until something happens", a_reaper_without_limits_sleeps_until_something_happens},
        {"a worker with invalid words does not escape its deadline", a_worker_with_invalid_words_does_not_escape_its_deadline},
        {"a command that makes progress is not late though it is outstanding for longer than its limit", a_command_that_makes_progress_is_not_late_though_it_is_outstanding_for_longer_than_its_limit},
        {"a forgotten worker may end", a_forgotten_worker_may_end},
        {"a hanging thread loses its command", a_hanging_thread_loses_its_command},
        {"what an overdue worker left half-written is a neighbour's fault", what_an_overdue_worker_left_half_written_is_a_neighbours_fault},
        {"a worker that never ends publishing is killed and its command timed out", a_worker_that_never_ends_publishing_is_killed_and_its_command_timed_out},
        {"a worker stopped while it starts a command is late", a_worker_stopped_while_it_starts_a_command_is_late},
        {"a worker stopped while it ends a command is late with the next", a_worker_stopped_while_it_ends_a_command_is_late_with_the_next},
        {"a slow request may keep a command waiting for its own limit and no longer", a_slow_request_may_keep_a_command_waiting_for_its_own_limit_and_no_longer},
        {"a worker whose words name no command is killed too", a_worker_whose_words_name_no_command_is_killed_too},
        {"a hanging early reset ends the worker but faults no finished command", a_hanging_early_reset_ends_the_worker_but_faults_no_finished_command},
        {"a command that waits for a hanging early reset is timed out", a_command_that_waits_for_a_hanging_early_reset_is_timed_out},
        {"a later command is not aborted by the number of an earlier one", a_later_command_is_not_aborted_by_the_number_of_an_earlier_one},
        {"a reaper is inert in a forked child", a_reaper_is_inert_in_a_forked_child},
    });
}
