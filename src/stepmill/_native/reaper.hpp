// The reaper: turns the death of a worker, and a command that takes too long, into faults of the rows concerned.
//
//   worker's pidfd readable ──► dead = DIED     ──► every outstanding command: CONDEMNED, fault, done = ticket ──► ring
//   progress stands still   ──► dead = OVERDUE, SIGKILL ──► culprit TIMED_OUT, the others NEIGHBOUR          ──► ring
//
// Results that were published stay as they are. Knows no Python.
//
// A worker can write anything at any time over its own words (protocol.hpp), for example `progress`, `current`, `state` and `done`.
// They tell an honest worker's story, by which a deadline is kept to the millisecond. `ticket`, `command`, `requests` and `dead` are
// the learner's. A second limit, many times as long, needs nothing but these: how long a command may be outstanding at all.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <pthread.h>
#include <sys/types.h>

#include "slab.hpp"

namespace stepmill {

// Settles all outstanding commands of a worker whose `dead` is set: fault, no payload, done = ticket; then rings the pool.
// Commands whose results are published, or being published by one who may still run, are left alone. Any thread of the
// learner may call it, several at once: each command is settled once. Returns how many this call settled.
std::uint32_t condemn_worker(Slab& slab, std::uint32_t worker, Fault fault);

// 0: no limit.
struct Limits {
    std::uint64_t step_ns{0};
    std::uint64_t reset_ns{0};
    int dump_signal{0};  // sent to an overdue worker that is to write down where it stands, a moment before SIGKILL; 0: none
    std::uint64_t call_ns{0};  // how long a command waits for a slow request, on top of its own limit; 0: for ever
    std::uint64_t attempts_ns{0};  // how long a reset may take with all its attempts and the waits between them; 0: reset_ns
};

// Owns one native thread and duplicates of the pidfds. Any thread of the learner may call it; none waits for more than a
// scan of the control words. In a forked child it is inert.
class Reaper {
   public:
    Reaper(std::shared_ptr<Slab> slab, Limits limits);  // throws std::system_error
    ~Reaper();
    Reaper(const Reaper&) = delete;
    Reaper& operator=(const Reaper&) = delete;

    // The worker lives from now on, in the process behind `pidfd` (duplicated), or in a thread if it is NO_PIDFD. Of a
    // worker that is replaced, the old process must be gone and its rows be settled. Throws std::system_error.
    void watch(std::uint32_t worker, int pidfd);
    void forget(std::uint32_t worker);        // its end is expected
    void declare_dead(std::uint32_t worker);  // its thread has ended
    void stop();                              // ends the thread; idempotent
    std::uint32_t num_workers() const { return static_cast<std::uint32_t>(slab_->workers.size()); }

    static constexpr int NO_PIDFD = -1;

   private:
    // What the pool commanded of a server, as it was seen last.
    struct Outstanding {
        std::uint32_t ticket{0};
        std::uint32_t num_requests{0};  // posted to the worker when the command was seen first
        std::uint64_t since_ns{0};      // when it was seen first; 0: it is done
    };
    struct Watched {
        int pidfd{NO_PIDFD};
        bool is_watched{false};
        bool is_overdue{false};       // it was given up
        std::uint32_t generation{0};  // tells an event of a former process from one of this
        std::uint64_t progress{0};
        std::uint64_t since_ns{0};    // when `progress` was seen first
        std::uint64_t untaken_ns{0};  // when a command was seen first that nobody takes; 0: there is none
        std::uint64_t kill_at_ns{0};  // it was given up, and asked where it stands; 0: nothing is left to do
        std::uint32_t stuck{NO_SERVER};  // killed since it never came to an end of publishing this server's result
        std::uint32_t num_answered{0};   // slow requests that are answered for certain
        std::vector<Outstanding> commands;  // by server
    };

    static void* run(void* self);
    void loop();
    int tick_ms() const;
    void on_event(std::uint64_t data);
    void bury(std::uint32_t worker);
    void check_deadlines(std::uint64_t now);
    void skip_absence(std::uint64_t absent_ns);
    void check_outstanding(std::uint32_t worker, std::uint64_t now);
    std::uint64_t longest_ns(std::uint32_t worker, std::uint32_t num_requests) const;
    std::uint64_t limit_ns(bool is_reset) const { return is_reset ? limits_.reset_ns : limits_.step_ns; }
    void check_deadline(std::uint32_t worker, std::uint64_t now);
    void check_current(std::uint32_t worker, std::uint32_t local, std::uint64_t elapsed_ns);
    void check_untaken(std::uint32_t worker, std::uint64_t now);
    bool is_still(std::uint32_t worker) const;
    bool is_finished(std::uint32_t worker, std::uint32_t local) const;
    void give_up(std::uint32_t worker, std::uint32_t local, std::uint32_t ticket, std::uint32_t state);
    void end_stuck(std::uint32_t worker, std::uint32_t local);
    void kill(Watched& watched) const;
    void end_overdue(std::uint32_t worker);
    void drop(std::uint32_t worker);
    void wake() const;
    bool is_forked() const;
    void close_all();

    std::shared_ptr<Slab> slab_;
    const Limits limits_;
    const pid_t owner_;
    int epoll_{-1};
    int wake_{-1};
    pthread_t thread_{};
    bool is_running_{false};       // the caller's: the thread is there to be joined
    std::mutex mutex_;
    bool is_stopping_{false};      // guarded by mutex_
    std::vector<Watched> watched_;  // guarded by mutex_
};

}  // namespace stepmill
