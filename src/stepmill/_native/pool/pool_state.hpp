// The state of a pool: the command of each env, which results are ready, and which slot has each env's newest result.
// The hot path of Pool and VectorEnv: check, write, ring, wait and gather in one call.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "pool/command_writer.hpp"
#include "pool/decisions.hpp"
#include "pool/env_table.hpp"
#include "pool/episode_log.hpp"
#include "pool/openmp_threads.hpp"
#include "pool/spare_queue.hpp"
#include "pool/unclaimed_results.hpp"
#include "shared/leases.hpp"
#include "shared/tree.hpp"

namespace stepmill {

class KernelLoop;
class Reaper;
struct SavedPosition;

// EVENT: drain() returns something new, or notify() was called.
enum class WaitResult { READY, FAULT, TIMED_OUT, EVENT };

// The form in which the user gets batches of observations.
struct ObservationFormat {
    Node root;                                   // the observation's tree, with tuple factories that the user chose
    nb::object wrap;                             // wrap(array) replaces each array; null: arrays stay
    std::vector<std::vector<std::byte>> given;   // by leaf: bytes that replace those of all rows; empty: the envs' own
};

// The payload of an env with opaque parts in its observation.
struct OpaquePayload {
    nb::object opaques, final_opaques;  // lists
    nb::object info;                    // bytes, or null
};

// For the visits of an env's rows: functions that append the bytes to others, write others to them, or add up their sizes.
inline auto append_to(std::vector<std::byte>& bytes) {
    return [&bytes](std::byte* row, std::size_t size) { bytes.insert(bytes.end(), row, row + size); };
}
inline auto write_from(const std::vector<std::byte>& bytes) {
    return [next = bytes.data()](std::byte* row, std::size_t size) mutable { std::memcpy(row, next, size), next += size; };
}
inline auto add_to_size(std::size_t& size_bytes) {
    return [&size_bytes](std::byte*, std::size_t size) { size_bytes += size; };
}

// Connects the parts of a pool: commands, results, faults, replays. Owns the record of each env.
// Used by one thread at a time; a second thread or a forked child gets an error. Needs the GIL, and releases it while it sleeps.
class PoolState {
   public:
    PoolState(std::shared_ptr<Slab> slab, nb::dict settings);

    void attach(nb::object loop, nb::object kernel, nb::object advance, std::optional<int> outbox_fd, nb::object reaper);
    nb::object step(nb::handle actions);                          // None: there is a fault
    nb::object step_obs(nb::handle actions);                      // the same, but only the observation
    void send(nb::handle actions, nb::handle env_ids, bool skips_exhausted);
    void send_reset(nb::handle env_ids, nb::handle seeds, nb::handle blobs, nb::handle spare_seeds);
    int wait(nb::handle timeout_s, std::optional<std::uint32_t> num_envs, nb::handle env_ids);  // returns a WaitResult
    bool watch(std::uint32_t num_envs);  // prepares a wait of an event loop; false if there is nothing to wait for
    // The next three return None if a result cannot be read; its env then has a fault.
    nb::object collect(std::uint32_t max_envs, nb::handle out, nb::handle env_ids);  // the fields of a Batch, longest-waiting envs first
    nb::object collect_rows(nb::handle env_ids);                  // newest observations of all envs, and infos of the given envs at their rows
    nb::object collect_ready();                                   // Gymnasium's five values if all envs are ready, else None
    nb::list unclaimed() const { return unclaimed_.flag(); }
    void restore_unclaimed();                                     // the last batch did not reach the user: its results become receivable again
    nb::object observe(nb::handle env_ids);                       // newest observations, always copied
    void set_observation_format(nb::handle program, nb::handle wrap, nb::dict given);
    void discard_results(nb::handle env_ids);
    nb::list drain(bool acknowledge);
    std::uint32_t apply(nb::handle decisions);                    // returns how many were stale
    void clear_dead_worker(std::uint32_t worker);                 // the process does not run any more: aborts its commands. Any thread that holds the GIL
    void notify();                                                // ends a wait of the pool's thread with EVENT; from any thread
    std::uint64_t num_ended(std::uint32_t worker) const;  // episodes that the current process of a worker has completed
    nb::list view(const std::vector<std::uint32_t>& servers, const std::vector<std::uint32_t>& env_ids);  // a ServerView of pool/events.py for each
    void limit_logs(std::uint64_t size_bytes);
    nb::dict episode_log(std::uint32_t env_id);                   // for a crash capsule
    nb::tuple newest_outcome(std::uint32_t env_id) const;         // (reward, flags, hash of the observation)
    nb::list positions(nb::handle env_ids);                       // of each env all that restore_positions() needs, as a dict
    nb::object spare_positions() { return spares_.has_spares() ? nb::object(spares_.positions()) : nb::none(); }
    void restore_positions(nb::handle env_ids, nb::list saved, nb::object spares);
    nb::tuple newest_batch();                                     // whether a result was received; the newest results of all envs, in the form of collect()
    std::vector<int> states();                                            // an EnvState per env
    std::uint32_t num_pending();
    nb::tuple usage() const { return nb::make_tuple(leases_ ? leases_->num_held() : 0, log_.size_bytes()); }  // leased slots, bytes of logs
    void release_staged(nb::handle env_ids, bool is_whole);       // before a reset: makes staged episodes of these envs their next results
    void post_request(std::uint32_t lane);
    void close();                                                 // from any thread: wakes a waiter and refuses further use
    void release();                                               // drops the slab and all Python objects as soon as no call runs
    int traverse(visitproc visit, void* arg) const;

   private:
    friend class InUse;
    void clear();
    void check_open() const;
    nb::object view_of(std::uint32_t server) const;
    std::uint32_t lane_of(std::uint32_t env_id) const { return slab_->server_locations[envs_[env_id].server].worker; }
    using Ids = std::vector<std::uint32_t>;

    const Ids& parse_ids(nb::handle env_ids, Ids& storage) const;
    enum class CommandKind { STEP, STEP_ALL, RESET };  // STEP_ALL skips exhausted envs
    void check_idle(const Ids& ids, CommandKind kind) const;
    void empty_row(std::uint32_t id);
    // Calls copy(bytes, size) for return and length of the episode of each row of an env.
    template <typename Copy>
    void visit_sums(std::uint32_t id, Copy copy) const {
        copy(reinterpret_cast<std::byte*>(slab_->episode_return(row_of(id))), slab_->plan.outcome.episode_return.row_bytes * batch_size_);
        copy(reinterpret_cast<std::byte*>(slab_->episode_length(row_of(id))), sizeof(std::int64_t) * batch_size_);
    }
    // Calls copy(bytes, size) for each column of an env's rows except observation, return and length.
    template <typename Copy>
    void visit_outcome(std::uint32_t id, Copy copy) const {
        const OutcomePlan& plan = slab_->plan.outcome;
        for (const Column* column : {&plan.reward, &plan.terminated, &plan.truncated, &plan.alive}) copy(slab_->base + column->at(0, row_of(id)), column->row_bytes * batch_size_);
        for (const Column& column : slab_->plan.info) copy(slab_->base + column.at(0, row_of(id)), column.row_bytes * batch_size_);
        copy(reinterpret_cast<std::byte*>(slab_->over(row_of(id))), batch_size_);
    }
    template <typename Copy>
    void visit_obs(std::uint32_t id, std::uint32_t slot, Copy copy) const {
        for (const Leaf& leaf : obs_.leaves) copy(slab_->base + leaf.column.at(slot, row_of(id)), leaf.row_bytes * batch_size_);
    }
    void copy_obs(std::uint32_t id, std::uint32_t from, std::uint32_t to) const;  // between two slots
    nb::dict position_of(std::uint32_t id);
    SavedPosition read_position(nb::handle fields) const;
    void restore_position(std::uint32_t id, const SavedPosition& saved);
    std::uint32_t num_unclaimed_ready() const;
    void restore_outcome(std::uint32_t id);
    void mask(std::uint32_t id);
    void keep_latest(EnvRecord& env) { leases_->unpin(env.target), env.target = env.latest, leases_->pin(env.target); }  // its result has the newest observation
    bool is_last(const EnvRecord& env) const { return budget_ != 0 && env.num_ended + 1 >= budget_; }  // its current episode is the last, or it is exhausted
    void check_workers(const Ids& ids, Command command) const;
    void add_workers_to_recycle(Ids& found) const;
    bool is_between_episodes(std::uint32_t server) const;
    // Whether an env is in an episode that its next step continues, or has a command.
    bool has_episode(std::uint32_t id) const {
        const EnvPhase phase = envs_[id].phase();
        return phase == EnvPhase::PENDING || phase == EnvPhase::EXHAUSTED || (phase == EnvPhase::IDLE && !spares_.is_staged(envs_[id].server));
    }
    void write_actions(nb::handle actions, const Ids& ids, std::vector<nb::list>& opaques);
    void write_opaque_action(std::uint32_t id, const nb::list& opaques);
    nb::object plain_actions(const Leaf& leaf, PyObject* value, npy_intp rows) const;
    void write_reset_seed(std::uint32_t id, nb::handle seed) const;
    int find_common_slot(bool is_for_all) const;
    void choose_slots(const Ids& ids);
    void dispatch(const Ids& ids, Command command);
    bool is_done(std::uint32_t env_id) const { return envs_[env_id].done->load(std::memory_order_acquire) == *envs_[env_id].ticket; }
    bool has_fault(std::uint32_t env_id) const { return envs_[env_id].fault->load(std::memory_order_relaxed) != 0; }
    // Whether a command has ended because its worker no longer serves the env.
    bool is_lost(std::uint32_t id) const { const auto fault = static_cast<Fault>(envs_[id].fault->load(std::memory_order_relaxed)); return fault >= Fault::DIED && fault <= Fault::NEIGHBOUR && envs_[id].phase() == EnvPhase::PENDING && is_done(id); }
    std::uint32_t scan(const Ids& ids, std::uint32_t num_needed, bool& is_fault);
    void attach_kernel(nb::object loop);
    void reset_server_order();
    bool is_busy(std::uint32_t id) const;
    WaitResult wait_for_event(nb::handle timeout_s);
    // Waits until num_needed of these envs are done, or until there is a fault or an event. By backend: workers, envs in this thread,
    // an external pool or kernel in this thread.
    WaitResult wait_until_done(const Ids& ids, std::uint32_t num_needed, nb::handle timeout_s);
    std::optional<WaitResult> prepare_wait(const Ids& ids, std::uint32_t num_needed, std::uint32_t& seen);
    nb::object collect_all();
    WaitResult wait_inline(const Ids& ids, std::uint32_t num_needed, nb::handle timeout_s);
    WaitResult wait_by_advancing(const Ids& ids, std::uint32_t num_needed, nb::handle timeout_s);
    std::uint64_t deadline_of(nb::handle timeout_s) const;
    bool abort_commands_of_dead_workers(const Ids& ids);
    bool has_event();
    nb::list events_of_now();
    nb::object failure_of(std::uint32_t id);
    nb::object death_of(std::uint32_t worker);
    const Ids& lanes_of(std::uint32_t worker) const { return slab_->lanes[worker]; }
    WorkerControl& process_words(std::uint32_t worker) const { return *slab_->workers[lanes_of(worker).front()]; }  // its first lane has the counts of the process
    bool is_restarting(std::uint32_t worker) const { return commands_.is_restarting(lanes_of(worker).front()); }
    bool is_dead(std::uint32_t worker) const { return is_dead(lanes_of(worker)); }
    bool is_dead(const Ids& lanes) const { return std::ranges::any_of(lanes, [&](std::uint32_t lane) { return slab_->workers[lane]->learner.dead.load() != 0; }); }
    bool was_at_reset(std::uint32_t env_id) const;
    void free_overflow(std::uint32_t lane);
    void resume_env(std::uint32_t id);
    void resume_with_fault(std::uint32_t id);
    void dispatch_suspended(std::uint32_t id);
    void advance_replays();
    void pause(std::uint32_t id, ReplayEvent event);
    bool is_replaying() const { return std::ranges::any_of(suspended_, [&](std::uint32_t id) { return envs_[id].object() == ObjectPhase::REPLAYING; }); }
    void issue_replayed(std::uint32_t id);
    void wait_for_bell(std::uint32_t seen, std::uint64_t until_ns);
    void mark_lost(const Ids& ids, const nb::object& info);
    void mark_lost_late(const Ids& ids);
    bool is_reset_after_cut(const EnvRecord& env) const { return env.final_obs && !is_last(env); }  // its result is that of the next episode's reset
    bool is_done_early(const EnvRecord& env, Command command) const { return command == Command::STEP && env.is_from_pool() && !is_reset_after_cut(env); }
    void store_final_obs(const Ids& ids);
    // Decisions. The rest of apply() in the order of Decision::Kind; none of them fails.
    Decision prepare(nb::handle object);
    bool is_stale(const Decision& decision) const;
    void resolve_fault(Decision& decision);
    void mark_new(Decision& decision) { envs_.move(decision.id, EnvPhase::NEW); }
    void continue_replay(Decision& decision) { envs_[decision.id].replay->event == ReplayEvent::PLAYED ? finish_replay(decision.id) : issue_replayed(decision.id); }
    void suspend(std::uint32_t id, std::unique_ptr<Replay> replay);
    void begin_replay(Decision& decision);
    void finish_replay(std::uint32_t id);
    void begin_restart(Decision& decision);
    void finish_restart(Decision& decision);
    void cancel_restart(Decision& decision);
    void fail_worker(Decision& decision);
    std::unique_ptr<Replay> make_replay(std::uint32_t id) const;
    void cut_short(std::uint32_t id);
    void begin_episode(std::uint32_t id);
    bool is_ended(std::uint32_t id) const;
    bool resets_itself(std::uint32_t id, bool is_received = true) const;
    bool have_all_ended(std::uint32_t id, bool is_received = true) const;  // of all rows of the env: in the newest result received, or in the next one
    void record_command(std::uint32_t id, const ServerWords& words, std::uint32_t local, Command command);
    void record_begin(std::uint32_t id, bool is_explicit, bool is_reset);
    void record_result(std::uint32_t id, bool is_in_batch);
    void retry_reset(std::uint32_t id);
    void issue(std::uint32_t id, Command command, std::uint32_t slot);
    void mark_truncated(std::uint32_t id);
    void record_ended_rows(std::uint32_t id, bool is_cut);
    nb::object seed_of(std::uint32_t id, std::uint64_t episode) const;
    void mark_received(const Ids& ids, Ids rest, bool is_seen = true);    // makes the envs idle and their targets the latest slots; pending_ becomes `rest`
    void receive(const Ids& ids, Ids rest, Payloads payloads, bool has_payloads = true);
    nb::object gather(const Ids& ids, Ids rest, const std::vector<nb::object>* outs, bool has_ids);
    nb::object gather_columns(const Ids& ids, const Payloads& payloads, const std::vector<nb::object>* outs, bool has_ids);
    bool read_opaques(std::uint32_t id, OpaquePayload& payload);
    nb::object read_info(std::uint32_t id);
    nb::object objects_of(std::uint32_t env_id) const;
    nb::object make_info(const Payloads& payloads, nb::handle ended, std::size_t num_rows, nb::handle env_ids, nb::handle fixed) const;
    nb::object gather_info(const Ids& ids, const Payloads& payloads);
    bool gather_payloads(const Ids& ids, bool is_by_env, Payloads& payloads);
    void split_ready(std::uint32_t max_envs, nb::handle env_ids, Ids& ids, Ids& rest) const;
    void send_steps(nb::handle actions, const Ids& ids, CommandKind kind);
    bool step_all(nb::handle actions);
    // kernel_step.cpp
    nb::object step_uniform(nb::handle actions);
    bool run_kernel(std::uint32_t slot);
    void find_uniform_slot();
    void sync_records();
    void write_all_actions(nb::handle actions);
    template <typename VisitOpaque>
    std::vector<nb::object> read_actions(nb::handle actions, std::size_t num_envs, const VisitOpaque& opaque) const;
    void write_commands_after(std::uint32_t slot);
    nb::object gather_obs(const Ids& ids, const std::vector<nb::object>* outs);
    nb::object gather_leaf(const Leaf& leaf, const Ids& ids, int common_slot, nb::object& lease);
    void gather_into(const Leaf& leaf, const Ids& ids, int common_slot, std::byte* target) const;
    PyObject* wrapped(nb::object array) const;
    void copy_given(std::size_t index, const Ids& ids, std::byte* target) const;
    std::vector<nb::object> parse_out(const Ids& ids, nb::handle out) const;
    nb::object row_ids(const Ids& ids) const;
    void mark_faulted(std::uint32_t id);
    void trace_envs(TraceKind kind, const Ids& ids) const;
    void count_fault(std::uint32_t id, std::uint32_t kind);
    nb::object opaque_column(const Ids& ids, int index) const;
    nb::object env_obs(std::uint32_t env_id, nb::handle opaques, bool is_final);
    nb::object gather_rows(const Leaf& leaf, const Ids& ids) const;  // of a leaf with one slot
    nb::object fixed_info(const Ids& ids) const;
    nb::object episodes(const Ids& ids) const;
    // Whether `ids` is the pool's own list of all envs, whose results may be lent. Those for a list of the user are copied.
    bool is_all(const Ids& ids) const { return &ids == &all_; }
    std::uint32_t row_of(std::uint32_t env_id) const { return env_id * batch_size_; }
    std::uint32_t result_row(std::uint32_t id) const { return envs_[id].uses_staged() ? (num_envs_ + envs_[id].server) * batch_size_ : row_of(id); }
    bool is_over(std::uint32_t id) const;
    void swap_in_spare(std::uint32_t id);
    void assign_server(std::uint32_t id, std::uint32_t server);
    void use_staged(std::uint32_t id);
    void discard_staged(std::uint32_t id);
    void flush_deferred_resets();
    int common_slot(const Ids& ids) const;
    nb::bytes read_payload(std::uint32_t env_id);

    std::shared_ptr<Slab> slab_;
    std::shared_ptr<SlotLeases> leases_;
    std::uint32_t num_envs_, batch_size_, num_workers_;
    Tree obs_, action_, info_;
    ObservationFormat format_;
    Leaf reward_, terminated_, truncated_, alive_, over_, episode_return_, episode_length_;
    EnvTable envs_;
    CommandWriter commands_;
    SpareQueue spares_;
    EpisodeLog log_;
    UnclaimedResults unclaimed_;
    Ids suspended_;                          // by env id
    Ids counted_lives_;                      // by worker: the number of the life, from 1 on, whose death was counted last
    bool has_news_ = false;                  // since the last drain(true), a replay has paused, or ended during wait_for_event()
    bool waits_for_replays_ = false;         // wait_for_event() runs; the end of each call clears it
    Ids all_, pending_;  // pending: in the order of send, then by env id
    std::uint32_t scanned_ = 0;              // this many of the first pending envs are ready without a fault
    std::vector<std::uint8_t> ended_;        // by row, of batched envs and under SAME_STEP: the newest result received ended an episode
    std::vector<std::uint8_t> was_alive_;    // by row and agent: alive after the newest result received; the slab has a newer command's
    mutable std::vector<std::uint8_t> is_named_;  // scratch of parse_ids
    Autoreset autoreset_;
    Seeding seeding_;
    std::uint64_t budget_ = 0;                     // episodes per env; 0: no limit
    std::uint64_t recycle_episodes_, recycle_bytes_;  // workers are restarted from so many episodes on, and above so much memory; UINT64_MAX: no limit
    bool recycles_;
    bool tracks_episodes_;                        // the episode numbers are needed
    bool is_copy_, has_episodes_, holds_gil_, is_batched_;
    std::size_t lease_bytes_;
    std::uint64_t spin_ns_;
    SpinPolicy spin_policy_;
    OpenMpThreads openmp_;
    CallSampler send_sampler_, run_sampler_, gather_sampler_;
    UnclaimedTime unclaimed_time_;
    std::vector<nb::object> event_types_, decision_types_;  // by Event, by Decision::Kind
    nb::object view_type_;
    nb::object make_info_, describe_unreadable_, unpickler_, reaper_object_;
    Reaper* reaper_ = nullptr;
    static constexpr int NO_SLOT = -1;
    KernelLoop* kernel_ = nullptr;
    nb::object kernel_object_;
    bool may_be_uniform_ = false, are_records_stale_ = false;
    int uniform_slot_ = NO_SLOT;                   // the slot of all envs' newest results if step_uniform() may be used
    std::atomic<bool> is_notified_{false};
    std::shared_ptr<LocalObjects> objects_;
    std::vector<std::uint8_t> buffer_;
    std::atomic<bool> is_in_use_{false}, is_closed_{false};
    bool is_released_ = false;
    std::uint32_t fork_generation_;
};

// Held during a call. Raises a UsageError for reentrant use, and for use from a second thread or a forked child.
class InUse {
   public:
    enum class For { ANY, STEP_OF_ALL };  // STEP_OF_ALL reads env records only if it has to
    explicit InUse(PoolState& state, For call = For::ANY);
    ~InUse();
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    PoolState& state_;
};

// Error classes of stepmill.spec.errors, which stepmill.slab registers once.
struct Errors {
    nb::object usage, busy, closed, bug;
    nb::object dead_workers;  // internal: nothing was sent because the workers in args[0] are dead
};
Errors& errors();
[[noreturn]] void raise(const nb::object& error, const std::string& text);

}  // namespace stepmill
