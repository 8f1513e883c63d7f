// The words that a pool and its workers share, and the functions that change them. Needs neither Python nor NumPy.
//
// learner's  PoolWords | LearnerWords 0 with its arrays of server words | LearnerWords 1 … | blobs | actions
//     shared     SharedWords
// worker 0's WorkerWords, its arrays of server words, its rows of small data arrays
//     worker 1's …
//     large observations
//
// Each part begins on its own page, and a worker process can write only its own parts (slab/layout.py).
// Each byte has one writer (docs/ARCHITECTURE.md). Words with several writers are changed only by atomic read-modify-write, and say so.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "shared/platform.hpp"
#include "shared/statistics.hpp"

namespace stepmill {

constexpr std::size_t CACHE_LINE = 64;
constexpr std::uint64_t LAYOUT_MAGIC = 0x6c6c696d70657473;  // "stepmill"
constexpr std::uint32_t LAYOUT_VERSION = 5 + STATISTICS_HASH;

// How episodes follow each other; mirrors PoolOptions.
enum class Autoreset : int { NEXT_STEP = 0, SAME_STEP = 1, DISABLED = 2 };
enum class Seeding : int { CONTINUE = 0, PER_EPISODE = 1, FIXED = 2 };

enum class Command : std::uint8_t { NONE = 0, STEP = 1, RESET = 2 };
// What a worker is doing. An early reset runs before any command asks for it. GIVEN_UP: a coroutine env went on after it was cancelled,
// and the worker asks to be ended.
enum class Activity : std::uint32_t { NONE = 0, STEP = 1, RESET = 2, EARLY_RESET = 3, GIVEN_UP = 4 };
static_assert(static_cast<int>(Activity::NONE) == static_cast<int>(Command::NONE) && static_cast<int>(Activity::STEP) == static_cast<int>(Command::STEP) &&
              static_cast<int>(Activity::RESET) == static_cast<int>(Command::RESET), "a worker that does a command is at the activity of its number");
enum class Phase : std::uint32_t { IDLE = 0, RUNNING = 1, PUBLISHING = 2, ABORTED = 3 };
enum class Fault : std::uint32_t { NONE = 0, RAISED = 1, BAD_OUTPUT = 2, BAD_ACTION = 3, DIED = 4, TIMED_OUT = 5, NEIGHBOUR = 6, INTERRUPTED = 7 };

// Values of WorkerControl::dead.
enum class Death : std::uint32_t {
    NONE = 0,
    DIED = 1,     // all its threads are gone: it writes nothing more
    OVERDUE = 2,  // given up, may still run: each of its state CAS fails
};

// Values of PoolWords::parked. Those of WorkerWords::parked are the first two.
enum class Parked : std::uint32_t {
    NO = 0,
    ON_BELL = 1,   // a thread sleeps on the bell
    ON_EVENT = 2,  // an event loop of the learner watches the pool's eventfd
};

constexpr std::uint32_t MAX_PASSED = 64;  // a busy worker runs a staged reset after this many sweeps over its servers

constexpr std::uint8_t FLAG_SEED = 1;      // the command has a seed
constexpr std::uint8_t FLAG_BLOB = 2;      // the command has a blob
constexpr std::uint8_t FLAG_EPISODE = 4;   // the seed is that of episode 0, and the reset begins episode `episode`
constexpr std::uint8_t FLAG_LAST = 8;      // if this step ends the episode, the worker begins no other
constexpr std::uint8_t FLAG_AUTO = 16;     // an automatic reset: reset() is called as after the end of an episode
constexpr std::uint8_t RESULT_FINAL = 1;   // the final rows have the last observation of an episode that ended in this step
constexpr std::uint8_t RESULT_REMOTE = 2;  // the payload is in the result memfd, not in the payload row

// Tickets and the like are counted up and wrap around: of two numbers, the later one is less than 2^31 above the other.
constexpr bool is_later(std::uint32_t number, std::uint32_t other) noexcept { return static_cast<std::int32_t>(number - other) > 0; }

using ObsHash = std::uint16_t;  // few bits, since the learner reads all of them in each step (docs/decisions/0017)

// The learner's words of the pool. Workers map them read-only.
struct alignas(CACHE_LINE) PoolWords {
    // Written once, before a worker attaches.
    std::uint64_t magic;
    std::uint32_t version;
    std::uint32_t num_workers;
    std::uint64_t size_bytes;
    std::uint64_t description_offset, description_bytes;  // JSON for programs that attach; see slab/counters.py
    alignas(CACHE_LINE) Word ring_at;  // workers ring when `count` reaches this number
    Word eager;                     // 1: workers add to count after each result, 0: after each group
    Word parked;                    // Parked: what a ring must do beside changing the bell
    std::atomic<std::int32_t> max_spinners;
    Word spin_ns;                   // how long a worker may spin before it parks
    Word num_spin_workers;          // workers with smaller numbers may spin
    Word hashing;                   // 1: workers write a hash of each observation
    Word tracing;                   // 1: all threads write what they do to their TraceRing
    LearnerCounters counters;
};

// Words that all workers write, by atomic read-modify-write. They are the only words that a faulty worker can damage for others. All
// three are hints: whatever they contain, no wait hangs and no array that the user holds changes.
struct alignas(CACHE_LINE) SharedWords {
    Word bell;                       // all add; the learner sleeps on it, 100 ms at a time
    alignas(CACHE_LINE) Word count;  // all add: results published since the start
    alignas(CACHE_LINE) std::atomic<std::uint64_t> spinners;  // one bit per spinning thread, set and cleared by that thread; the reaper clears the bit of a dead worker
};

// The learner's words of one worker, which maps them read-only.
struct alignas(CACHE_LINE) LearnerWords {
    Word bell;      // the worker sleeps on it
    Word requests;  // slow requests posted so far
    Word stop;      // 1: close the envs and end
    Word pid;       // of the worker's newest process
#define PROCESS_COUNTER(name) Word name;
#include "shared/statistics.def"
    // Written by the reaper.
    alignas(CACHE_LINE) Word dead;
    Word reaped;  // 1: the reaper has finished with a dead worker; until a successor is watched only the learner's thread writes these words
};

// A worker's own words.
struct alignas(CACHE_LINE) WorkerWords {
    Word parked;
    Word current;   // the server whose command runs, or NO_SERVER
    Word running;   // the Activity there
    Word serving;   // 1: runs a slow request, which has its own deadline
    std::atomic<std::uint64_t> progress;  // grows at the begin and at the end of each activity
    alignas(CACHE_LINE) WorkerCounters counters;
    // Of this process, not of its predecessors:
    Counter num_ended;       // episodes that ended
    Counter resident_bytes;  // at the end of an episode, if that is measured
};

// References to all words of a pool.
struct PoolControl {
    PoolWords& own;
    SharedWords& shared;
    const int event;  // the pool's eventfd in this process, which the slab owns; -1 if there is none
};

// References to all words of one worker.
struct WorkerControl {
    LearnerWords& learner;
    WorkerWords& own;
};

constexpr std::uint32_t NO_SERVER = UINT32_MAX;

// The worker begins an activity, or another part of one. A thread that reads `current` also sees `running` and `progress`.
inline void begin_activity(WorkerControl& worker, std::uint32_t local, Activity activity) noexcept {
    worker.own.progress.store(worker.own.progress.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    worker.own.running.store(static_cast<std::uint32_t>(activity), std::memory_order_release);
    worker.own.current.store(local, std::memory_order_release);
}

// In this order: while `current` names a server, the activity that began when progress last grew still runs.
inline void end_activity(WorkerControl& worker) noexcept {
    worker.own.current.store(NO_SERVER, std::memory_order_release);
    worker.own.progress.store(worker.own.progress.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

// A slow request was answered. Progress comes first: a reader that sees serving == 0 must not add the request's time to the next command.
inline void end_request(WorkerControl& worker) noexcept {
    worker.own.progress.store(worker.own.progress.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    worker.own.serving.store(0, std::memory_order_release);
}

// Rewrites words of a worker that is gone, for its successor.
inline void reset_words(WorkerControl& worker, std::uint32_t num_requests, bool is_stopped) noexcept {
    worker.learner.requests.store(num_requests, std::memory_order_relaxed);
    worker.learner.stop.store(is_stopped, std::memory_order_relaxed);
    worker.own.parked.store(0, std::memory_order_relaxed);
    worker.own.serving.store(0, std::memory_order_relaxed);
    worker.own.current.store(NO_SERVER, std::memory_order_relaxed);
}

// Stores only changed values: a cache line without writes stays in the caches of both sides, and most words of a result repeat the
// previous ones.
template <typename Value>
inline void put(Value& place, Value value) noexcept {
    if (place != value) place = value;
}

constexpr std::size_t align_line(std::size_t bytes) { return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE; }

// The control words of a worker's k servers: one array per word, each from its own cache line. The learner's arrays follow its
// LearnerWords, the worker's arrays follow its WorkerWords.
struct ServerWords {
    // Written by the learner.
    Word* ticket;
    std::uint32_t* row;
    std::uint8_t* command;
    std::uint8_t* flags;
    std::uint8_t* slot;
    std::uint64_t* seed;
    std::uint64_t* blob_offset;
    std::uint64_t* blob_bytes;
    std::uint64_t* blob_generation;
    std::uint64_t* episode;
    // Written by the worker; `state` also by the reaper (CAS), `done` and `fault` by the reaper after a death.
    Word* done;
    Word* state;
    Word* fault;
    std::uint8_t* result;
    std::uint64_t* payload_offset;
    std::uint64_t* payload_bytes;
    std::uint64_t* payload_generation;
    ObsHash* hash;
    ServerCounters* counters;

    static ServerWords at(std::byte* learner, std::byte* worker, std::uint32_t num_servers) noexcept {
        ServerWords words{};
        words.place_learners(learner, num_servers);
        words.place_workers(worker, num_servers);
        return words;
    }

    // The reset begins episode `number` of those whose first has the seed `base`.
    void set_episode(std::uint32_t local, std::uint64_t base, std::uint64_t number) const noexcept {
        flags[local] = static_cast<std::uint8_t>(flags[local] | FLAG_SEED | FLAG_EPISODE), seed[local] = base, episode[local] = number;
    }

    // The result has neither a payload nor a final observation.
    void clear_result(std::uint32_t local) const noexcept { result[local] = 0, payload_bytes[local] = 0; }

    static std::size_t learner_bytes(std::uint32_t num_servers) noexcept { return ServerWords{}.place_learners(nullptr, num_servers); }
    static std::size_t worker_bytes(std::uint32_t num_servers) noexcept { return ServerWords{}.place_workers(nullptr, num_servers); }

   private:
    std::size_t place_learners(std::byte* base, std::uint32_t num_servers) noexcept {
        return place(base, num_servers, ticket, row, command, flags, slot, seed, blob_offset, blob_bytes, blob_generation, episode);
    }
    std::size_t place_workers(std::byte* base, std::uint32_t num_servers) noexcept {
        return place(base, num_servers, done, state, fault, result, payload_offset, payload_bytes, payload_generation, hash, counters);
    }
    // Places arrays one after another and returns their size in bytes. Without a base it only computes the size.
    template <typename... Items>
    static std::size_t place(std::byte* base, std::uint32_t num_servers, Items*&... arrays) noexcept {
        std::size_t used = 0;
        ((arrays = base == nullptr ? nullptr : reinterpret_cast<Items*>(base + used), used += align_line(sizeof(Items) * num_servers)), ...);
        return used;
    }
};

// Sizes of the learner's and of the worker's words of one worker.
inline std::size_t learner_words_bytes(std::uint32_t num_servers) { return sizeof(LearnerWords) + ServerWords::learner_bytes(num_servers); }
inline std::size_t worker_words_bytes(std::uint32_t num_servers) { return sizeof(WorkerWords) + ServerWords::worker_bytes(num_servers); }

// ---- commands ---------------------------------------------------------------------------------------------------

// Writes the next command, before the ticket grows. The reaper may read the word at the same time, since a command that just finished
// may still look outstanding to it.
inline void set_command(const ServerWords& words, std::uint32_t local, Command command) noexcept {
    const std::atomic_ref word(words.command[local]);
    if (word.load(std::memory_order_relaxed) != static_cast<std::uint8_t>(command)) word.store(static_cast<std::uint8_t>(command), std::memory_order_relaxed);
}

inline Command get_command(const ServerWords& words, std::uint32_t local) noexcept {
    return static_cast<Command>(std::atomic_ref(words.command[local]).load(std::memory_order_relaxed));
}

// ---- row states -------------------------------------------------------------------------------------------------

constexpr std::uint32_t state_word(std::uint32_t ticket, Phase phase) noexcept { return ticket << 2 | static_cast<std::uint32_t>(phase); }
constexpr std::uint32_t state_ticket(std::uint32_t state) noexcept { return state >> 2; }
constexpr Phase state_phase(std::uint32_t state) noexcept { return static_cast<Phase>(state & 3u); }
constexpr std::uint32_t ticket_part(std::uint32_t ticket) noexcept { return ticket & 0x3fffffffu; }  // the bits of a ticket that a state word has

// The owner starts command `ticket`. Returns false if the command was aborted before; the owner must then write nothing.
inline bool start_command(Word& state, std::uint32_t ticket) noexcept {
    std::uint32_t old = state.load(std::memory_order_relaxed);
    if (state_ticket(old) == ticket_part(ticket)) return false;
    return state.compare_exchange_strong(old, state_word(ticket, Phase::RUNNING), std::memory_order_acq_rel);
}

// The owner claims the result rows of command `ticket`. Returns false if the command was aborted; the owner must then write nothing.
inline bool claim_result(Word& state, std::uint32_t ticket) noexcept {
    std::uint32_t expected = state_word(ticket, Phase::RUNNING);
    return state.compare_exchange_strong(expected, state_word(ticket, Phase::PUBLISHING), std::memory_order_acq_rel);
}

// ---- doorbells --------------------------------------------------------------------------------------------------

inline void ring(Word& bell, Word& parked) noexcept {
    // Change the bell before reading `parked`: a sleeper that sets `parked` later sees the new bell and does not sleep.
    bell.fetch_add(1, std::memory_order_seq_cst);
    if (parked.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell);
}

inline void ring_worker(WorkerControl& worker) noexcept { ring(worker.learner.bell, worker.own.parked); }

inline void ring_pool(PoolControl& pool) noexcept {
    pool.shared.bell.fetch_add(1, std::memory_order_seq_cst);
    const auto parked = static_cast<Parked>(pool.own.parked.load(std::memory_order_seq_cst));
    if (parked == Parked::ON_BELL) futex_wake_all(pool.shared.bell);
    if (parked == Parked::ON_EVENT) set_event(pool.event);
}

// Adds to the count of published results, and rings the learner if the count crosses `ring_at`. The `done` words must be stored before.
inline void count_results(PoolControl& pool, std::uint32_t group) noexcept {
    const std::uint32_t before = pool.shared.count.fetch_add(group, std::memory_order_seq_cst);
    const std::uint32_t ring_at = pool.own.ring_at.load(std::memory_order_seq_cst);
    if (is_later(ring_at, before) && !is_later(ring_at, before + group)) ring_pool(pool);
}

// ---- spinning ---------------------------------------------------------------------------------------------------

constexpr int LOOKS_PER_YIELD = 4;
constexpr std::uint64_t SPIN_GRACE_NS = 2'000;
constexpr std::uint32_t PARENT = UINT32_MAX;  // used in place of a worker number for the learner
constexpr std::uint32_t PARENT_BIT = 63;      // in `spinners`; workers share the other 63 bits

constexpr std::uint64_t spin_bit(std::uint32_t worker) noexcept { return std::uint64_t{1} << (worker == PARENT ? PARENT_BIT : worker % PARENT_BIT); }

// At most max_spinners threads of a pool spin at a time, so that envs have enough cores.
// One instruction takes the permit and records its owner, so that the reaper can return the permit of a dead worker.
inline bool acquire_spin(PoolControl& pool, std::uint32_t worker) noexcept {
    std::uint64_t spinners = pool.shared.spinners.load(std::memory_order_relaxed);
    for (;;) {
        if ((spinners & spin_bit(worker)) != 0 || std::popcount(spinners) >= pool.own.max_spinners.load(std::memory_order_relaxed)) return false;
        if (pool.shared.spinners.compare_exchange_weak(spinners, spinners | spin_bit(worker), std::memory_order_acq_rel)) return true;
    }
}

inline void release_spin(PoolControl& pool, std::uint32_t worker) noexcept { pool.shared.spinners.fetch_and(~spin_bit(worker), std::memory_order_acq_rel); }

// Yields the core between looks, since the thread that we wait for may need it. Raises `lost_ns` to the longest time until the core
// came back.
inline bool spin_while(const Word& word, std::uint32_t seen, std::uint64_t until_ns, std::uint64_t& lost_ns) noexcept {
    std::uint64_t looked = now_ns();
    do {
        for (int i = 0; i < LOOKS_PER_YIELD; ++i) {
            if (word.load(std::memory_order_acquire) != seen) return true;
            cpu_pause();
        }
        yield_core();
        const std::uint64_t began = std::exchange(looked, now_ns());
        lost_ns = std::max(lost_ns, looked - began);
    } while (looked < until_ns);
    return word.load(std::memory_order_acquire) != seen;
}

// Spins until the bell moves from `seen`, at most spin_ns. Without a permit it retries for a moment: the other side of a hand-off is
// about to return its own.
inline bool spin_for(PoolControl& pool, std::uint32_t worker, const Word& bell, std::uint32_t seen, std::uint64_t spin_ns, std::uint64_t& lost_ns) noexcept {
    const std::uint64_t began = now_ns();
    bool has_permit = acquire_spin(pool, worker);
    bool is_rung = spin_while(bell, seen, began + (has_permit ? spin_ns : 0), lost_ns);
    while (!is_rung && !has_permit && now_ns() < began + SPIN_GRACE_NS) {
        has_permit = acquire_spin(pool, worker);
        is_rung = spin_while(bell, seen, has_permit ? began + spin_ns : 0, lost_ns);
    }
    if (has_permit) release_spin(pool, worker);
    return is_rung;
}

// Decides whether a thread should spin: only if its last wait was short, and not soon after another program took the core that it had
// yielded. A spinning thread has no claim to a core; a sleeping thread that is woken has.
class SpinPolicy {
 public:
    std::uint64_t waited_ns() const noexcept { return waited_ns_; }  // of the last wait
    bool may_spin(std::uint64_t spin_ns, std::uint64_t now) const noexcept { return waited_ns_ < spin_ns && now >= rests_until_ns_; }
    // Envs of this pool keep the core for less than a spin, otherwise no thread would spin: a loss of two spins is due to another program.
    void record_wait(std::uint64_t waited_ns, std::uint64_t lost_ns, std::uint64_t spin_ns, std::uint64_t now) noexcept {
        waited_ns_ = waited_ns;
        if (lost_ns > 2 * spin_ns) rests_until_ns_ = now + RESTS_PER_LOSS * lost_ns;
    }

 private:
    static constexpr std::uint64_t RESTS_PER_LOSS = 64;  // so spinning loses at most 1/64 of the time
    std::uint64_t waited_ns_ = 0, rests_until_ns_ = 0;
};

// Sleeps until the bell moves from `seen`, at most timeout_ns.
inline Woken park(Word& bell, Word& parked, std::uint32_t seen, std::uint64_t timeout_ns) noexcept {
    parked.store(static_cast<std::uint32_t>(Parked::ON_BELL), std::memory_order_seq_cst);
    Woken woken = Woken::RUNG;
    if (bell.load(std::memory_order_seq_cst) == seen) woken = futex_wait(bell, seen, timeout_ns);
    parked.store(static_cast<std::uint32_t>(Parked::NO), std::memory_order_seq_cst);
    return woken;
}

// Makes the pool's event readable with the next ring. Returns false if the bell has moved from `seen`.
inline bool watch_bell(PoolControl& pool, std::uint32_t seen) noexcept {
    pool.own.parked.store(static_cast<std::uint32_t>(Parked::ON_EVENT), std::memory_order_seq_cst);
    return pool.shared.bell.load(std::memory_order_seq_cst) == seen;
}

// Before the bell is read for the next wait: an event that comes later belongs to that wait.
inline void stop_watching(PoolControl& pool) noexcept {
    pool.own.parked.store(static_cast<std::uint32_t>(Parked::NO), std::memory_order_seq_cst);
    clear_event(pool.event);
}

// Waits until the worker's bell moves from `seen`, or a signal comes; spins first if it may. Returns the time waited.
inline std::uint64_t sleep_on_bell(PoolControl& pool, WorkerControl& control, std::uint32_t worker, std::uint32_t seen, SpinPolicy& spin_policy) noexcept {
    constexpr std::uint64_t SLICE_NS = 1'000'000'000;  // how often a parked worker looks for signals
    const std::uint64_t began = now_ns();
    const std::uint64_t spin_ns = pool.own.spin_ns.load(std::memory_order_relaxed);
    const bool may_spin = spin_policy.may_spin(spin_ns, began) && worker < pool.own.num_spin_workers.load(std::memory_order_relaxed);
    std::uint64_t lost_ns = 0;
    bool is_rung = may_spin && spin_for(pool, worker, control.learner.bell, seen, spin_ns, lost_ns);
    while (!is_rung) {
        const Woken woken = park(control.learner.bell, control.own.parked, seen, SLICE_NS);
        is_rung = control.learner.bell.load(std::memory_order_acquire) != seen || woken != Woken::RUNG;
    }
    const std::uint64_t ended = now_ns();
    spin_policy.record_wait(ended - began, lost_ns, spin_ns, ended);
    return ended - began;
}

}  // namespace stepmill
