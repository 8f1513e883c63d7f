// One mapped slab: where everything lies. Built once from the plan that slab/layout.py made; knows no Python.
#pragma once

#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "owned_fd.hpp"
#include "protocol.hpp"

namespace stepmill {

// One leaf of an observation or action: [slot][row][row_bytes].
struct Column {
    std::size_t offset;
    std::size_t slot_stride;  // 0 where there is only one slot
    std::size_t row_bytes;

    std::size_t at(std::size_t slot, std::size_t row) const noexcept { return offset + slot * slot_stride + row * row_bytes; }
};

// Where a server's control words lie.
struct Seat {
    std::uint32_t worker;
    std::uint32_t local;
};

// What a row's result says beside its observation.
struct OutcomePlan {
    std::uint32_t num_agents = 0;   // 0: the env is its own one, and there is no `alive`
    std::uint32_t num_rewards = 1;  // numbers in a row's reward
    bool has_scalar_reward = true;  // a number, not an array
    bool has_float_reward = false;  // float32, not float64
    bool is_open = false;           // agents come and go: no step ends the env's episode
    Column reward{}, terminated{}, truncated{}, alive{}, episode_return{};

    bool is_plain() const noexcept { return num_agents == 0 && has_scalar_reward && !has_float_reward; }
};

struct SlabPlan {
    std::size_t size_bytes = 0;
    std::uint32_t num_rows = 0;
    std::uint32_t batch_size = 1;  // rows per server
    std::uint32_t num_slots = 1;
    std::uint32_t private_slots = 1;
    std::vector<std::size_t> worker_control;             // offset of each WorkerControl
    std::vector<std::vector<std::uint32_t>> servers;     // of each worker, in local order
    std::vector<Column> observation, final_observation, action, info;
    std::vector<Column> staging;                         // first observations that wait for their turn: row num_rows + i is row i there. Only with spares
    OutcomePlan outcome;
    std::size_t over = 0, episode_length = 0;
    std::size_t payload = 0, payload_row_bytes = 0;
    std::size_t blob = 0, blob_row_bytes = 0;            // a row per server
};

// Owns the mapping. The last of pool, loop and leases that lets go unmaps it.
class SlabMemory {
   public:
    SlabMemory(int fd, std::size_t size_bytes) : size_bytes_(size_bytes) {
        void* base = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "a slab of " + std::to_string(size_bytes) + " bytes cannot be mapped");
        base_ = static_cast<std::byte*>(base);
    }
    ~SlabMemory() { munmap(base_, size_bytes_); }
    SlabMemory(const SlabMemory&) = delete;
    SlabMemory& operator=(const SlabMemory&) = delete;

    std::byte* base() const noexcept { return base_; }

   private:
    std::byte* base_ = nullptr;
    std::size_t size_bytes_;
};

// Descriptors that a slab owns, one per worker. While the slab lives, no other file can get their numbers.
class OwnFds {
   public:
    // Takes them over.
    explicit OwnFds(std::vector<OwnedFd> fds) : fds_(std::move(fds)) {}

    // Duplicates them. A negative number stands for the memory of another worker, which this process does not need.
    explicit OwnFds(const std::vector<int>& fds) {
        fds_.reserve(fds.size());
        for (const int fd : fds) {
            fds_.emplace_back(fd < 0 ? OwnedFd::NONE : fcntl(fd, F_DUPFD_CLOEXEC, 3));
            if (fd >= 0 && at(fds_.size() - 1) < 0) throw std::system_error(errno, std::generic_category(), "the slab's memory cannot be held");
        }
    }

    OwnFds(OwnFds&&) = default;
    OwnFds(const OwnFds&) = delete;

    int at(std::size_t index) const { return fds_.at(index).number(); }

   private:
    std::vector<OwnedFd> fds_;
};

// Pointers into a mapping. Shared by value of its shared_ptr; all members are constant after the constructor.
class Slab {
   public:
    Slab(int fd, SlabPlan slab_plan, OwnFds commands, OwnFds results)
        : plan(std::move(slab_plan)),
          command_fds(std::move(commands)),
          result_fds(std::move(results)),
          memory(std::make_shared<SlabMemory>(fd, plan.size_bytes)),
          base(memory->base()),
          pool(reinterpret_cast<PoolControl*>(base)) {
        for (std::size_t w = 0; w < plan.worker_control.size(); ++w) {
            std::byte* control = base + plan.worker_control[w];
            workers.push_back(reinterpret_cast<WorkerControl*>(control));
            words.push_back(ServerWords::at(control + sizeof(WorkerControl), static_cast<std::uint32_t>(plan.servers[w].size())));
            for (std::uint32_t local = 0; local < plan.servers[w].size(); ++local) {
                const std::uint32_t server = plan.servers[w][local];
                if (server >= seats.size()) seats.resize(server + 1);
                seats[server] = {static_cast<std::uint32_t>(w), local};
            }
        }
    }

    // Called once, by the pool that made the memfd, before a worker attaches.
    void format() noexcept {
        pool->magic = LAYOUT_MAGIC;
        pool->version = LAYOUT_VERSION;
        pool->num_workers = static_cast<std::uint32_t>(workers.size());
        pool->size_bytes = plan.size_bytes;
        for (WorkerControl* worker : workers) worker->current.store(NO_SERVER);
    }

    void check() const {
        if (pool->magic != LAYOUT_MAGIC || pool->version != LAYOUT_VERSION || pool->size_bytes != plan.size_bytes) {
            throw std::runtime_error("this memory is not a slab of this version of stepmill");
        }
    }

    // Of a row: its reward, a flag per agent, who is alive; whether this result ended its episode; the episode so far.
    std::byte* reward(std::size_t row) const noexcept { return base + plan.outcome.reward.at(0, row); }
    std::uint8_t* terminated(std::size_t row) const noexcept { return bytes(plan.outcome.terminated, row); }
    std::uint8_t* truncated(std::size_t row) const noexcept { return bytes(plan.outcome.truncated, row); }
    std::uint8_t* alive(std::size_t row) const noexcept { return bytes(plan.outcome.alive, row); }
    std::uint8_t* over() const noexcept { return reinterpret_cast<std::uint8_t*>(base + plan.over); }
    double* episode_return(std::size_t row) const noexcept { return reinterpret_cast<double*>(base + plan.outcome.episode_return.at(0, row)); }
    double reward_item(std::size_t row, std::size_t index) const noexcept {
        const std::byte* items = reward(row);
        return plan.outcome.has_float_reward ? static_cast<double>(reinterpret_cast<const float*>(items)[index]) : reinterpret_cast<const double*>(items)[index];
    }
    // As a reset leaves it: no reward, no flag, everyone alive.
    void clear_outcome(std::size_t row) const noexcept {
        const OutcomePlan& outcome = plan.outcome;
        std::memset(reward(row), 0, outcome.reward.row_bytes);
        std::memset(terminated(row), 0, outcome.terminated.row_bytes);
        std::memset(truncated(row), 0, outcome.truncated.row_bytes);
        std::memset(alive(row), 1, outcome.alive.row_bytes);
        over()[row] = 0;
    }
    // No step of the episode yet.
    void clear_episode(std::size_t row) const noexcept {
        std::memset(episode_return(row), 0, plan.outcome.episode_return.row_bytes);
        episode_length()[row] = 0;
    }
    std::int64_t* episode_length() const noexcept { return reinterpret_cast<std::int64_t*>(base + plan.episode_length); }
    std::byte* blob(std::size_t server) const noexcept { return base + plan.blob + server * plan.blob_row_bytes; }
    std::byte* payload(std::size_t row) const noexcept { return base + plan.payload + row * plan.payload_row_bytes; }

    const SlabPlan plan;
    const OwnFds command_fds, result_fds;
    const std::shared_ptr<SlabMemory> memory;
    std::byte* const base;
    PoolControl* const pool;
    std::vector<WorkerControl*> workers;
    std::vector<ServerWords> words;
    std::vector<Seat> seats;  // by server

   private:
    std::uint8_t* bytes(const Column& column, std::size_t row) const noexcept { return reinterpret_cast<std::uint8_t*>(base + column.at(0, row)); }
};

}  // namespace stepmill
