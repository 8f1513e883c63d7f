// Python's view of Slab, Loop and Ledger.
#define NO_IMPORT_ARRAY
#include "bindings.hpp"
#include "ledger.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

namespace stepmill {

namespace {

using namespace nb::literals;

Column parse_column(nb::handle item) {
    nb::tuple parts = nb::cast<nb::tuple>(item);
    return {nb::cast<std::size_t>(parts[0]), nb::cast<std::size_t>(parts[1]), nb::cast<std::size_t>(parts[2]), nb::cast<bool>(parts[3])};
}

std::vector<Column> parse_columns(nb::handle list) {
    std::vector<Column> columns;
    for (nb::handle item : list) columns.push_back(parse_column(item));
    return columns;
}

OutcomePlan parse_outcome(nb::dict fields) {
    OutcomePlan outcome;
    outcome.num_agents = nb::cast<std::uint32_t>(fields["num_agents"]);
    outcome.num_rewards = nb::cast<std::uint32_t>(fields["num_rewards"]);
    outcome.has_scalar_reward = nb::cast<bool>(fields["has_scalar_reward"]);
    outcome.has_float_reward = nb::cast<bool>(fields["has_float_reward"]);
    outcome.is_open = nb::cast<bool>(fields["is_open"]);
    outcome.reward = parse_column(fields["reward"]);
    outcome.terminated = parse_column(fields["terminated"]);
    outcome.truncated = parse_column(fields["truncated"]);
    outcome.alive = parse_column(fields["alive"]);
    outcome.episode_return = parse_column(fields["episode_return"]);
    return outcome;
}

SlabPlan parse_plan(nb::dict fields) {
    auto number = [&](const char* name) { return nb::cast<std::size_t>(fields[name]); };
    SlabPlan plan;
    plan.size_bytes = number("size_bytes");
    plan.num_rows = static_cast<std::uint32_t>(number("num_rows"));
    plan.batch_size = static_cast<std::uint32_t>(number("batch_size"));
    plan.num_slots = static_cast<std::uint32_t>(number("num_slots"));
    plan.private_slots = static_cast<std::uint32_t>(number("private_slots"));
    plan.lease_bytes = number("lease_bytes");
    plan.pool_words = number("pool_words");
    plan.shared_words = number("shared_words");
    auto offsets = [&](const char* name) { return nb::cast<std::vector<std::size_t>>(fields[name]); };
    plan.learner_words = offsets("learner_words"), plan.worker_words = offsets("worker_words"), plan.segments = offsets("segments");
    for (nb::handle servers : fields["servers"]) plan.servers.push_back(nb::cast<std::vector<std::uint32_t>>(servers));
    plan.observation = parse_columns(fields["observation"]);
    plan.final_observation = parse_columns(fields["final_observation"]);
    plan.action = parse_columns(fields["action"]);
    plan.staging = parse_columns(fields["staging"]);
    plan.info = parse_columns(fields["info"]);
    plan.outcome = parse_outcome(fields);
    plan.over = parse_column(fields["over"]);
    plan.episode_length = parse_column(fields["episode_length"]);
    plan.payload = parse_column(fields["payload"]);
    plan.blob = parse_column(fields["blob"]);
    return plan;
}

nb::dict worker_stats(const Slab& slab, std::uint32_t worker) {
    const WorkerControl& control = *slab.workers.at(worker);
    nb::dict stats;
    stats["worker"] = worker;
    stats["env_s"] = static_cast<double>(control.env_ns.load(std::memory_order_relaxed)) * 1e-9;
    stats["wait_s"] = static_cast<double>(control.wait_ns.load(std::memory_order_relaxed)) * 1e-9;
    stats["steps"] = control.num_steps.load(std::memory_order_relaxed);
    stats["resets"] = control.num_resets.load(std::memory_order_relaxed);
    stats["reset_retries"] = control.num_retries.load(std::memory_order_relaxed);
    stats["is_dead"] = control.dead.load(std::memory_order_relaxed) != 0;
    return stats;
}

// nanobind's classes take part in garbage collection only if told how: envs and hooks refer back to pools.
template <typename Type>
int traverse_class(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    return nb::inst_ptr<Type>(self)->traverse(visit, arg);
}

template <typename Type>
int clear_class(PyObject* self) {
    nb::inst_ptr<Type>(self)->release();
    return 0;
}

template <typename Type>
PyType_Slot* collector_slots() {
    static PyType_Slot slots[] = {
        {Py_tp_traverse, reinterpret_cast<void*>(traverse_class<Type>)},
        {Py_tp_clear, reinterpret_cast<void*>(clear_class<Type>)},
        {0, nullptr},
    };
    return slots;
}

std::vector<OwnedFd> take_over(const std::vector<OwnedFd*>& fds) {
    std::vector<OwnedFd> taken;
    taken.reserve(fds.size());
    for (OwnedFd* fd : fds) taken.push_back(std::move(*fd));
    return taken;
}

std::vector<ByteRange> ranges_of(const std::vector<std::pair<std::size_t, std::size_t>>& pairs) {
    std::vector<ByteRange> ranges;
    for (const auto& [start, stop] : pairs) ranges.push_back({start, stop});
    return ranges;
}

void bind_slab(nb::module_& module) {
    nb::class_<Slab>(module, "Slab", "One mapped slab of shared memory; slab/layout.py says what lies where.")
        .def("__init__",
             [](Slab* self, int fd, nb::dict plan, std::vector<int> command_fds, std::vector<int> result_fds, std::vector<std::pair<std::size_t, std::size_t>> writable, int only_worker) {
                 SlabPlan parsed = parse_plan(plan);
                 parsed.place_rows(only_worker);
                 new (self) Slab(fd, std::move(parsed), OwnFds(command_fds), OwnFds(result_fds), ranges_of(writable));
             },
             "fd"_a, "plan"_a, "command_fds"_a, "result_fds"_a, "writable"_a, "only_worker"_a = SlabPlan::ALL_WORKERS,
             "Map a slab; each worker's two descriptors are duplicated, and -1 stands for those of another worker. writable: ranges of whole pages, (start, stop) each, that this process may write. only_worker: whose rows alone it uses.")
        .def_static("owning", [](int fd, nb::dict plan, std::vector<OwnedFd*> commands, std::vector<OwnedFd*> results, std::vector<std::pair<std::size_t, std::size_t>> writable) {
                 SlabPlan parsed = parse_plan(plan);
                 parsed.place_rows(SlabPlan::ALL_WORKERS);
                 return std::make_shared<Slab>(fd, std::move(parsed), OwnFds(take_over(commands)), OwnFds(take_over(results)), ranges_of(writable));
             }, "fd"_a, "plan"_a, "commands"_a, "results"_a, "writable"_a, "Map a slab, which takes over each worker's two descriptors.")
        .def("fds_of", [](const Slab& slab, std::uint32_t worker) { return nb::make_tuple(slab.command_fds.at(worker), slab.result_fds.at(worker)); },
             nb::sig("def fds_of(self, worker: int) -> tuple[int, int]"), "worker"_a, "A worker's descriptors: of its commands, of its results. They stay the slab's.")
        .def("place", [](const Slab& slab) { return nb::make_tuple(reinterpret_cast<std::uintptr_t>(slab.base), slab.plan.size_bytes); },
             "Address and size in bytes of the mapping in this process, for whoever locks its pages.")
        .def("format", &Slab::format, "Write the header. The pool's, once, before a worker attaches.")
        .def("set_spinning", [](Slab& slab, int max_spinners, std::uint32_t num_spin_workers, std::uint32_t spin_ns) {
                 slab.pool->max_spinners.store(max_spinners);
                 slab.pool->num_spin_workers.store(num_spin_workers);
                 slab.pool->spin_ns.store(spin_ns);
             }, "max_spinners"_a, "num_spin_workers"_a, "spin_ns"_a, "Say how many threads of this pool may spin at a time, and a worker's longest spin.")
        .def("worker_stats", &worker_stats, "worker"_a, "Seconds in envs and waiting, steps and resets of one worker.")
        .def("is_dead", [](const Slab& slab, std::uint32_t worker) { return slab.workers.at(worker)->dead.load() != 0; }, "worker"_a);
    nb::class_<Lease>(module, "Lease", "Base object of leased arrays: while it lives, their slot is not written.");
}

void bind_loop(nb::module_& module) {
    module.attr("LOOP_REQUEST") = static_cast<int>(LoopExit::REQUEST);
    module.attr("LOOP_STOP") = static_cast<int>(LoopExit::STOP);
    nb::class_<Loop>(module, "Loop", nb::type_slots(collector_slots<Loop>()), "The hot loop of one worker.")
        .def(nb::init<std::shared_ptr<Slab>, std::uint32_t, nb::list, nb::dict>(), "slab"_a, "worker"_a, "envs"_a, "settings"_a)
        .def("run", [](Loop& loop) { return static_cast<int>(loop.run()); }, "Serve commands until a slow request or the end comes; waits without the GIL.")
        .def("run_server", &Loop::run_server, "server"_a, "Do the outstanding command of a server (its number in this worker); False if there is none.")
        .def("run_until",
             [](Loop& loop, std::uint32_t server, std::uint32_t after_ticket) {
                 loop.run_until(server, after_ticket);
                 loop.raise_interrupt();
             },
             "server"_a, "after_ticket"_a, "Do a server's outstanding command if its ticket is at most after_ticket.")
        .def("wait_idle", &Loop::wait_idle, "timeout_s"_a, "In line, once the pool says stop: wait until no other thread runs a command; False if one still does.")
        .def("refresh", &Loop::refresh, "Look up step and reset of every env again.")
        .def("begin_again", &Loop::begin_again, "server"_a, "Say that an env is about to be changed by a call: a reset ahead of its time, if it is to be repeatable, comes after that.")
        .def("keep_options", &Loop::keep_options, "server"_a, "options"_a.none(), nb::sig("def keep_options(self, server: int, options: bytes | None) -> None"),
             "Say what resets without options of their own are given, encoded; None forgets it.")
        .def("requests_seen", &Loop::requests_seen, "count"_a, "Say how many slow requests were handled so far.")
        .def("release", &Loop::release, "Drop every reference to Python objects.");
}

void bind_ledger(nb::module_& module) {
    nb::class_<Ledger>(module, "Ledger", nb::type_slots(collector_slots<Ledger>()), "The pool's books, and its hot path.")
        .def(nb::init<std::shared_ptr<Slab>, nb::dict>(), "slab"_a, "settings"_a)
        .def("attach_inline", &Ledger::attach_inline, "loop"_a, "Run commands in the caller, by this loop (the serial backend).")
        .def("attach_helper", &Ledger::attach_helper, "helper"_a, "Have a pool that is not ours driven by the caller: helper(is_waiting) -> bool begins what was commanded and, to wait, brings results.")
        .def("step", &Ledger::step, "actions"_a.none(), nb::sig("def step(self, actions: object) -> tuple[typing.Any, ...] | None"), "Step all envs; Gymnasium's five values, or None when a fault is there.")
        .def("step_obs", &Ledger::step_obs, "actions"_a.none(), nb::sig("def step_obs(self, actions: object) -> typing.Any | None"), "The same, but observations only.")
        .def("hand_out", &Ledger::hand_out, "program"_a, "wrap"_a.none(), "given"_a,
             nb::sig("def hand_out(self, program: tuple[object, ...], wrap: collections.abc.Callable[[typing.Any], object] | None, given: dict[int, typing.Any]) -> None"),
             "Say in which form batches of observations are handed out: factories, what becomes of each array, leaves that are the pool's to say.")
        .def("send", &Ledger::send, "actions"_a.none(), "env_ids"_a.none() = nb::none(), "Command a step of some or all envs.")
        .def("send_all", &Ledger::send_all, "actions"_a.none(), "Command a step of all envs but those that are exhausted, whose rows will be empty.")
        .def("send_reset", &Ledger::send_reset, "env_ids"_a.none(), "seeds"_a, "blobs"_a, "Command resets; a seed and a blob, or None, per env.")
        .def("wait", &Ledger::wait, "min_envs"_a, "timeout_s"_a.none() = nb::none(), "0: that many are ready, 1: a fault is there, 2: timed out, 3: take_events() has something.")
        .def("wait_for", &Ledger::wait_for, "env_ids"_a.none(), "timeout_s"_a.none() = nb::none(), "The same for all of these envs that are busy.")
        .def("wait_event", &Ledger::wait_event, "timeout_s"_a.none() = nb::none(), "The same for no env: until take_events() has something.")
        .def("collect", &Ledger::collect, "max_envs"_a, "out"_a.none() = nb::none(), "env_ids"_a.none() = nb::none(),
             nb::sig("def collect(self, max_envs: int, out: object | None = None, env_ids: object | None = None) -> tuple[typing.Any, ...] | None"), "Receive ready envs, longest-waiting first: a Batch's fields. None: one cannot be read, and has a fault.")
        .def("collect_rows", &Ledger::collect_rows, "env_ids"_a, nb::sig("def collect_rows(self, env_ids: object) -> tuple[typing.Any, dict[str, typing.Any]] | None"),
             "Receive these envs: newest observations of all envs, infos at their rows. None: one cannot be read, and has a fault.")
        .def("collect_ready", &Ledger::collect_ready, nb::sig("def collect_ready(self) -> tuple[typing.Any, ...] | None"), "Gymnasium's five values if all envs are ready, else None.")
        .def_prop_ro("unclaimed", &Ledger::unclaimed, nb::sig("def unclaimed(self) -> list[bool]"), "One flag: set by every call that receives results, cleared by the pool once it has them.")
        .def("take_back", &Ledger::take_back, "The results of the last such call did not reach the user: they can be received again.")
        .def("observe", &Ledger::observe, "env_ids"_a.none() = nb::none(), "Newest observations of envs, a fresh copy.")
        .def("take_faults", &Ledger::take_faults, nb::sig("def take_faults(self) -> list[tuple[int, int, bytes | dict[str, str] | None, int, int, bool, bool]]"),
             "(env_id, kind, record or None, worker, ticket, begins_episode, was_resetting) of every pending env with a fault.")
        .def("fail", &Ledger::fail, "env_ids"_a, "Pending envs with a fault become FAULTED.")
        .def("discard", &Ledger::discard, "env_ids"_a.none(), "Drop the results of these envs that are done.")
        .def("truncate", &Ledger::truncate, "env_id"_a, "fault_info"_a, "End the episode of an env that has a fault, marked; a reset is tried again.")
        .def("lose_envs", &Ledger::lose_envs, "env_ids"_a, "fault_info"_a, "The next step of these envs, as far as they are idle, is cut short.")
        .def("renew", &Ledger::renew, "env_ids"_a, "FAULTED envs can be reset and stepped again.")
        .def("log_place", &Ledger::log_place, "server"_a,
             "Where an env object stands: (episodes begun, results of this one, of the one before, commanded, waits for a reset, is reset ahead).")
        .def("begin_replacement", &Ledger::begin_replacement, "worker"_a, "is_replayed"_a, "A worker is about to be replaced. Commands for its envs wait for its successor; with is_replayed its envs are held.")
        .def("clear_dead_worker", &Ledger::clear_dead_worker, "worker"_a, "Settle what a worker was commanded that certainly runs no more. Before its successor starts; from any thread.")
        .def("finish_replacement", &Ledger::finish_replacement, "worker"_a, "pidfd"_a, "The successor serves the slab: watch it, and publish the commands that waited for it.")
        .def("cancel_replacement", &Ledger::cancel_replacement, "worker"_a, "There is no successor: commands of the worker's envs become faults.")
        .def("fail_worker", &Ledger::fail_worker, "worker"_a, "A worker stays dead: its pending commands become faults, its idle envs FAULTED.")
        .def("attach_reaper", &Ledger::attach_reaper, "reaper"_a, "Take the reaper that watches the workers.")
        .def("declare_dead", &Ledger::declare_dead, "worker"_a, "The worker's process is gone, which the reaper need not have noticed.")
        .def("notify", &Ledger::notify, "End the wait of the pool's thread, or its next one, with 3. From any thread.")
        .def("take_events", &Ledger::take_events, nb::sig("def take_events(self) -> list[tuple[int, int, int]]"), "(env_id, REPLAY_..., step) of every replay that waits for Python.")
        .def("hold", &Ledger::hold, "env_id"_a, "Treat a pending env that has a fault as busy until its replay has ended.")
        .def("is_held", &Ledger::is_held, "env_id"_a, "Whether the env is held for a replay.")
        .def("held_envs", &Ledger::held_envs, nb::sig("def held_envs(self) -> list[int]"), "The envs that are held for a replay.")
        .def("begin_replay", &Ledger::begin_replay, "env_id"_a, "places"_a,
             "Play the episode of a held env again. A REPLAY_PLACE event follows each command whose number is in places. False: its pending command is a reset, which was given again; nothing else is to be done.")
        .def("continue_replay", &Ledger::continue_replay, "env_id"_a, "Go on after a REPLAY_PLACE event.")
        .def("finish_replay", &Ledger::finish_replay, "env_id"_a, "After REPLAY_PLAYED: release the env, and give its pending command.")
        .def("fail_replay", &Ledger::fail_replay, "env_id"_a, "Release an env that cannot be replayed; truncate() or lose_envs() must follow.")
        .def("is_pending", &Ledger::is_pending, "env_id"_a, "Whether the env was commanded and not received.")
        .def("is_dead", &Ledger::is_dead, "worker"_a, "Whether the reaper found the worker dead.")
        .def("died_in_request", &Ledger::died_in_request, "worker"_a, "Whether a dead worker was at a slow request, and at no command.")
        .def("can_replay", &Ledger::can_replay, "env_id"_a, "Whether the episode's log is whole.")
        .def("limit_logs", &Ledger::limit_logs, "size_bytes"_a, "From now on the episodes' logs take at most so much memory together.")
        .def("log_bytes", &Ledger::log_bytes, "Memory of the episodes' logs.")
        .def("episode_log", &Ledger::episode_log, "env_id"_a, nb::sig("def episode_log(self, env_id: int) -> dict[str, typing.Any]"), "What a crash capsule tells of an env's episode and of the command under way.")
        .def("newest_outcome", &Ledger::newest_outcome, "env_id"_a, nb::sig("def newest_outcome(self, env_id: int) -> tuple[float, int, int]"), "Reward, flags (1 terminated, 2 truncated) and observation hash of an env's last result.")
        .def("running_env", &Ledger::running_env, "worker"_a, "Whose command a worker was at when it was last heard of; -1: none's.")
        .def("ready_ids", &Ledger::ready_ids, nb::sig("def ready_ids(self) -> list[int]"), "Envs whose result can be received.")
        .def("states", &Ledger::states, nb::sig("def states(self) -> list[int]"), "Per env: 0 idle, 1 busy, 2 ready, 3 faulted, 4 exhausted.")
        .def("num_ended", &Ledger::num_ended, nb::sig("def num_ended(self) -> list[int]"), "Per env: episodes that ended, of the budget.")
        .def("num_pending", &Ledger::num_pending, "Envs commanded and not yet received.")
        .def("num_held", &Ledger::num_held, "Result slots that leases hold.")
        .def("ticket_of", &Ledger::ticket_of, "env_id"_a, "Number of the command last given to the env.")
        .def("ticket_of_server", &Ledger::ticket_of_server, "server"_a, "Number of the command last given to a server.")
        .def("server_of", &Ledger::server_of, "env_id"_a, "The server that serves the env now; from num_envs on, those in the queue.")
        .def("worker_of", &Ledger::worker_of, "env_id"_a, "The worker whose server serves the env now.")
        .def("envs_of", &Ledger::envs_of, "worker"_a, nb::sig("def envs_of(self, worker: int) -> list[int]"), "The envs that a worker's servers serve now.")
        .def("restore_order", &Ledger::restore_order, "Every env is served by its own server again; spares queue up.")
        .def("claim_staged", &Ledger::claim_staged, "env_ids"_a.none(), "Envs whose next episode is begun: its first observation is to be received.")
        .def("stage_spares", &Ledger::stage_spares, "seeds"_a, "Reset all spares, which wait in the queue; a seed or None for each.")
        .def("spare_counts", &Ledger::spare_counts, nb::sig("def spare_counts(self) -> tuple[int, int]"), "Episodes that began with a fresh env, and how many of those still had to wait for it.")
        .def("post_request", &Ledger::post_request, "worker"_a, "Tell a worker that a slow request waits in its mailbox.")
        .def("set_eager", &Ledger::set_eager, "is_eager"_a, "Whether workers report each result at once, or a group at a time.")
        .def("close", &Ledger::close, "Tell the workers to end, wake a waiter, refuse further use. From any thread.")
        .def("release", &Ledger::release, "Drop every reference to Python objects.");
}

}  // namespace

void bind_core(nb::module_& module) {
    module.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
    module.attr("POOL_WORDS_BYTES") = sizeof(PoolWords);
    module.attr("SHARED_WORDS_BYTES") = sizeof(SharedWords);
    module.def("learner_words_bytes", &learner_words_bytes, "num_servers"_a, "Bytes of the learner's words of one worker.");
    module.def("worker_words_bytes", &worker_words_bytes, "num_servers"_a, "Bytes of one worker's own words.");
    module.attr("REPLAY_PLACE") = static_cast<int>(ReplayEvent::PLACE);
    module.attr("REPLAY_PLAYED") = static_cast<int>(ReplayEvent::PLAYED);
    module.attr("REPLAY_DIFFERS") = static_cast<int>(ReplayEvent::DIFFERS);
    module.attr("REPLAY_FAULT") = static_cast<int>(ReplayEvent::FAULT);
    const nb::object dead_workers = nb::steal(PyErr_NewExceptionWithDoc("stepmill._native.DeadWorkers", "Not for users: nothing was sent, since the workers in args[0] are dead.", PyExc_Exception, nullptr));
    module.attr("DeadWorkers") = dead_workers;
    module.def("register_errors", [](nb::object usage, nb::object busy, nb::object closed, nb::object bug) { errors() = {usage, busy, closed, bug, nb::module_::import_("stepmill._native").attr("DeadWorkers")}; },
               "usage"_a, "busy"_a, "closed"_a, "bug"_a, "Hand in the error classes that native code raises.");
    bind_slab(module);
    bind_loop(module);
    bind_ledger(module);
}

}  // namespace stepmill
