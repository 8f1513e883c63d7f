// The reaper: turns the death of a worker, and a command that exceeds its limit, into faults of the affected envs.
//
//   worker's pidfd readable ──► dead = DIED     ──► every outstanding command: ABORTED, fault, done = ticket ──► ring
// no progress for too long ──► dead = OVERDUE, SIGKILL ──► late command TIMED_OUT, the others NEIGHBOUR    ──► ring
//
// Published results stay valid. Needs no Python.
//
// A worker process with several threads has a lane for each (Slab::lanes). Its death is that of all its lanes. A lane that is too late costs
// the process, and so the commands of the other lanes. `worker` is a number of a process here, and `lane` that of a thread.
//
// A worker can overwrite its own words at any time (protocol.hpp), for example `progress`, `current`, `state` and `done`. The normal limit
// uses them, and is exact to a few milliseconds for a correct worker. `ticket`, `command`, `requests` and `dead` belong to the learner.
// A second, much longer limit uses only these: how long a command may be outstanding.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <pthread.h>
#include <sys/types.h>

#include "shared/slab.hpp"

namespace stepmill {

// Aborts all outstanding commands of a lane whose `dead` is set (fault, no payload, done = ticket), then rings the pool. Leaves
// published results alone, and results that a worker which may still run is publishing. Any thread of the learner may call it, several
// at once: each command is aborted once. Returns how many commands this call aborted.
std::uint32_t abort_commands(Slab& slab, std::uint32_t lane, Fault fault);

// Called after tickets of a lane were written: if its worker died before that, the reaper did not see them. The reaper writes `dead` and
// then reads the tickets; with the fence, either it sees these tickets or this function sees `dead`.
inline void abort_if_dead(Slab& slab, std::uint32_t lane) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (slab.workers[lane]->learner.dead.load(std::memory_order_seq_cst) != 0) abort_commands(slab, lane, Fault::DIED);
}

// 0: no limit.
struct Limits {
    std::uint64_t step_ns{0};
    std::uint64_t reset_ns{0};
    int dump_signal{0};  // sent to an overdue worker shortly before SIGKILL, so that it writes a traceback; 0: none
    std::uint64_t call_ns{0};  // how long a command waits for a slow request, in addition to its own limit; 0: without limit
    std::uint64_t attempts_ns{0};  // limit of a reset with all its attempts and the waits between them; 0: reset_ns
};

// Owns one native thread and duplicates of the pidfds. Any thread of the learner may call it; a call waits at most for one scan of the
// control words. In a forked child it does nothing.
class Reaper {
   public:
    Reaper(std::shared_ptr<Slab> slab, Limits limits);  // throws std::system_error
    ~Reaper();
    Reaper(const Reaper&) = delete;
    Reaper& operator=(const Reaper&) = delete;

    // The worker lives from now on: the process behind `pidfd` (duplicated), or a thread if it is NO_PIDFD. If it is a successor, the old
    // process must be gone and its commands aborted. Throws std::system_error.
    void watch(std::uint32_t worker, int pidfd);
    void forget(std::uint32_t worker);        // its end is expected
    void declare_dead(std::uint32_t worker);  // its thread has ended
    // The learner has the replies to the first num_requests slow requests that were ever posted to this lane.
    void record_answered(std::uint32_t lane, std::uint32_t num_requests);
    void finish_marking() const { if (!is_forked()) const std::lock_guard lock(mutex_); }  // waits until all lanes of a worker are marked dead
    void stop();                              // ends the thread; idempotent

    static constexpr int NO_PIDFD = OwnedFd::NONE;

   private:
    // The newest command of a server, as the reaper saw it.
    struct Outstanding {
        std::uint32_t ticket{0};
        std::uint32_t num_requests{0};  // posted to the lane when the command was first seen
        std::uint64_t since_ns{0};      // when it was first seen; 0: it is done
    };
    // A lane. The first one of a worker has what belongs to the process: `pidfd`, `generation`, `kill_at_ns`.
    struct Watched {
        OwnedFd pidfd;
        bool is_watched{false};
        bool is_overdue{false};       // it was given up
        std::uint32_t generation{0};  // distinguishes events of this process from those of its predecessors
        std::uint64_t progress{0};
        std::uint64_t since_ns{0};    // when `progress` was first seen
        std::uint64_t untaken_ns{0};  // since when an outstanding command has not been started; 0: none
        std::uint64_t kill_at_ns{0};  // when to send SIGKILL to an overdue worker; 0: nothing to send
        std::uint32_t stuck{NO_SERVER};  // the server whose command end_stuck() could not abort
        std::uint32_t num_answered{0};   // slow requests that are certainly answered
        std::vector<Outstanding> commands;  // by server
    };

    // Locks the records for a call about the worker or lane `number`. Throws std::out_of_range unless it is less than `stop`. In a forked
    // child, where the call must do nothing, the returned lock owns nothing.
    std::unique_lock<std::mutex> lock_for(std::uint32_t number, std::size_t stop) const;
    Watched& process_of(std::uint32_t lane) { return watched_[slab_->lanes[slab_->worker_of[lane]].front()]; }
    static void* run(void* self);
    void loop();
    int tick_ms() const;
    void on_event(std::uint64_t data);
    void mark_dead(std::uint32_t worker);
    void skip_absence(std::uint64_t absent_ns);
    void check_outstanding(std::uint32_t lane, std::uint64_t now);
    std::uint64_t longest_ns(std::uint32_t lane, std::uint32_t num_requests) const;
    std::uint64_t limit_ns(bool is_reset) const { return is_reset ? limits_.reset_ns : limits_.step_ns; }
    void check_deadline(std::uint32_t lane, std::uint64_t now);
    void check_current(std::uint32_t lane, std::uint32_t local, std::uint64_t elapsed_ns);
    void check_untaken(std::uint32_t lane, std::uint64_t now);
    bool is_serving(std::uint32_t lane) const;
    bool has_stalled(std::uint32_t lane) const;
    bool is_finished(std::uint32_t lane, std::uint32_t local) const;
    void abandon(std::uint32_t lane, std::uint32_t local, std::uint32_t ticket, std::uint32_t state);
    void end_stuck(std::uint32_t lane, std::uint32_t local);
    void kill(Watched& process) const;
    void end_overdue(std::uint32_t lane);
    void mark_lane_dead(std::uint32_t lane);
    void unwatch(std::uint32_t worker);
    bool is_forked() const;

    std::shared_ptr<Slab> slab_;
    const Limits limits_;
    const pid_t owner_;
    OwnedFd epoll_, wake_;
    pthread_t thread_{};
    bool is_running_{false};       // owned by the caller: the thread must be joined
    mutable std::mutex mutex_;
    bool is_stopping_{false};      // guarded by mutex_
    std::vector<Watched> watched_;  // by lane; guarded by mutex_
};

}  // namespace stepmill
