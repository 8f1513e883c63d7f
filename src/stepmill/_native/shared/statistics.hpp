// Counters that show where a pool spends its time. Nothing that the pool decides depends on them. Needs neither Python nor NumPy.
//
// Each counter has one writer and is read by other threads and processes at any time, so it is atomic, without an order.
// Reading the clock takes as long as a tenth of a tiny env's step. Therefore short calls are timed at random, and one timed call
// stands for all calls since the last one: `CallSampler` keeps the time spent on timing below one percent.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shared/platform.hpp"

namespace stepmill {

using Counter = std::atomic<std::uint64_t>;

// Adds to a counter that only the calling thread writes.
inline void add_to(Counter& counter, std::uint64_t amount) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

constexpr std::uint32_t NUM_BUCKETS = 128;
constexpr std::uint32_t BUCKETS_PER_OCTAVE = 4;
constexpr std::uint32_t FIRST_OCTAVE = 7;  // shorter times, below 128 ns, are in bucket 0; the last bucket begins at 481 s

constexpr std::uint32_t bucket_of(std::uint64_t duration_ns) noexcept {
    if (duration_ns >> FIRST_OCTAVE == 0) return 0;
    const auto octave = static_cast<std::uint32_t>(std::bit_width(duration_ns)) - 1;
    const auto part = static_cast<std::uint32_t>(duration_ns >> (octave - 2)) & (BUCKETS_PER_OCTAVE - 1);
    return std::min((octave - FIRST_OCTAVE) * BUCKETS_PER_OCTAVE + part, NUM_BUCKETS - 1);
}
static_assert(bucket_of(127) == 0 && bucket_of(128) == 0 && bucket_of(160) == 1 && bucket_of(255) == 3 && bucket_of(256) == 4);

// Returns the shortest time that is above a bucket.
constexpr std::uint64_t bucket_stop_ns(std::uint32_t bucket) noexcept {
    const std::uint32_t octave = FIRST_OCTAVE + bucket / BUCKETS_PER_OCTAVE, part = bucket % BUCKETS_PER_OCTAVE;
    return std::uint64_t{BUCKETS_PER_OCTAVE + part + 1} << (octave - 2);
}
static_assert(bucket_stop_ns(bucket_of(1'000'000)) > 1'000'000 && bucket_stop_ns(bucket_of(1'000'000) - 1) <= 1'000'000);

// How long one kind of call took.
struct TimeHistogram {
    Counter total_ns, max_ns;
    std::array<Counter, NUM_BUCKETS> buckets;  // calls by duration

    // The call stands for num_calls calls, which took together_ns.
    void add(std::uint64_t duration_ns, std::uint32_t num_calls, std::uint64_t together_ns) noexcept {
        add_to(total_ns, together_ns);
        add_to(buckets[bucket_of(duration_ns)], num_calls);
        if (duration_ns > max_ns.load(std::memory_order_relaxed)) max_ns.store(duration_ns, std::memory_order_relaxed);
    }
};

using Word = std::atomic<std::uint32_t>;
using NumFaults = std::array<Word, 8>;
static_assert(Word::is_always_lock_free && Counter::is_always_lock_free);

// statistics.def lists the fields of these structures, and says who writes them. Times are in ns.
struct alignas(64) LearnerCounters {
#define LEARNER_COUNTER(name) Counter name;
#include "shared/statistics.def"
};

struct alignas(64) EnvCounters {
#define ENV_COUNTER(name, type) type name;
#include "shared/statistics.def"
};

struct WorkerCounters {
#define WORKER_COUNTER(name) Counter name;
#include "shared/statistics.def"
};

struct alignas(64) ServerCounters {
#define SERVER_COUNTER(name, type) type name;
#include "shared/statistics.def"
};

// All counters of a worker, in the order of the table.
using CounterValues = std::array<std::uint64_t, sizeof(WorkerCounters) / sizeof(Counter)>;
inline CounterValues read_counters(const WorkerCounters& worker) noexcept {
    return {
#define WORKER_COUNTER(name) worker.name.load(std::memory_order_relaxed),
#include "shared/statistics.def"
    };
}
inline void write_counters(WorkerCounters& worker, const CounterValues& values) noexcept {
    const std::uint64_t* value = values.data();
#define WORKER_COUNTER(name) worker.name.store(*value++, std::memory_order_relaxed);
#include "shared/statistics.def"
}

// Differs if the table does: a program that attaches to a pool, or a node of a Ray cluster, refuses another table.
constexpr std::uint32_t hash_of(std::string_view names) {
    std::uint32_t hash = 0x811c9dc5;
    for (const char letter : names) hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x01000193;
    return hash;
}
constexpr std::uint32_t STATISTICS_HASH = hash_of(
#define LEARNER_COUNTER(name) "learner." #name " "
#define ENV_COUNTER(name, type) "env." #name " "
#define PROCESS_COUNTER(name) "process." #name " "
#define WORKER_COUNTER(name) "worker." #name " "
#define SERVER_COUNTER(name, type) "server." #name " "
#include "shared/statistics.def"
);

// What a trace shows. SENT and RECEIVED are moments of one env; they connect the learner's events with those of workers.
enum class TraceKind : std::uint32_t { STEP = 1, RESET = 2, WAIT = 3, SEND = 4, GATHER = 5, SENT = 6, RECEIVED = 7 };

struct TraceEvent {
    std::uint64_t begin_ns, end_ns;
    std::uint32_t server;  // the server of the env, for STEP, RESET, SENT and RECEIVED; 0 for the other kinds
    TraceKind kind;
};
static_assert(sizeof(TraceEvent) == 24);

// The newest events of one thread, while `PoolWords::tracing` is set. A reader copies events, then reads `num_events` again, and
// drops those that may have been written over meanwhile. The memory is used only where events were written.
template <std::uint32_t CAPACITY>
struct alignas(64) TraceRing {
    Counter num_events;  // since the slab was made
    alignas(64) std::array<TraceEvent, CAPACITY> events;

    void add(TraceKind kind, std::uint32_t server, std::uint64_t begin_ns, std::uint64_t end_ns) noexcept {
        const std::uint64_t index = num_events.load(std::memory_order_relaxed);
        events[index % CAPACITY] = {begin_ns, end_ns, server, kind};
        num_events.store(index + 1, std::memory_order_release);
    }
};
using WorkerTrace = TraceRing<4096>;
using LearnerTrace = TraceRing<16384>;
static_assert(sizeof(WorkerTrace) == 64 + sizeof(WorkerTrace::events) && sizeof(LearnerTrace) == 64 + sizeof(LearnerTrace::events), "readers compute the capacity");

// Decides which calls are timed: all long ones, and some short ones. The gaps are random, so that they cannot match a period of the
// env. Used by one thread.
class CallSampler {
 public:
    // Called once per call, before it.
    bool is_due() noexcept { return --left_ == 0; }

    // Called after a call that was due; returns how many calls it stands for.
    std::uint32_t next(std::uint64_t duration_ns) noexcept {
        const std::uint32_t stands_for = gap_;
        const auto mean = static_cast<std::uint32_t>(std::min<std::uint64_t>(TARGET_NS / (duration_ns + 1), MAX_MEAN));
        random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
        gap_ = left_ = mean < 2 ? 1 : 1 + random_ % (2 * mean - 1);
        return stands_for;
    }

 private:
    static constexpr std::uint64_t TARGET_NS = 12'000;  // between two timed calls; timing one takes about 60 ns
    static constexpr std::uint64_t MAX_MEAN = 128;
    std::uint32_t left_ = 1, gap_ = 1, random_ = 0x9e3779b9;
};

// The time of a thread that none of its timed parts has claimed yet. A timed call stands for calls that were not timed, and one that the
// machine held up would count many times; as a part claims no more than this, the parts never add up to more than the time there was.
class UnclaimedTime {
 public:
    UnclaimedTime() noexcept : UnclaimedTime(now_ns()) {}
    explicit UnclaimedTime(std::uint64_t began_ns) noexcept : first_ns_(began_ns) {}

    // Returns how much of duration_ns is left for a part that ends now.
    std::uint64_t claim(std::uint64_t duration_ns, std::uint64_t now) noexcept {
        const std::uint64_t claimed_ns = std::min(duration_ns, now - first_ns_);
        first_ns_ += claimed_ns;
        return claimed_ns;
    }

 private:
    std::uint64_t first_ns_;  // the begin, and what was claimed since
};

// Times one call of an env, from its constructor to end(), if the sampler says so or the call is traced.
class TimedCall {
 public:
    // trace: null if there is none.
    TimedCall(CallSampler& sampler, TimeHistogram& histogram, UnclaimedTime& unclaimed, WorkerTrace* trace) noexcept
        : sampler_(sampler), histogram_(histogram), unclaimed_(unclaimed), trace_(trace), is_due_(sampler.is_due()), began_(is_due_ || trace != nullptr ? now_ns() : 0) {}
    void end(TraceKind kind, std::uint32_t server) noexcept {
        if (began_ == 0) return;
        const std::uint64_t ended = now_ns();
        if (is_due_) {
            const std::uint32_t num_calls = sampler_.next(ended - began_);
            histogram_.add(ended - began_, num_calls, unclaimed_.claim((ended - began_) * num_calls, ended));
        }
        if (trace_ != nullptr) trace_->add(kind, server, began_, ended);
    }

 private:
    CallSampler& sampler_;
    TimeHistogram& histogram_;
    UnclaimedTime& unclaimed_;
    WorkerTrace* const trace_;
    const bool is_due_;
    const std::uint64_t began_;  // 0: not timed
};

// Times a part of one of the learner's functions, from its constructor to its destructor, if the sampler says so or it is traced.
class SampledTime {
 public:
    SampledTime(CallSampler& sampler, Counter& total_ns, UnclaimedTime& unclaimed, TraceKind kind, LearnerTrace* trace) noexcept
        : sampler_(sampler), total_ns_(total_ns), unclaimed_(unclaimed), kind_(kind), trace_(trace), is_due_(sampler.is_due()), began_(is_due_ || trace != nullptr ? now_ns() : 0) {}
    ~SampledTime() {
        if (began_ == 0) return;
        const std::uint64_t ended = now_ns();
        if (is_due_) add_to(total_ns_, unclaimed_.claim((ended - began_) * sampler_.next(ended - began_), ended));
        if (trace_ != nullptr) trace_->add(kind_, 0, began_, ended);
    }
    SampledTime(const SampledTime&) = delete;
    SampledTime& operator=(const SampledTime&) = delete;

 private:
    CallSampler& sampler_;
    Counter& total_ns_;
    UnclaimedTime& unclaimed_;
    const TraceKind kind_;
    LearnerTrace* const trace_;
    const bool is_due_;
    const std::uint64_t began_;  // 0: not timed
};

}  // namespace stepmill
