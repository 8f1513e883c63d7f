// A pool without Python: threads that act as workers, and a learner, which follow the protocol of docs/ARCHITECTURE.md word by word.
// A worker can be made to die at any step.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include <poll.h>

#include "arena.hpp"
#include "shared/protocol.hpp"
#include "shared/reaper.hpp"

namespace stepmill {

// The step of the protocol at which a worker's thread ends.
enum class DeathPoint { NONE, IDLE, TAKEN, CLAIMED, DONE, COUNTED, SPINNING };

constexpr std::uint64_t LONG_NS = 20'000'000'000;  // a thread that sleeps this long was not woken

// Returns the result of server `server` for ticket `ticket`.
inline std::uint64_t answer(std::uint32_t server, std::uint32_t ticket) { return (std::uint64_t{server} << 32 | ticket) * 0x9e3779b97f4a7c15u; }

// One worker: a thread that runs commands in server order, and counts its results in groups.
class WorkerThread {
   public:
    WorkerThread(Slab& slab, std::uint32_t worker, DeathPoint death, unsigned chance)
        : slab_(slab), worker_(worker), death_(death), chance_(chance), random_(worker * 7919 + chance), thread_([this] { run(); }) {}
    ~WorkerThread() { thread_.join(); }
    WorkerThread(const WorkerThread&) = delete;
    WorkerThread& operator=(const WorkerThread&) = delete;

    bool has_died() const { return has_died_.load(std::memory_order_acquire); }

   private:
    bool dies_at(DeathPoint point) { return point == death_ && random_() % chance_ == 0; }

    void run() {
        WorkerControl& control = *slab_.workers[worker_];
        const auto num_servers = static_cast<std::uint32_t>(slab_.plan.servers[worker_].size());
        for (std::uint32_t local = 0; local < num_servers; ++local) done_.push_back(slab_.words[worker_].done[local].load(std::memory_order_acquire));
        while (control.learner.stop.load(std::memory_order_acquire) == 0) {
            const std::uint32_t seen = control.learner.bell.load(std::memory_order_acquire);
            const bool has_worked = sweep();
            if (is_dying_ || (!has_worked && !wait(seen))) {
                has_died_.store(true, std::memory_order_release);
                return;
            }
        }
    }

    bool sweep() {
        ServerWords& words = slab_.words[worker_];
        std::uint32_t group = 0;
        bool has_worked = false;
        for (std::uint32_t local = 0; local < done_.size() && !is_dying_; ++local) {
            const std::uint32_t ticket = words.ticket[local].load(std::memory_order_acquire);
            if (ticket == done_[local]) continue;
            has_worked = true;
            done_[local] = ticket;
            if (!start_command(words.state[local], ticket)) continue;
            is_dying_ = !perform(local, ticket);
            if (is_dying_) break;
            ++group;
            is_dying_ = dies_at(DeathPoint::DONE);
        }
        if (group != 0 && !is_dying_) {
            count_results(*slab_.pool, group);
            is_dying_ = dies_at(DeathPoint::COUNTED);
        }
        return has_worked;
    }

    bool perform(std::uint32_t local, std::uint32_t ticket) {
        WorkerControl& control = *slab_.workers[worker_];
        ServerWords& words = slab_.words[worker_];
        begin_activity(control, local, static_cast<Activity>(get_command(words, local)));
        if (dies_at(DeathPoint::TAKEN)) return false;
        if (random_() % 64 == 0) std::this_thread::yield();
        if (claim_result(words.state[local], ticket)) {
            const std::uint32_t server = slab_.plan.servers[worker_][local];
            if (dies_at(DeathPoint::CLAIMED)) return false;
            observation(slab_, server) = answer(server, ticket);
            words.fault[local].store(static_cast<std::uint32_t>(Fault::NONE), std::memory_order_relaxed);
            words.done[local].store(ticket, std::memory_order_release);
        }
        end_activity(control);
        return true;
    }

    // Returns false if the worker died.
    bool wait(std::uint32_t seen) {
        WorkerControl& control = *slab_.workers[worker_];
        if (dies_at(DeathPoint::IDLE)) return false;
        if (acquire_spin(*slab_.pool, worker_)) {
            std::uint64_t lost_ns = 0;
            const bool is_rung = spin_while(control.learner.bell, seen, now_ns() + 2'000, lost_ns);
            if (dies_at(DeathPoint::SPINNING)) return false;
            release_spin(*slab_.pool, worker_);
            if (is_rung) return true;
        }
        while (control.learner.bell.load(std::memory_order_acquire) == seen) CHECK(park(control.learner.bell, control.own.parked, seen, LONG_NS) != Woken::TIMED_OUT);
        return true;
    }

    Slab& slab_;
    const std::uint32_t worker_;
    const DeathPoint death_;
    const unsigned chance_;
    std::minstd_rand random_;
    std::vector<std::uint32_t> done_;
    bool is_dying_{false};
    std::atomic<bool> has_died_{false};
    std::thread thread_;  // last: the thread starts when all other members are constructed
};

// How a learner waits.
enum class Waiting { PARKS, WATCHES };

// The learner's side: gives commands to servers, waits for some of them, and checks each result.
class Parent {
   public:
    explicit Parent(Slab& slab, Waiting waiting = Waiting::PARKS) : slab_(slab), waiting_(waiting), tickets_(slab.server_locations.size(), 0) {}

    void command(const std::vector<std::uint32_t>& servers) {
        for (const std::uint32_t server : servers) {
            const ServerLocation location = slab_.server_locations[server];
            ServerWords& words = slab_.words[location.worker];
            set_command(words, location.local, Command::STEP);
            words.ticket[location.local].store(++tickets_[server], std::memory_order_seq_cst);
        }
        for (std::uint32_t worker = 0; worker < slab_.workers.size(); ++worker) {
            ring_worker(*slab_.workers[worker]);
            if (slab_.workers[worker]->learner.dead.load(std::memory_order_seq_cst) != 0) abort_commands(slab_, worker, Fault::DIED);
        }
    }

    bool is_done(std::uint32_t server) const {
        const ServerLocation location = slab_.server_locations[server];
        return slab_.words[location.worker].done[location.local].load(std::memory_order_acquire) == tickets_[server];
    }

    Fault fault(std::uint32_t server) const {
        const ServerLocation location = slab_.server_locations[server];
        return static_cast<Fault>(slab_.words[location.worker].fault[location.local].load(std::memory_order_relaxed));
    }

    // Waits until `num_needed` of the servers are done. Sleeping for LONG_NS means a lost wake-up.
    void wait(const std::vector<std::uint32_t>& servers, std::uint32_t num_needed) {
        PoolControl& pool = *slab_.pool;
        for (;;) {
            if (waiting_ == Waiting::WATCHES) stop_watching(pool);
            const std::uint32_t seen = pool.shared.bell.load(std::memory_order_acquire);
            const std::uint32_t count = pool.shared.count.load(std::memory_order_seq_cst);
            std::uint32_t num_ready = 0;
            for (const std::uint32_t server : servers) num_ready += is_done(server) ? 1 : 0;
            if (num_ready >= num_needed) return;
            pool.own.ring_at.store(count + (num_needed - num_ready), std::memory_order_seq_cst);
            if (pool.shared.count.load(std::memory_order_seq_cst) != count) continue;
            if (waiting_ == Waiting::PARKS) {
                CHECK(park(pool.shared.bell, pool.own.parked, seen, LONG_NS) != Woken::TIMED_OUT);
            } else if (watch_bell(pool, seen)) {
                pollfd wanted{pool.event, POLLIN, 0};
                CHECK(poll(&wanted, 1, static_cast<int>(LONG_NS / 1'000'000)) == 1);
            }
        }
    }

    // A result is right, or the worker has died.
    void check(std::uint32_t server) const {
        CHECK(is_done(server));
        if (fault(server) == Fault::NONE) {
            CHECK(observation(slab_, server) == answer(server, tickets_[server]));
        } else {
            CHECK(fault(server) == Fault::DIED && slab_.workers[slab_.server_locations[server].worker]->learner.dead.load() != 0);
        }
    }

    void stop_workers() {
        for (WorkerControl* worker : slab_.workers) {
            worker->learner.stop.store(1, std::memory_order_release);
            ring_worker(*worker);
        }
    }

   private:
    Slab& slab_;
    const Waiting waiting_;
    std::vector<std::uint32_t> tickets_;
};

}  // namespace stepmill
