// The parent's books: which env was commanded what, what is ready, which slot holds whose newest result.
// The hot path of Pool and VectorEnv: check, write, ring, wait, gather, all in one call.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "codec.hpp"
#include "journal.hpp"
#include "leases.hpp"
#include "loop.hpp"
#include "overflow.hpp"
#include "tree.hpp"

namespace stepmill {

class Reaper;

// What the parent knows of an env. Whether a PENDING env is ready, its `done` word tells.
// NEW: never reset. EXHAUSTED: it has played its budget of episodes.
enum class EnvStatus : std::uint8_t { IDLE = 0, PENDING = 1, FAULTED = 2, NEW = 3, EXHAUSTED = 4 };
// EVENT: take_events() has something for Python to do.
enum class WaitResult { READY, FAULT, TIMED_OUT, EVENT };

// What Python is told of an env whose episode is played again.
enum class ReplayEvent : int {
    PLACE = 0,     // so many commands are done, after which a call is to be repeated; the replay goes on when it is told to
    PLAYED = 1,    // all of the log gave what it gave the first time
    DIFFERS = 2,   // this step gave something else
    FAULT = 3,     // the env has a fault at this step, or its worker died
};

// An env that is held: its object is gone or is brought back to where the user believes it is. Its results are not the user's,
// so `EnvBook::done` points to `never_done`. The row's action, and what else the user would be told, is kept here meanwhile.
struct Replay {
    enum class Phase { WAITING, PLAYING, PAUSED };  // for begin_replay() · for a command that was given · for Python
    Word never_done{0};                // differs from every ticket the env can have in its lifetime here
    Phase phase = Phase::WAITING;
    bool was_ended = false;            // the newest result received ended the episode
    bool is_sent = false;              // the pending command, a step, was sent while the env was held
    bool was_last = false;             // the episode played here is the last of the env's budget
    std::size_t step = 0;              // of the log: the one that was given last
    std::uint32_t slot = 0;            // a private one, neither the newest result's nor the pending command's
    std::vector<std::uint32_t> places; // numbers of commands after which Python is asked
    std::vector<std::byte> action;     // of the pending command
    std::vector<std::byte> sums;       // return and length of the episode as the user knows them
    std::vector<std::byte> outcome;    // of a result that is kept: its rows beside the observation
};

// What the parent knows of an env object, whichever env it serves.
struct ServerBook {
    std::uint32_t env = 0;       // whom it serves; NO_ENV: it waits in the queue
    std::uint32_t ticket = 0;    // of the command last given to it, while it serves nobody; else its env's book has it
    bool is_staged = false;      // its next episode was begun: the first observation is in its staging row once that is done
    std::vector<std::pair<bool, std::uint64_t>> behind;  // resets that follow the one that still runs, by has_seed and seed; their tickets are counted already
    bool is_rebuilt = false;     // what is staged is of an object that is gone
    std::uint32_t lost_with = 0; // the ticket that its worker had when its restart began: not its successor's
    bool is_drawn = false;       // its next episode has its seed
    bool has_seed = false, has_own_seed = false;
    std::uint64_t seed = 0;      // of its next episode
    std::uint64_t own_seed = 0;  // of its last explicit reset
    std::uint64_t num_begun = 0;  // resets that it was commanded
};

constexpr std::uint32_t NO_ENV = UINT32_MAX;

struct alignas(CACHE_LINE) EnvBook {
    EnvStatus status = EnvStatus::NEW;  // what every step looks at comes first
    std::uint8_t latest = 0;     // slot of the newest result received
    std::uint8_t target = 0;     // slot that the command under way writes to
    bool is_lost = false;        // its env object is gone, and nobody was told: the next step is cut short
    bool needs_restore = false;  // the next step begins an episode
    bool has_seed = false;       // of the last explicit reset
    bool is_reset = false;       // the command under way begins an episode
    bool is_own_reset = false;   // the command under way is a step in which a batched env begins an episode in each of its rows
    bool is_masked = false;      // exhausted, in a step of all envs: it was given no command, and its row is empty
    bool is_taking = false;      // the result to come is what its server has staged
    bool is_kept = false;        // its newest result was received, but did not reach the user: take_back()
    std::uint32_t ticket = 0;
    std::uint32_t server = 0;
    const Word* done = nullptr;
    const Word* fault = nullptr;
    nb::object fault_info;       // its episode was cut short: what the info says of it; the result to come is marked truncated
    EpisodeLog log;              // its length, and whether it is whole, are looked at, too
    nb::object final_obs;        // SAME_STEP: the last good observation of the episode that was cut short
    const ObsHash* hash = nullptr;
    nb::object lost_info;        // what fault_info will be, of an env that is lost
    nb::object kept_payload, kept_final;  // of a result that is kept: its payload without the row, and its final observation; null: none
    nb::object opaques;          // newest opaque observation leaves, a list
    nb::object fault_record;     // of a fault that the pool found when it read the result of the command `recorded_ticket`
    std::uint32_t recorded_ticket = 0;
    std::uint64_t num_ended = 0;  // episodes that ended, of its budget
    std::uint64_t base_seed = 0;
    std::uint64_t episode = 0;   // resets since then
    std::unique_ptr<Replay> replay;  // null: it is not held

    bool is_commanded() const noexcept { return status == EnvStatus::PENDING && !is_masked; }
};

// In what form batches of observations are handed out.
struct Form {
    Node root;                                   // the tree of the observation, its tuples by factories of the user's own
    nb::object wrap;                             // wrap(array) stands in an array's place; null: the array itself
    std::vector<std::vector<std::byte>> given;   // by leaf: the bytes of all rows, whatever the envs say; empty: the envs'
};

// What the infos of a batch are made of. Lists of tuples that begin with a row; null: empty.
struct Payloads {
    nb::object infos;   // (row, payload, fault, objects)
    nb::object finals;  // (row, observation)
    bool is_by_env = false;  // rows count within all envs, not within the batch
};

// An env's payload where its observation has parts of no fixed size.
struct OpaquePayload {
    nb::object opaques, final_opaques;  // lists
    nb::object info;                    // bytes, or null
};

// The last batch that was handed out, for take_back().
struct Handout {
    std::vector<std::uint32_t> ids;
    Payloads payloads;
    bool has_payloads = false;  // false: they can still be gathered
};

// Used by one thread at a time; a second one, or a forked child, is told so. Needs the GIL, and lets go of it while parked.
class Ledger {
   public:
    Ledger(std::shared_ptr<Slab> slab, nb::dict settings);

    void attach_inline(nb::object loop);
    void attach_helper(nb::object helper);                        // helper(is_waiting) -> bool: begins what was commanded, brings results
    nb::object step(nb::handle actions);                          // None: a fault is there, or not all is ready
    nb::object step_obs(nb::handle actions);                      // the same, observations only
    void send(nb::handle actions, nb::handle env_ids);
    void send_all(nb::handle actions);                            // leaves out who is exhausted
    void send_reset(nb::handle env_ids, nb::handle seeds, nb::handle blobs);
    int wait(std::uint32_t min_envs, nb::handle timeout_s);       // as WaitResult, over all pending envs
    int wait_for(nb::handle env_ids, nb::handle timeout_s);
    int wait_event(nb::handle timeout_s);                         // for nothing but an event
    // The next three return None if a result cannot be read: its env has a fault then.
    nb::object collect(std::uint32_t max_envs, nb::handle out, nb::handle env_ids);  // Batch fields of the ready envs, longest-waiting first
    nb::object collect_rows(nb::handle env_ids);                  // newest observations of all envs, and the infos of the named ones at their rows
    nb::object collect_ready();                                   // Gymnasium's five values if all envs are ready, else None
    nb::list unclaimed() const { return unclaimed_; }             // [bool]: set when a batch is received, cleared by the pool once it has it
    void take_back();                                             // the last batch did not reach the user: its results can be received again
    nb::object observe(nb::handle env_ids);                       // newest observations, a fresh copy
    void hand_out(nb::handle program, nb::handle wrap, nb::dict given);
    void discard(nb::handle env_ids);
    void truncate(std::uint32_t env_id, nb::object fault_info);   // of an env with a fault: its episode ends, marked
    void lose_envs(nb::handle env_ids, nb::object fault_info);     // the next step of those that are idle will tell
    void renew(nb::handle env_ids);
    nb::list take_faults();                                       // of pending envs: (env_id, kind, payload | None, worker, ticket, begins_episode, was_resetting)
    void fail(nb::handle env_ids);                                // pending envs with a fault become FAULTED
    // The replacement of a worker, in this order; the second may be called by another thread that has the GIL.
    void begin_replacement(std::uint32_t worker, bool is_replayed);  // commands for its envs wait for its successor, or for their replay
    void clear_dead_worker(std::uint32_t worker);                 // it is certainly gone: settles what it was commanded
    void finish_replacement(std::uint32_t worker, int pidfd);     // its successor serves the slab
    void cancel_replacement(std::uint32_t worker);                // or there is none: commands of its envs become faults
    void fail_worker(std::uint32_t worker);                       // the same, and its idle envs are FAULTED
    void attach_reaper(nb::object reaper);
    void declare_dead(std::uint32_t worker);                      // its process is gone, which the reaper need not have noticed
    void notify();                                                // ends a wait of the pool's thread with EVENT; from any thread
    nb::list take_events();                                       // (env_id, ReplayEvent, step) since the last call
    bool begin_replay(std::uint32_t env_id, nb::handle places);   // false: there is nothing to play, finish_replay() was done
    void continue_replay(std::uint32_t env_id);
    void finish_replay(std::uint32_t env_id);                     // it is where the user believes it is: gives its pending command
    void fail_replay(std::uint32_t env_id);                       // it is not: truncate() or lose_envs() must follow
    void hold(std::uint32_t env_id);                              // an env whose own fault is to be repaired by a replay
    bool is_held(std::uint32_t env_id) const { return envs_.at(env_id).replay != nullptr; }
    nb::list held_envs() const;
    nb::tuple log_place(std::uint32_t server) const;
    bool is_pending(std::uint32_t env_id) const { return envs_.at(env_id).is_commanded(); }
    bool died_in_request(std::uint32_t worker) const;
    bool is_dead(std::uint32_t worker) const { return slab_ && slab_->workers.at(worker)->dead.load() != 0; }
    bool can_replay(std::uint32_t env_id) const { return envs_.at(env_id).log.is_whole; }
    void limit_logs(std::uint64_t size_bytes);
    std::uint64_t log_bytes() const { return log_bytes_ + journal_.size_bytes(); }
    nb::dict episode_log(std::uint32_t env_id);                   // for a crash capsule
    nb::tuple newest_outcome(std::uint32_t env_id) const;         // (reward, flags, hash of the observation)
    int running_env(std::uint32_t worker) const;                  // whose command a worker was at last; -1: none's
    nb::list ready_ids();
    nb::list states();                                            // 0 idle, 1 busy, 2 ready, 3 faulted, 4 exhausted
    nb::list num_ended();
    std::uint32_t num_pending();
    std::uint32_t num_held() const { return book_ ? book_->num_held() : 0; }
    std::uint32_t ticket_of(std::uint32_t env_id);
    std::uint32_t ticket_of_server(std::uint32_t server);
    std::uint32_t server_of(std::uint32_t env_id) const;
    std::uint32_t worker_of(std::uint32_t env_id) const { return slab_->seats.at(server_of(env_id)).worker; }
    nb::list envs_of(std::uint32_t worker) const;                 // whom its servers serve now
    void restore_order();                                         // every env is served by its own server again
    void claim_staged(nb::handle env_ids);                        // what is staged for these envs is their result, to be received
    void stage_spares(nb::handle seeds);                          // one per spare: resets them all
    nb::tuple spare_counts() const { return nb::make_tuple(num_taken_, num_late_); }
    void post_request(std::uint32_t worker);
    void set_eager(bool is_eager);
    void close();                                                 // from any thread: wakes a waiter, refuses all further use
    void release();                                               // lets go of the slab and of Python objects, once no call runs
    int traverse(visitproc visit, void* arg) const;

   private:
    friend class InUse;
    void let_go();
    using Ids = std::vector<std::uint32_t>;

    const Ids& parse_ids(nb::handle env_ids, Ids& storage) const;
    enum class Asked { STEP, STEP_ALL, RESET };  // STEP_ALL leaves out who is exhausted
    void check_idle(const Ids& ids, Asked asked) const;
    void empty_row(std::uint32_t id);
    std::vector<std::byte> copy_sums(std::uint32_t id) const;
    template <typename Copy>
    void walk_outcome(std::uint32_t id, Copy copy) const;
    std::uint32_t num_kept_ready() const;
    void restore_sums(std::uint32_t id, const std::vector<std::byte>& sums);
    void mask(std::uint32_t id);
    bool is_last(const EnvBook& env) const { return budget_ != 0 && env.num_ended + 1 >= budget_; }  // its last episode, or all are over
    void check_workers(const Ids& ids, Command command) const;
    void write_actions(nb::handle actions, const Ids& ids, std::vector<nb::list>& opaques);
    nb::object plain_actions(const Leaf& leaf, PyObject* value, npy_intp rows) const;
    void write_blob(std::uint32_t env_id, PyObject* blob);
    void write_reset_seed(std::uint32_t id, ServerWords& words, std::uint32_t local, nb::handle seed) const;
    void choose_slots(const Ids& ids);
    void dispatch(const Ids& ids, Command command);
    void check_deaths_of(std::uint32_t worker);
    bool is_done(std::uint32_t env_id) const { return envs_[env_id].done->load(std::memory_order_acquire) == envs_[env_id].ticket; }
    bool has_fault(std::uint32_t env_id) const { return envs_[env_id].fault->load(std::memory_order_relaxed) != 0; }
    std::uint32_t scan(const Ids& ids, std::uint32_t need, bool& is_fault);
    WaitResult wait_ids(const Ids& ids, std::uint32_t need, nb::handle timeout_s);
    nb::object collect_all();
    WaitResult wait_inline(const Ids& ids, std::uint32_t need, nb::handle timeout_s);
    WaitResult wait_helped(const Ids& ids, std::uint32_t need, nb::handle timeout_s);
    std::uint64_t deadline_of(nb::handle timeout_s) const;
    bool settle_dead(const Ids& ids);
    bool has_event();
    bool was_at_reset(std::uint32_t env_id) const;
    void free_overflow(std::uint32_t worker);
    void rewrite_control_words(std::uint32_t worker);
    void hold_env(std::uint32_t id);
    void release_env(std::uint32_t id);
    void end_hold_with_fault(std::uint32_t id);
    void dispatch_held(std::uint32_t id);
    void advance_replays();
    void find_lost_replays();
    void give_replayed(std::uint32_t id);
    void add_event(std::uint32_t id, ReplayEvent event, std::size_t step);
    void rest(std::uint32_t seen, std::uint64_t until_ns);
    void mark_lost(const Ids& ids, const nb::object& fault_info);
    static bool is_done_early(const EnvBook& env, Command command) { return command == Command::STEP && env.fault_info && !env.final_obs; }
    void keep_final_obs(const Ids& ids);
    void cut_short(std::uint32_t id);
    void begin_episode(std::uint32_t id, ServerWords& words, std::uint32_t local);
    bool is_ended(std::uint32_t id) const;
    bool resets_itself(std::uint32_t id, bool is_received = true) const;
    bool have_all_ended(std::uint32_t id, bool is_received = true) const;  // all rows of the env, in the newest result; or in one to be received
    void note_command(std::uint32_t id, const ServerWords& words, std::uint32_t local, Command command);
    void note_begun(std::uint32_t id, bool is_explicit, bool is_reset);
    void note_result(std::uint32_t id, bool is_journaled);
    void note_episode(EnvBook& env);
    void record(std::uint32_t id);
    void write_batch();
    void gather_hashes();
    void add_batch();
    void mind_limit();
    std::uint64_t num_logged(const EpisodeLog& log) const;
    void take_log(std::uint32_t id, std::uint64_t until = UINT64_MAX);  // up to a batch of the journal
    void take_logs();
    void drop_log(EpisodeLog& log);
    void retry_reset(std::uint32_t id);
    void give(std::uint32_t id, Command command, std::uint32_t slot);
    void copy_action(std::uint32_t id, std::byte* bytes, bool is_read) const;
    std::size_t action_bytes() const;
    void mark_truncated(std::uint32_t id);
    void note_ended(std::uint32_t id, bool is_cut);
    Outcome outcome_of(std::uint32_t id) const;
    nb::object seed_of(std::uint32_t id, std::uint64_t episode) const;
    void settle(const Ids& ids, Ids rest, bool is_seen = true);    // received: they are idle, their targets the latest; the rest is pending
    void receive(const Ids& ids, Ids rest, Payloads payloads, bool has_payloads = true);
    void release_kept(std::uint32_t id);
    nb::object gather(const Ids& ids, Ids rest, const std::vector<nb::object>* outs, bool has_ids);
    bool read_opaques(std::uint32_t id, OpaquePayload& payload);
    nb::object read_info(std::uint32_t id);
    nb::object objects_of(std::uint32_t env_id) const;
    nb::object make_info(const Payloads& payloads, nb::handle ended, std::size_t num_rows, nb::handle env_ids, nb::handle fixed) const;
    nb::object gather_info(const Ids& ids, const Payloads& payloads);
    bool gather_payloads(const Ids& ids, bool is_by_env, Payloads& payloads);
    void part_ready(std::uint32_t max_envs, nb::handle env_ids, Ids& ids, Ids& rest) const;
    bool step_all(nb::handle actions);
    nb::object gather_obs(const Ids& ids, const std::vector<nb::object>* outs);
    nb::object gather_leaf(const Leaf& leaf, const Ids& ids, int common_slot, nb::object& lease);
    void gather_into(const Leaf& leaf, const Ids& ids, int common_slot, std::byte* target) const;
    PyObject* wrapped(nb::object array) const;
    void copy_given(std::size_t index, const Ids& ids, std::byte* target) const;
    std::vector<nb::object> parse_out(const Ids& ids, nb::handle out) const;
    nb::object row_ids(const Ids& ids) const;
    void mark_faulted(std::uint32_t id);
    nb::object opaque_column(const Ids& ids, int index) const;
    nb::object env_obs(std::uint32_t env_id, nb::handle opaques, bool is_final);
    nb::object gather_rows(const Leaf& leaf, const Ids& ids) const;  // of a leaf that has one slot
    nb::object fixed_info(const Ids& ids) const;
    nb::object episodes(const Ids& ids) const;
    bool is_all(const Ids& ids) const { return &ids == &all_; }
    std::uint32_t row_of(std::uint32_t env_id) const { return env_id * batch_size_; }
    std::uint32_t staging_row(std::uint32_t server) const { return (num_envs_ + server) * batch_size_; }
    std::uint32_t result_row(std::uint32_t id) const { return envs_[id].is_taking ? staging_row(envs_[id].server) : row_of(id); }
    std::uint32_t& ticket_word(std::uint32_t server) { return servers_[server].env == NO_ENV ? servers_[server].ticket : envs_[servers_[server].env].ticket; }
    void publish_ticket(Seat seat, std::uint32_t ticket) {
        if (!is_restarting_[seat.worker]) slab_->words[seat.worker].ticket[seat.local].store(ticket, std::memory_order_release);
    }
    void end_restart(std::uint32_t worker);
    std::uint32_t published_ticket(std::uint32_t server) { return ticket_word(server) - static_cast<std::uint32_t>(servers_[server].behind.size()); }
    bool is_over(std::uint32_t id) const;
    bool takes_staged(std::uint32_t id, Command command) const;
    void relieve(std::uint32_t id);
    void attach(std::uint32_t id, std::uint32_t server);
    void detach(std::uint32_t id);
    bool is_gone(std::uint32_t server);
    void draw_seed(std::uint32_t server);
    void begin_drawn(std::uint32_t server, ServerWords& words, std::uint32_t local);
    void note_rebuilt(std::uint32_t worker);
    void stage(std::uint32_t server);
    void stage_once_more(std::uint32_t server);
    void publish_stage(std::uint32_t server, bool has_seed, std::uint64_t seed);
    void take(std::uint32_t id);
    void move_in(std::uint32_t id);
    void drop_staged(std::uint32_t id);
    void note_own_seed(std::uint32_t id, bool is_whole);
    void tend();
    Ids served_by(std::uint32_t worker) const;
    int common_slot(const Ids& ids) const;
    std::span<const std::uint8_t> fetch_payload(std::uint32_t env_id);
    nb::bytes read_payload(std::uint32_t env_id);

    std::shared_ptr<Slab> slab_;
    std::shared_ptr<SlotBook> book_;
    std::uint32_t num_envs_, batch_size_, num_workers_;
    Tree obs_, action_, info_;
    Form form_;
    Leaf reward_, terminated_, truncated_, alive_, over_, episode_return_, episode_length_;
    std::vector<EnvBook> envs_;
    std::vector<ServerBook> servers_;
    std::uint32_t num_spares_ = 0;
    std::deque<std::uint32_t> queue_;        // servers without an env, the one that comes next in front
    bool is_untended_ = false;               // a server has resets behind one that runs, or is rebuilt
    bool has_pool_seed_ = false;
    std::uint64_t pool_seed_ = 0, num_drawn_ = 0;  // with spares: of the last reset of all envs; seeds drawn since
    std::uint64_t num_taken_ = 0, num_late_ = 0;
    std::vector<OverflowWriter> blobs_;      // by worker
    std::vector<std::uint8_t> is_touched_;   // by worker, scratch
    Ids all_, pending_;  // pending: in order of send, ties by env id
    std::uint32_t scanned_ = 0;              // the first so many of the pending are ready, no fault among them
    Ids kept_;                               // results that were received and did not reach the user; their envs are given no command before they do
    Handout handout_;
    nb::list unclaimed_;
    std::vector<std::uint8_t> ended_;        // by row, of batched envs and under SAME_STEP: the newest result received told the end of an episode
    mutable std::vector<std::uint8_t> is_named_;  // scratch of parse_ids
    Autoreset autoreset_;
    Seeding seeding_;
    std::uint64_t log_limit_ = 0, log_bytes_ = 0;  // 0: no log
    Journal journal_;                              // the newest part of the logs
    std::vector<double> rewards_;                  // by env, scratch of write_batch; so are the next two
    std::vector<ObsHash> hashes_;
    std::vector<std::uint8_t> flags_;
    std::uint64_t budget_ = 0;                     // episodes per env; 0: no end
    bool tracks_episodes_, is_plain_, is_recorded_ = false;
    std::vector<std::uint8_t> is_restarting_;  // by worker: its tickets are its successor's, and not published yet
    std::vector<std::uint32_t> num_posted_;    // by worker: what its `requests` must say
    bool is_copy_, has_episodes_, holds_gil_, is_batched_;
    std::size_t lease_bytes_;
    std::uint64_t spin_ns_;
    Patience patience_;
    Encoder encoder_;
    nb::object make_info_, describe_unreadable_, unpickler_, inline_object_, helper_, reaper_object_;
    Reaper* reaper_ = nullptr;
    Ids playing_;                              // envs whose replay waits for a command that was given
    std::uint32_t num_held_envs_ = 0;
    struct Event {
        std::uint32_t env;
        ReplayEvent event;
        std::size_t step;
    };
    std::vector<Event> events_;
    std::atomic<bool> is_notified_{false};
    std::shared_ptr<LocalObjects> objects_;
    Loop* inline_ = nullptr;
    std::vector<std::uint8_t> buffer_;
    std::atomic<bool> is_in_use_{false}, is_closed_{false};
    bool is_released_ = false;
    std::uint32_t fork_generation_;
};

// Held while a call runs: reentrant use, and use from a second thread or a forked child, are the user's mistake, and said so.
class InUse {
   public:
    explicit InUse(Ledger& ledger);
    ~InUse();
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

   private:
    Ledger& ledger_;
};

// Error classes of stepmill.spec.errors, handed in once by the slab room.
struct Errors {
    nb::object usage, busy, closed, bug;
    nb::object dead_workers;  // not for users: `workers` are dead, and nothing was sent
};
Errors& errors();
[[noreturn]] void raise(const nb::object& error, const std::string& text);

}  // namespace stepmill
