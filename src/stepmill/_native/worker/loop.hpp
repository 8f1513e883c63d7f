// The hot loop: turns a worker's commands into calls of env.reset and env.step, and their results into bytes.
// Serial, thread, process and Ray workers all run it. Autoreset is implemented here.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "codec/codec.hpp"
#include "codec/objects.hpp"
#include "codec/payload_writer.hpp"
#include "shared/seeds.hpp"
#include "shared/tree.hpp"

namespace stepmill {

// Why a loop returns to Python: before a slow request, because the worker must stop, or with commands that Python carries out.
enum class LoopExit : int { REQUEST = 0, STOP = 1, COMMANDS = 2 };

// Sleeps without the GIL until the worker's bell moves from `seen`, or a signal comes; then runs Python's signal handlers. Returns the
// time in ns.
std::uint64_t wait_for_commands(const Slab& slab, std::uint32_t worker, std::uint32_t seen, SpinPolicy& spin_policy);

inline constexpr const char* OBS_PART = "observation part ";  // in errors: a part without a fixed size

// The outcome of one command, before it is written.
struct Result {
    nb::object obs, info;
    bool has_final = false;                    // the result ends an episode, and has the next one's observation and info, too
    std::vector<std::uint8_t> final_obs, final_opaques, final_info;  // bytes: leaf after leaf, the encoded list of the other parts, the encoded info
    nb::object final_objects;                  // accompanies final_opaques and final_info
    nb::object reward, terminated, truncated;  // of a batched env: arrays [k]; else only a reward that is not a plain number
    nb::object reset_mask;                     // of a partial reset of a batched env: bool [k]
    double reward_value = 0.0;
    bool is_terminated = false, is_truncated = false;
    bool is_over = false;                      // this step ended the episode
    bool has_bad_info = false;                 // an info cannot be encoded
    std::vector<std::uint8_t> alive;           // [A]; empty after a reset: all agents are alive
};

// The fault of an exception in this phase. "output of ..." and "info of ...": the env returned something invalid.
inline Fault fault_of(const char* phase) { return phase[0] == 'o' || phase[0] == 'i' ? Fault::BAD_OUTPUT : Fault::RAISED; }

// One env object and its state in the loop.
struct ServedEnv {
    nb::object env, step, reset;
    std::uint32_t done = 0;        // ticket of the newest finished command
    bool needs_reset = false;      // its last step ended an episode
    bool is_early = false;         // the next episode was begun early, with the outcome below
    nb::object early_obs, early_info, early_error;
    std::vector<std::uint8_t> early_alive;
    const char* early_phase = "";
    bool has_options = false;      // `options` are the encoded options of resets without options of their own
    std::vector<std::uint8_t> options;
    EpisodeSeeds seeds;
    std::vector<std::uint8_t> alive;            // [A], after the newest result
    std::vector<double> episode_return;         // by row of the env and index of the reward, of the current episode
    std::vector<std::int64_t> episode_length;
    CallSampler step_sampler, reset_sampler;
    std::vector<std::uint8_t> ended;            // batched: the last step of the row ended its episode
};

// Called by one thread at a time, the worker's own, with the GIL; run() releases the GIL while it waits.
class Loop {
   public:
    Loop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::list envs, nb::dict settings);

    LoopExit run();
    bool run_server(std::uint32_t local);
    void run_until(std::uint32_t local, std::uint32_t after_ticket);
    bool wait_idle(double timeout_s);  // serial backend: waits until no other thread runs a command; returns false on timeout. `stop` must be set
    void refresh();
    void restart_early_reset(std::uint32_t local);
    void restore(std::uint32_t local, nb::dict position);  // of PoolState::positions(); the object has that state already
    void set_default_options(std::uint32_t local, nb::handle options);  // encoded; None removes them
    // Serial backend: raises the exception of a signal handler that an env passed on (signals.hpp), once.
    void raise_interrupt();
    bool has_interrupt() const { return static_cast<bool>(interrupt_); }
    void requests_seen(std::uint32_t count) {
        requests_seen_ = count;
        end_request(*control_);
    }
    void release();                            // drops all references to Python objects
    int traverse(visitproc visit, void* arg) const;

   protected:
    bool sweep(bool& is_interrupted);
    bool is_staged(std::uint32_t local) const { return words_.row[local] >= slab_->plan.num_rows; }
    [[gnu::noinline]] bool run_staged_reset();
    std::size_t obs_at(const Leaf& leaf, std::size_t index, std::uint32_t row, std::uint32_t slot) const;
    bool reset_early();
    [[gnu::noinline]] bool matches_early_reset(std::uint32_t local) const;
    [[gnu::noinline]] bool use_early_reset(std::uint32_t local, Result& result, const char*& phase);
    [[gnu::noinline]] void discard_early_reset(ServedEnv& served) const;
    void run_inline(std::uint32_t local, std::uint32_t ticket);
    void run_command(std::uint32_t local, std::uint32_t ticket);
    bool is_abandoned() const;
    bool perform(std::uint32_t local, Result& result, const char*& phase);
    [[gnu::noinline]] bool perform_reset(std::uint32_t local, Result& result, bool is_automatic);
    bool read_reset(std::uint32_t local, Result& result, bool is_automatic, nb::object& seed, nb::object& options);
    [[gnu::noinline]] bool reset_with_retries(std::uint32_t local, Result& result, bool is_automatic, std::uint32_t attempts_left);
    bool wait_for_retry(std::uint32_t local);
    bool is_signal_error() const;
    bool perform_step(std::uint32_t local, Result& result, const char*& phase);
    nb::object read_action(std::uint32_t local);
    bool accept_step(std::uint32_t local, PyObject* returned, Result& result, const char*& phase, bool& is_reset_due);
    bool is_reset_due(std::uint32_t local) const;
    [[gnu::noinline]] bool read_end(Result& result);
    static bool check_info(const Result& result);
    void end_forked_copy();
    nb::object call_reset(std::uint32_t local, nb::handle seed, nb::handle options);
    nb::object call_step(std::uint32_t local, nb::handle action);
    nb::object default_options(const ServedEnv& served) const;
    bool unpack_reset(PyObject* returned, Result& result);
    bool unpack_step(const ServedEnv& served, PyObject* returned, Result& result);
    [[gnu::noinline]] bool unpack_agents(const ServedEnv& served, PyObject* returned, Result& result);
    bool read_alive(PyObject* value, std::vector<std::uint8_t>& alive) const;
    [[gnu::noinline]] bool unpack_time_step(PyObject* returned, Result& result) const;
    [[gnu::noinline]] bool read_blob(std::uint32_t local, nb::object& blob);
    PyObject* build_action(std::uint32_t local, nb::handle opaques);
    PyObject* action_leaf(const Node& node, std::uint32_t row);
    PyObject* cached_scalar(const Leaf& leaf, const std::byte* value);
    void publish(std::uint32_t local, std::uint32_t ticket, Result& result);
    void complete(std::uint32_t local, std::uint32_t ticket);
    bool write_result(std::uint32_t local, Result& result);
    bool write_rest(std::uint32_t local, std::uint32_t row, Result& result, const nb::object& opaques);
    bool write_obs(PyObject* obs, std::uint32_t row, std::uint32_t slot, const nb::object& opaques);
    [[gnu::noinline]] void write_final_obs(std::uint32_t row, const Result& result);
    [[gnu::noinline]] bool write_info(std::uint32_t row, Result& result);
    bool replaces_step(std::uint32_t local) const;
    [[gnu::noinline]] void write_reset(ServedEnv& served, std::uint32_t row, const Result& result);
    bool write_flags(std::uint32_t local, std::uint32_t row, Result& result);
    [[gnu::noinline]] bool write_batched_flags(std::uint32_t local, std::uint32_t row, Result& result);
    [[gnu::noinline]] void write_hash(std::uint32_t local, std::uint32_t row);
    void add_to_episode(ServedEnv& env, std::uint32_t row, std::uint32_t k);
    [[gnu::noinline]] bool write_payload(std::uint32_t local, Result& result, const nb::object& opaques);
    nb::object& objects_of(std::uint32_t local) { return objects_->of(slab_->plan.servers[worker_][local]); }
    [[gnu::noinline]] void write_record(std::uint32_t local, nb::handle cause, const char* phase);
    [[gnu::noinline]] void publish_fault(std::uint32_t local, std::uint32_t ticket, Fault fault, const char* phase, bool is_claimed);
    // The serial backend has no reaper that could abort the command, so it needs no atomic exchange.
    bool claim(std::uint32_t local, std::uint32_t ticket) { return is_inline_ || claim_result(words_.state[local], ticket); }
    void finish(std::uint32_t local, std::uint32_t ticket);
    void flush();

    std::shared_ptr<Slab> slab_;
    std::shared_ptr<LocalObjects> objects_;  // null: the pool is in another process
    std::uint32_t worker_;
    WorkerControl* control_;
    ServerWords words_;
    PoolControl* pool_;
    Autoreset autoreset_;
    Seeding seeding_;
    bool is_batched_;
    bool is_time_step_ = false;     // step returns a tuple that is the observation, with reward and flags in it
    Py_ssize_t step_type_at_ = 0, reward_at_ = -1, discount_at_ = 0;  // indices in that tuple; -1: none
    bool has_overlap_;
    bool measures_memory_;          // at the end of each episode
    bool is_inline_;
    std::uint32_t reset_retries_;
    std::uint64_t retry_wait_ns_;
    std::uint32_t batch_size_;
    std::vector<ServedEnv> envs_;
    Tree obs_, action_, info_;
    Leaf reward_;
    bool is_plain_;                                             // rewards are float64 numbers, and there are no agents
    std::vector<std::uint8_t> agent_terminated_, agent_truncated_;  // [A], scratch of one command
    std::vector<Column> final_columns_;
    nb::object describe_, unpickler_;
    Encoder encoder_;
    PayloadWriter payloads_;
    std::vector<std::uint8_t> buffer_;
    std::uint32_t requests_seen_ = 0;
    std::uint32_t group_ = 0;       // results stored but not counted yet
    std::uint32_t passed_ = 0;      // consecutive sweeps that did not run a staged reset
    SpinPolicy spin_policy_;
    UnclaimedTime unclaimed_time_;
    std::uint32_t fork_generation_;
    std::atomic<unsigned long> runner_{0};  // serial backend: ident of the thread that runs a command, 0: none
    Word is_running_{0};            // serial backend: 1 while a command runs; wait_idle() sleeps on it
    nb::object interrupt_;          // serial backend: the exception of a signal handler that an env passed on, to be raised in the learner
    nb::object reset_names_;        // ("seed", "options")
    nb::object seed_name_;          // ("seed",)
    nb::object no_info_;            // an empty dict
    std::array<nb::object, 1024> cached_scalars_;
};

}  // namespace stepmill
