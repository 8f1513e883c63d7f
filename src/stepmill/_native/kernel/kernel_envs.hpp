// The envs of a kernel: their memory, and how a command is carried out. Knows no Python.
//
// Ends of episodes are handled as in loop.cpp, which runs envs in Python: NEXT_STEP, SAME_STEP, DISABLED, seeds of automatic resets,
// returns and lengths. tests/kernels/test_pools.py compares the two step by step.
#pragma once

#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "../include/stepmill_kernel.h"
#include "kernel/kernel_threads.hpp"
#include "shared/seeds.hpp"
#include "shared/slab.hpp"

namespace stepmill {

// How a kernel's functions are called.
enum class KernelCall : int {
    C = 0,      // as in stepmill_kernel.h
    NUMBA = 1,  // a function compiled by Numba: (int64_t* returned, void** raised, the same arguments)
};

struct KernelPlan {
    KernelCall call = KernelCall::C;
    void* reset = nullptr;
    void* step = nullptr;
    std::size_t state_bytes = 0;
    std::size_t saved_bytes = 0;                     // of the state, from its beginning: those that are saved
    std::int64_t max_episode_steps = 0;              // 0: no limit
    std::vector<std::size_t> obs_offsets, action_offsets;  // by leaf, in the row that the kernel sees
    std::vector<std::size_t> info_offsets;           // by leaf, in the state, which begins with the infos
    std::size_t info_bytes = 0;                      // of all infos
    std::size_t obs_bytes = 0, action_bytes = 0;     // size of that row
    Autoreset autoreset = Autoreset::NEXT_STEP;
    Seeding seeding = Seeding::CONTINUE;
    std::uint64_t entropy = 0;                       // seeds the generators of envs that got no seed
    std::vector<std::uint8_t> final_payload;         // of a SAME_STEP result with a last observation: an empty info, and the last one
    std::vector<std::size_t> final_offsets;          // by leaf of the infos: where in that payload its values are
};

// The engine's record of one env; the kernel's state follows it in memory. Plain memory, which is saved and restored as it is: each byte
// may have any value.
struct KernelEnvRecord {
    std::uint64_t num_commands = 0;            // that were carried out
    stepmill_rng rng{};
    double episode_return = 0.0;
    std::int64_t episode_length = 0;
    EpisodeSeeds seeds;
    std::uint8_t needs_reset = 0;              // not 0: its last step ended an episode; the next step begins another
};

// A command that failed.
struct KernelFault {
    std::uint32_t local = 0;
    bool is_reset = false;
    int status = 0;
    void* raised = nullptr;  // of Numba: an object that describes the exception
    std::string message;
};

// Which env a thread runs. Written by this thread only, read by KernelWatch.
struct alignas(CACHE_LINE) KernelProgress {
    std::atomic<std::uint32_t> env{NO_SERVER};
    std::atomic<std::uint32_t> num_begun{0};

    void begin(std::uint32_t local) noexcept {
        num_begun.store(num_begun.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        env.store(local, std::memory_order_relaxed);
    }
    void end() noexcept { env.store(NO_SERVER, std::memory_order_relaxed); }
};

// Any thread may call run() and run_range(), but an env is in one thread at a time. Everything else is for the pool's thread, while the env
// is idle.
class KernelEnvs final : public KernelWork {
   public:
    KernelEnvs(std::shared_ptr<Slab> slab, KernelPlan plan, std::uint32_t num_runners = 1);

    void run(std::span<const std::uint32_t> envs, std::uint32_t runner) noexcept override;
    void run_range(std::uint32_t first, std::uint32_t num, std::uint32_t runner) noexcept override;  // steps each env, without commands
    void begin_whole(std::uint32_t slot) noexcept { whole_slot_ = slot; }      // before run_range(): the slot of the observations
    std::vector<KernelFault> pop_faults();
    bool has_faults() const noexcept { return num_faults_.load(std::memory_order_acquire) != 0; }
    void mark_faulted(std::uint32_t local) noexcept { record(local).needs_reset = plan_.autoreset == Autoreset::NEXT_STEP; }

    const std::vector<KernelProgress>& progress() const noexcept { return progress_; }
    std::uint32_t num_envs() const noexcept { return num_envs_; }
    std::uint32_t env_id(std::uint32_t local) const { return slab_->plan.pool_server(slab_->plan.servers[0][local]); }
    std::byte* state(std::uint32_t local) noexcept { return record_bytes(local) + RECORD_BYTES; }
    std::size_t state_bytes() const noexcept { return plan_.state_bytes; }
    std::size_t saved_bytes() const noexcept { return sizeof(KernelEnvRecord) + plan_.saved_bytes; }
    void save(std::uint32_t local, std::byte* target) noexcept;
    void restore(std::uint32_t local, const std::byte* source) noexcept;

   private:
    static constexpr std::size_t RECORD_BYTES = align_line(sizeof(KernelEnvRecord));
    using Reset = int32_t (*)(void*, stepmill_rng*, void*, stepmill_result*);
    using Step = int32_t (*)(void*, const void*, stepmill_rng*, void*, stepmill_result*);
    using NumbaReset = int32_t (*)(std::int64_t*, void**, void*, stepmill_rng*, void*, stepmill_result*);
    using NumbaStep = int32_t (*)(std::int64_t*, void**, void*, const void*, stepmill_rng*, void*, stepmill_result*);
    // The words of a command that run_env() reads.
    struct EnvCommand {
        std::uint32_t row;
        std::uint32_t slot;
        std::uint8_t flags;
        bool is_reset;
    };
    struct Outcome {
        stepmill_result result;
        int status = STEPMILL_OK;
        void* raised = nullptr;
        bool is_reset = false, is_step = false;
    };

    std::byte* record_bytes(std::uint32_t local) noexcept { return memory_.get() + local * stride_; }
    KernelEnvRecord& record(std::uint32_t local) noexcept { return *reinterpret_cast<KernelEnvRecord*>(record_bytes(local)); }
    bool run_env(std::uint32_t local, const EnvCommand& command, Outcome& outcome) noexcept;
    bool begin_episode(std::uint32_t local, std::uint8_t flags, void* obs, Outcome& outcome) noexcept;
    bool step(std::uint32_t local, const EnvCommand& command, void* obs, Outcome& outcome) noexcept;
    void end_same_step(std::uint32_t local, std::uint32_t row, const void* obs) noexcept;
    void write_infos(std::uint32_t local, std::uint32_t row) noexcept;
    void write_reset(std::uint32_t local, const EnvCommand& command) noexcept;
    void write_step(std::uint32_t local, std::uint32_t row, double reward, bool is_over) noexcept;
    void count(std::uint32_t num_steps, std::uint32_t num_resets) noexcept;
    void write_obs(const std::vector<Column>& columns, std::uint32_t slot, std::uint32_t row, const void* obs) const noexcept;
    const void* action_memory(std::uint32_t local, std::uint32_t row) noexcept;
    void write_hash(std::uint32_t local, const void* obs) noexcept;
    void add_fault(std::uint32_t local, const Outcome& outcome) noexcept;

    std::shared_ptr<Slab> slab_;
    KernelPlan plan_;
    ServerWords words_;
    WorkerControl* control_;
    std::uint32_t num_envs_;
    std::uint32_t whole_slot_ = 0;
    std::size_t stride_;                            // record, state, and rows of the observation and action where they have several leaves
    std::size_t obs_at_ = 0, action_at_ = 0;        // 0: the kernel reads or writes the row in the slab
    bool has_infos_;
    struct Free {
        void operator()(std::byte* memory) const noexcept { std::free(memory); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::vector<KernelProgress> progress_;          // by thread
    std::mutex faults_lock_;                        // guards faults_
    std::vector<KernelFault> faults_;
    std::atomic<std::uint32_t> num_faults_{0};
};

}  // namespace stepmill
