// One mapped slab and the location of everything in it. Built once from the plan of slab/layout.py; needs no Python.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/at_fork.hpp"
#include "shared/owned_fd.hpp"
#include "shared/protocol.hpp"

namespace stepmill {

// The location of a row in columns that are split by worker.
struct RowPlace {
    std::size_t segment;  // start of the segment of the row's worker
    std::size_t local;    // the row's number in the segment
};

// One data array: [slot][row][row_bytes]. Large observations that can be lent, and arrays of the learner, are whole. All others are
// split: each worker's part is in its own segment, on pages that no other worker can write.
struct Column {
    std::size_t offset = 0;       // of row 0 in the slab; split columns: of a worker's first row in its segment
    std::size_t slot_stride = 0;  // 0 if there is only one slot
    std::size_t row_bytes = 0;
    bool is_split = false;
    const RowPlace* places = nullptr;  // of a split column, by row; points into the slab's plan, which outlives copies of the column

    std::size_t at(std::size_t slot, std::size_t row) const noexcept { return offset + slot * slot_stride + from_start(row, row_bytes); }
    // The same for one slot and a row size that is known at compile time.
    template <std::size_t ROW_BYTES>
    std::size_t at(std::size_t row) const noexcept { return offset + from_start(row, ROW_BYTES); }

   private:
    std::size_t from_start(std::size_t row, std::size_t size) const noexcept {
        return places == nullptr ? row * size : places[row].segment + places[row].local * size;
    }
};

// Rows that follow each other in every column.
struct RowRun {
    std::size_t first, num;
};

// The location of a server's control words.
struct ServerLocation {
    std::uint32_t worker;
    std::uint32_t local;
};

// The control words of a server: words.x[local].
struct ServerWordsAt {
    ServerWords& words;
    std::uint32_t local;
};

// The layout of a row's result besides its observation.
struct OutcomePlan {
    std::uint32_t num_agents = 0;   // 0: not a multi-agent env, no `alive`
    std::uint32_t num_rewards = 1;  // numbers in a row's reward
    bool has_scalar_reward = true;  // a number, not an array
    bool has_float_reward = false;  // float32, not float64
    bool is_open = false;           // agents come and go: no step ends the env's episode
    Column reward{}, terminated{}, truncated{}, alive{}, episode_return{};

    bool is_plain() const noexcept { return num_agents == 0 && has_scalar_reward && !has_float_reward; }
};

// Bytes start … stop-1 of a slab.
struct ByteRange {
    std::size_t start, stop;
};

struct SlabPlan {
    std::size_t size_bytes = 0;
    std::uint32_t num_rows = 0;
    std::uint32_t batch_size = 1;  // rows per server
    std::uint32_t num_slots = 1;
    std::uint32_t private_slots = 1;
    std::size_t lease_bytes = 0;                           // observation leaves of at least this size per batch are lent
    std::size_t pool_words = 0, shared_words = 0, env_counters = 0, learner_trace = 0;
    std::vector<std::size_t> worker_traces;                // by worker; none: no traces
    std::vector<std::size_t> learner_words, worker_words;  // by worker
    std::vector<std::size_t> segments;                     // by worker: where its part of the split columns begins
    std::vector<std::vector<std::uint32_t>> servers;       // by lane, in local order
    std::vector<std::vector<std::uint32_t>> lanes;         // by worker process: the lanes that are its threads; empty: each lane is a worker of its own
    std::vector<std::uint32_t> pool_servers;               // on a node of a pool, by server: its number in the pool; empty: the same
    std::vector<Column> observation, final_observation, action, info;
    std::vector<Column> staging;                           // first observations of staged episodes, one row per server. Only with spares
    OutcomePlan outcome;
    Column over{}, episode_length{}, payload{};
    Column blob{};                                         // one row per server
    std::vector<RowPlace> places;                          // by row; set by place_rows()
    std::vector<RowRun> runs;

    static constexpr int ALL_WORKERS = -1;

    SlabPlan() = default;
    SlabPlan(SlabPlan&&) = default;  // columns point into `places`

    // Returns the number of a server in the pool, which is in its seeds and in messages.
    std::uint32_t pool_server(std::uint32_t server) const { return pool_servers.empty() ? server : pool_servers.at(server); }

    // Returns the ranges of a slot's observations that can be lent.
    std::vector<ByteRange> lent_ranges(std::size_t slot) const {
        std::vector<ByteRange> ranges;
        for (const Column& column : observation) {
            const std::size_t start = column.at(slot, 0), size = column.row_bytes * num_rows;
            if (size >= lease_bytes) ranges.push_back({start, start + size});
        }
        return ranges;
    }

    // Computes the place of each row in split columns. With `only_worker` the plan is valid for that worker's rows alone, which need no
    // table.
    void place_rows(int only_worker = ALL_WORKERS) {
        places.resize(num_rows);
        for (std::size_t worker = 0; worker < servers.size(); ++worker) {
            for (std::size_t local = 0; local < servers[worker].size() * batch_size; ++local) {
                const std::size_t row = std::size_t{servers[worker][local / batch_size]} * batch_size + local % batch_size;
                if (row < num_rows) places[row] = {segments.empty() ? 0 : segments.at(worker), local};
            }
        }
        for (std::size_t row = 0; row < num_rows; ++row) {
            const bool follows = row != 0 && places[row].segment == places[row - 1].segment && places[row].local == places[row - 1].local + 1;
            if (!follows) runs.push_back({row, 0});
            ++runs.back().num;
        }
        const std::size_t first = only_worker == ALL_WORKERS ? 0 : std::size_t{servers.at(static_cast<std::size_t>(only_worker)).at(0)} * batch_size;
        const bool has_table = only_worker == ALL_WORKERS && runs.size() > 1;
        auto point = [&](Column& column) {
            if (!column.is_split) return;
            column.places = has_table ? places.data() : nullptr;
            if (has_table) return;
            column.is_split = false;
            column.offset += places.at(first).segment - first * column.row_bytes;  // the worker's rows follow each other
        };
        for (std::vector<Column>* columns : {&observation, &final_observation, &action, &info, &staging}) std::ranges::for_each(*columns, point);
        for (Column* column : {&outcome.reward, &outcome.terminated, &outcome.truncated, &outcome.alive, &outcome.episode_return}) point(*column);
        for (Column* column : {&over, &episode_length, &payload, &blob}) point(*column);
    }
};

// Owns the mapping, which lives until the last pool, loop or lease drops it. A forked child can only read it.
class SlabMemory final : AtFork {
   public:
    // writable: ranges of whole pages. The rest is read-only.
    SlabMemory(int fd, std::size_t size_bytes, std::span<const ByteRange> writable) : size_bytes_(size_bytes) {
        const std::lock_guard no_fork(forks());
        void* base = mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "a slab of " + std::to_string(size_bytes) + " bytes cannot be mapped");
        base_ = static_cast<std::byte*>(base);
        for (const ByteRange range : writable) {
            if (mprotect(base_ + range.start, range.stop - range.start, PROT_READ | PROT_WRITE) == 0) continue;
            munmap(base_, size_bytes_);
            throw std::runtime_error("the slab cannot be made writable: too many mappings, or bytes " + std::to_string(range.start) + " to " +
                                     std::to_string(range.stop) + " are not whole pages");
        }
        join();
    }
    ~SlabMemory() {
        const std::lock_guard no_fork(forks());
        leave();
        munmap(base_, size_bytes_);
    }

    std::byte* base() const noexcept { return base_; }

   private:
    void after_fork_in_child() noexcept override { mprotect(base_, size_bytes_, PROT_READ); }

    std::byte* base_ = nullptr;
    std::size_t size_bytes_;
};

// Returns the inode number of an open file, which is the same for all descriptors of one memfd.
inline std::uint64_t file_id(int fd) {
    struct stat file {};
    if (fstat(fd, &file) != 0) throw std::runtime_error("the slab's descriptor is invalid");
    return file.st_ino;
}

// Pointers into a mapping. All members are constant after the constructor.
class Slab {
   public:
    // slab_plan: after place_rows(). commands, results: one per worker, or none for the memory of another worker, which this process does
    // not need. event: the pool's eventfd, or none. writable: ranges of whole pages that this process may write.
    Slab(int fd, SlabPlan slab_plan, std::vector<OwnedFd> commands, std::vector<OwnedFd> results, OwnedFd event, std::span<const ByteRange> writable)
        : lanes(slab_plan.lanes),
          plan(std::move(slab_plan)),
          id(file_id(fd)),
          command_fds(std::move(commands)),
          result_fds(std::move(results)),
          event_fd(std::move(event)),
          memory(std::make_shared<SlabMemory>(fd, plan.size_bytes, writable)),
          base(memory->base()),
          control{*reinterpret_cast<PoolWords*>(base + plan.pool_words), *reinterpret_cast<SharedWords*>(base + plan.shared_words), event_fd.number()} {
        for (std::size_t w = 0; w < plan.servers.size(); ++w) {
            std::byte *const learner = base + plan.learner_words.at(w), *const own = base + plan.worker_words.at(w);
            const auto num_servers = static_cast<std::uint32_t>(plan.servers[w].size());
            controls.push_back({*reinterpret_cast<LearnerWords*>(learner), *reinterpret_cast<WorkerWords*>(own)});
            words.push_back(ServerWords::at(learner + sizeof(LearnerWords), own + sizeof(WorkerWords), num_servers));
            for (std::uint32_t local = 0; local < num_servers; ++local) {
                const std::uint32_t server = plan.servers[w][local];
                if (server >= server_locations.size()) server_locations.resize(server + 1);
                server_locations[server] = {static_cast<std::uint32_t>(w), local};
            }
        }
        for (WorkerControl& worker : controls) workers.push_back(&worker);
        for (std::uint32_t lane = 0; lane < workers.size() && plan.lanes.empty(); ++lane) lanes.push_back({lane});
        worker_of.resize(workers.size());
        for (std::uint32_t worker = 0; worker < lanes.size(); ++worker) {
            for (const std::uint32_t lane : lanes[worker]) worker_of.at(lane) = worker;
        }
    }

    // Called once, by the pool that made the memfd, before a worker attaches.
    void format() noexcept {
        pool->own.magic = LAYOUT_MAGIC;
        pool->own.version = LAYOUT_VERSION;
        pool->own.num_workers = static_cast<std::uint32_t>(workers.size());
        pool->own.size_bytes = plan.size_bytes;
        for (WorkerControl* worker : workers) worker->own.current.store(NO_SERVER);
    }

    void check() const {
        if (pool->own.magic != LAYOUT_MAGIC || pool->own.version != LAYOUT_VERSION || pool->own.size_bytes != plan.size_bytes) {
            throw std::runtime_error("this memory is not a slab of this version of stepmill");
        }
    }

    // The fields of a row: reward, one flag per agent, living agents; whether the result ended the episode; sums of the episode.
    // The rows of an env follow each other.
    std::byte* reward(std::size_t row) const noexcept { return cell(plan.outcome.reward, row); }
    std::uint8_t* terminated(std::size_t row) const noexcept { return bytes(plan.outcome.terminated, row); }
    std::uint8_t* truncated(std::size_t row) const noexcept { return bytes(plan.outcome.truncated, row); }
    std::uint8_t* alive(std::size_t row) const noexcept { return bytes(plan.outcome.alive, row); }
    std::uint8_t* over(std::size_t row) const noexcept { return reinterpret_cast<std::uint8_t*>(base + plan.over.at<1>(row)); }
    double* episode_return(std::size_t row) const noexcept { return reinterpret_cast<double*>(cell(plan.outcome.episode_return, row)); }
    std::int64_t* episode_length(std::size_t row) const noexcept { return reinterpret_cast<std::int64_t*>(base + plan.episode_length.at<sizeof(std::int64_t)>(row)); }
    double reward_item(std::size_t row, std::size_t index) const noexcept {
        const std::byte* items = reward(row);
        return plan.outcome.has_float_reward ? static_cast<double>(reinterpret_cast<const float*>(items)[index]) : reinterpret_cast<const double*>(items)[index];
    }
    // As after a reset: no reward, no flags, all agents alive.
    void clear_outcome(std::size_t row) const noexcept {
        const OutcomePlan& outcome = plan.outcome;
        std::memset(reward(row), 0, outcome.reward.row_bytes);
        std::memset(terminated(row), 0, outcome.terminated.row_bytes);
        std::memset(truncated(row), 0, outcome.truncated.row_bytes);
        std::memset(alive(row), 1, outcome.alive.row_bytes);
        *over(row) = 0;
    }
    // As of an env whose infos of fixed shape are not given.
    void clear_info(std::size_t row) const noexcept {
        for (const Column& column : plan.info) std::memset(cell(column, row), 0, column.row_bytes);
    }
    // The sums of an episode without steps.
    void clear_episode(std::size_t row) const noexcept {
        std::memset(episode_return(row), 0, plan.outcome.episode_return.row_bytes);
        *episode_length(row) = 0;
    }
    // An env's actions, all leaves one after another.
    std::size_t action_bytes() const noexcept {
        std::size_t size = 0;
        for (const Column& column : plan.action) size += column.row_bytes * plan.batch_size;
        return size;
    }
    void read_action(std::size_t env_id, std::byte* bytes) const noexcept {
        for_action(env_id, [&](std::byte* row, std::size_t size) { std::memcpy(bytes, row, size), bytes += size; });
    }
    void write_action(std::size_t env_id, const std::byte* bytes) const noexcept {
        for_action(env_id, [&](std::byte* row, std::size_t size) { std::memcpy(row, bytes, size), bytes += size; });
    }
    EnvCounters& env_counters(std::size_t env_id) const noexcept { return reinterpret_cast<EnvCounters*>(base + plan.env_counters)[env_id]; }
    // Null unless traces are wanted now.
    LearnerTrace* learner_trace() const noexcept { return control.own.tracing.load(std::memory_order_relaxed) == 0 ? nullptr : reinterpret_cast<LearnerTrace*>(base + plan.learner_trace); }
    WorkerTrace* worker_trace(std::uint32_t worker) const noexcept {
        return control.own.tracing.load(std::memory_order_relaxed) == 0 ? nullptr : reinterpret_cast<WorkerTrace*>(base + plan.worker_traces[worker]);
    }
    std::byte* blob(std::size_t server) const noexcept { return cell(plan.blob, server); }
    std::byte* payload(std::size_t row) const noexcept { return cell(plan.payload, row); }

    ServerWordsAt server_words(std::uint32_t server) noexcept {
        const ServerLocation location = server_locations[server];
        return {words[location.worker], location.local};
    }

    // Copies all rows of a column, in order.
    void copy_rows(const Column& column, std::size_t slot, std::byte* target) const noexcept {
        const std::size_t row_bytes = column.row_bytes;
        if (!column.is_split) {
            std::memcpy(target, base + column.at(slot, 0), row_bytes * plan.num_rows);
            return;
        }
        for (const RowRun& run : plan.runs) std::memcpy(target + run.first * row_bytes, base + column.at(slot, run.first), row_bytes * run.num);
    }

    std::vector<std::vector<std::uint32_t>> lanes;  // by worker process: its threads. Elsewhere in this file each lane is called a worker
    std::vector<std::uint32_t> worker_of;           // by lane
    std::vector<ServerWords> words;       // by worker
    std::vector<ServerLocation> server_locations;              // by server
    std::vector<WorkerControl*> workers;  // point into `controls`
    const SlabPlan plan;
    const std::uint64_t id;  // of the memory: equal for all slabs over the same memfd
    const std::vector<OwnedFd> command_fds, result_fds;  // by worker; while the slab lives, no other file can get their numbers
    const OwnedFd event_fd;
    const std::shared_ptr<SlabMemory> memory;
    std::byte* const base;
    PoolControl control;
    PoolControl* const pool = &control;
    std::deque<WorkerControl> controls;

   private:
    std::byte* cell(const Column& column, std::size_t row) const noexcept { return base + column.at(0, row); }
    template <typename Visit>
    void for_action(std::size_t env_id, Visit visit) const noexcept {
        for (const Column& column : plan.action) visit(cell(column, env_id * plan.batch_size), column.row_bytes * plan.batch_size);
    }
    std::uint8_t* bytes(const Column& column, std::size_t row) const noexcept { return reinterpret_cast<std::uint8_t*>(cell(column, row)); }
};

}  // namespace stepmill
