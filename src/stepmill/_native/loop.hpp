// The hot loop, the only one: a worker's commands turned into calls of env.reset and env.step, and results into bytes.
// Serial, thread, process and Ray workers all run it. Autoreset is written here once.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "objects.hpp"
#include "overflow.hpp"
#include "tree.hpp"

namespace stepmill {

PyObject* raised_exception();  // takes the exception that is set, with its traceback; a new reference

enum class Autoreset : int { NEXT_STEP = 0, SAME_STEP = 1, DISABLED = 2 };
enum class Seeding : int { CONTINUE = 0, PER_EPISODE = 1, FIXED = 2 };
enum class LoopExit : int { REQUEST = 0, STOP = 1 };

// What one command brought, before it is written.
struct Result {
    nb::object obs, info, final_obs, final_info;
    nb::object reward, terminated, truncated;  // of a batched env: arrays [k]; a reward that is no plain number
    nb::object reset_mask;                     // of a batched env's partial reset: bool [k]
    double reward_value = 0.0;
    bool is_terminated = false, is_truncated = false;
    bool is_over = false;                      // this step ended the episode
    bool has_bad_info = false;                 // its info cannot be encoded
    std::vector<std::uint8_t> alive;           // [A]; after a reset empty: everyone is
};

// One env object and what the loop remembers of it.
struct ServedEnv {
    nb::object env, step, reset;
    std::uint32_t done = 0;        // ticket of the command last finished
    bool needs_reset = false;      // its last step ended an episode
    bool is_early = false;         // its next episode was begun before anybody asked: here is what came of it
    nb::object early_obs, early_info, early_error;
    std::vector<std::uint8_t> early_alive;
    const char* early_phase = "";
    bool has_options = false;      // resets without options of their own are given these, decoded anew each time
    std::vector<std::uint8_t> options;
    bool has_seed = false;
    std::uint64_t base_seed = 0;   // the seed of the last explicit reset
    std::uint64_t episode = 0;     // resets since then
    std::vector<std::uint8_t> alive;            // [A], after the newest result
    std::vector<double> episode_return;         // by row of the env and number of the reward, running
    std::vector<std::int64_t> episode_length;
    std::vector<std::uint8_t> ended;            // batched: the row's last step ended its episode
};

// Called by one thread at a time, the worker's own, with the GIL; run() lets go of it while it waits.
class Loop {
   public:
    Loop(std::shared_ptr<Slab> slab, std::uint32_t worker, nb::list envs, nb::dict settings);

    LoopExit run();
    bool run_server(std::uint32_t local);
    void run_until(std::uint32_t local, std::uint32_t after_ticket);
    bool wait_idle(double timeout_s);  // in line: until no other thread runs a command; needs `stop` to be set. False: one still does
    void refresh();
    void begin_again(std::uint32_t local);
    void keep_options(std::uint32_t local, nb::handle options);  // encoded; None forgets them
    // In line: raises the exception of a signal handler that came out of an env (signals.hpp), once.
    void raise_interrupt();
    bool has_interrupt() const { return static_cast<bool>(interrupt_); }
    void requests_seen(std::uint32_t count) {
        requests_seen_ = count;
        end_request(*control_);
    }
    void release();                            // drops every reference to Python objects
    int traverse(visitproc visit, void* arg) const;

   private:
    bool sweep(bool& is_interrupted);
    bool is_staged(std::uint32_t local) const { return words_.row[local] >= slab_->plan.num_rows; }
    bool do_staged();
    std::size_t obs_at(const Leaf& leaf, std::size_t index, std::uint32_t row, std::uint32_t slot) const;
    bool reset_early();
    bool is_of_early(std::uint32_t local) const;
    bool take_early(std::uint32_t local, Result& result, const char*& phase);
    void drop_early(ServedEnv& served) const;
    void run_inline(std::uint32_t local, std::uint32_t ticket);
    void do_command(std::uint32_t local, std::uint32_t ticket);
    bool is_given_up() const;
    bool perform(std::uint32_t local, Result& result, const char*& phase);
    bool perform_reset(std::uint32_t local, Result& result, bool is_automatic);
    bool perform_reset_again(std::uint32_t local, Result& result, bool is_automatic, std::uint32_t attempts_left);
    bool wait_for_retry(std::uint32_t local);
    bool is_learners_error() const;
    bool perform_step(std::uint32_t local, Result& result, const char*& phase);
    void end_if_copied();
    std::uint64_t episode_seed(std::uint32_t local) const;
    nb::object kept_options(const ServedEnv& served) const;
    bool unpack_reset(PyObject* returned, Result& result);
    bool unpack_step(const ServedEnv& served, PyObject* returned, Result& result);
    bool unpack_agents(const ServedEnv& served, PyObject* returned, Result& result);
    bool read_alive(PyObject* value, std::vector<std::uint8_t>& alive) const;
    bool unpack_time_step(PyObject* returned, Result& result) const;
    bool read_blob(std::uint32_t local, nb::object& blob);
    PyObject* build_action(std::uint32_t local, nb::handle opaques);
    PyObject* action_leaf(const Node& node, std::uint32_t row);
    PyObject* interned(const Leaf& leaf, const std::byte* value);
    void publish(std::uint32_t local, std::uint32_t ticket, Result& result);
    bool write_result(std::uint32_t local, Result& result);
    bool write_obs(PyObject* obs, std::uint32_t row, std::uint32_t slot, bool is_final, const nb::object& opaques);
    bool write_info(std::uint32_t row, Result& result);
    bool is_stand_in(std::uint32_t local) const;
    void write_reset(ServedEnv& served, std::uint32_t row, const Result& result);
    bool write_flags(std::uint32_t local, std::uint32_t row, Result& result);
    bool write_batched_flags(std::uint32_t local, std::uint32_t row, Result& result);
    void write_hash(std::uint32_t local, std::uint32_t row);
    void note_episode(ServedEnv& env, std::uint32_t row, std::uint32_t k);
    bool write_payload(std::uint32_t local, Result& result, const nb::object& opaques, const nb::object& final_opaques);
    bool store_payload(std::uint32_t local);
    nb::object& objects_of(std::uint32_t local) { return objects_->of(slab_->plan.servers[worker_][local]); }
    void write_record(std::uint32_t local, nb::handle cause, const char* phase);
    void publish_fault(std::uint32_t local, std::uint32_t ticket, Fault fault, const char* phase, bool is_claimed);
    // In line there is no reaper to lose a command to, and the two locked instructions are saved.
    bool claim(std::uint32_t local, std::uint32_t ticket) { return is_inline_ || claim_result(words_.state[local], ticket); }
    void finish(std::uint32_t local, std::uint32_t ticket);
    void flush();
    void wait(std::uint32_t seen);

    std::shared_ptr<Slab> slab_;
    std::shared_ptr<LocalObjects> objects_;  // null: the pool is in another process
    std::uint32_t worker_;
    WorkerControl* control_;
    ServerWords words_;
    PoolControl* pool_;
    Autoreset autoreset_;
    Seeding seeding_;
    bool is_batched_;
    bool is_time_step_ = false;     // step returns a tuple that is the observation, and has all else in it:
    Py_ssize_t step_type_at_ = 0, reward_at_ = -1, discount_at_ = 0;  // places there; -1: nowhere
    bool has_overlap_;
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
    OverflowWriter overflow_;
    std::vector<std::uint8_t> buffer_;
    std::uint32_t requests_seen_ = 0;
    std::uint32_t group_ = 0;       // results stored but not counted yet
    std::uint32_t passed_ = 0;      // sweeps that went past a staged reset
    Patience patience_;
    std::uint32_t fork_generation_;
    std::atomic<unsigned long> runner_{0};  // in line: ident of the thread that runs a command, 0: none does
    Word is_running_{0};            // in line: 1 while there is a runner; wait_idle() sleeps on it
    nb::object interrupt_;          // in line: the exception of a signal handler that came out of an env, to be raised in the learner
    nb::object reset_names_;        // ("seed", "options")
    nb::object seed_name_;          // ("seed",)
    nb::object no_info_;            // an empty dict
    std::array<nb::object, 1024> interned_;
};

}  // namespace stepmill
