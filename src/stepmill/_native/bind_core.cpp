// Python bindings of Slab, Loop, PoolState and ExternalPoolLoop.
#define NO_IMPORT_ARRAY
#include "bindings.hpp"
#include "pool/pool_state.hpp"
#include "worker/coroutine_loop.hpp"
#include "worker/external_pool.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <vector>

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

nb::object value_or_none(nb::object value) { return value ? value : nb::none(); }

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
    plan.env_counters = number("env_counters"), plan.learner_trace = number("learner_trace");
    auto offsets = [&](const char* name) { return nb::cast<std::vector<std::size_t>>(fields[name]); };
    plan.learner_words = offsets("learner_words"), plan.worker_words = offsets("worker_words"), plan.segments = offsets("segments"), plan.worker_traces = offsets("worker_traces");
    for (nb::handle servers : fields["servers"]) plan.servers.push_back(nb::cast<std::vector<std::uint32_t>>(servers));
    if (fields.contains("lanes")) plan.lanes = nb::cast<std::vector<std::vector<std::uint32_t>>>(fields["lanes"]);
    if (fields.contains("pool_servers")) plan.pool_servers = nb::cast<std::vector<std::uint32_t>>(fields["pool_servers"]);
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

std::vector<OwnedFd> moved(const std::vector<OwnedFd*>& fds) {
    std::vector<OwnedFd> moved_fds;
    moved_fds.reserve(fds.size());
    for (OwnedFd* fd : fds) moved_fds.push_back(std::move(*fd));
    return moved_fds;
}

std::vector<ByteRange> ranges_of(const std::vector<std::pair<std::size_t, std::size_t>>& pairs) {
    std::vector<ByteRange> ranges;
    for (const auto& [start, stop] : pairs) ranges.push_back({start, stop});
    return ranges;
}

void bind_slab(nb::module_& module) {
    nb::class_<Slab>(module, "Slab", "One mapped slab of shared memory, laid out by slab/layout.py.")
        .def("__init__",
             [](Slab* self, int fd, nb::dict plan, std::vector<OwnedFd*> commands, std::vector<OwnedFd*> results, OwnedFd* event, std::vector<std::pair<std::size_t, std::size_t>> writable, int only_worker) {
                 SlabPlan parsed = parse_plan(plan);
                 parsed.place_rows(only_worker);
                 new (self) Slab(fd, std::move(parsed), moved(commands), moved(results), std::move(*event), ranges_of(writable));
             },
             "fd"_a, "plan"_a, "commands"_a, "results"_a, "event"_a, "writable"_a, "only_worker"_a = SlabPlan::ALL_WORKERS,
             "Map a slab, and take ownership of each worker's two descriptors, or of none for those of another worker, and of the pool's eventfd. writable: (start, stop) ranges of whole pages that this process may write. only_worker: the worker whose rows this process uses, if only one.")
        .def_prop_ro("event_fd", [](const Slab& slab) { return slab.event_fd.number(); }, "The descriptor of the pool's eventfd. The slab keeps owning it.")
        .def("fds_of", [](const Slab& slab, std::uint32_t worker) { return nb::make_tuple(slab.command_fds.at(worker).number(), slab.result_fds.at(worker).number()); },
             nb::sig("def fds_of(self, worker: int) -> tuple[int, int]"), "worker"_a, "Return a worker's command and result descriptors. The slab keeps owning them.")
        .def("place", [](const Slab& slab) { return nb::make_tuple(reinterpret_cast<std::uintptr_t>(slab.base), slab.plan.size_bytes); },
             "Return address and size in bytes of the mapping in this process, for locking its pages.")
        .def("format", &Slab::format, "Write the header. Called once, by the pool, before a worker attaches.")
        .def("set_spinning", [](Slab& slab, int max_spinners, std::uint32_t num_spin_workers, std::uint32_t spin_ns) {
                 slab.pool->own.max_spinners.store(max_spinners);
                 slab.pool->own.num_spin_workers.store(num_spin_workers);
                 slab.pool->own.spin_ns.store(spin_ns);
             }, "max_spinners"_a, "num_spin_workers"_a, "spin_ns"_a, "Set how many threads of this pool may spin at a time, which workers may, and a worker's longest spin.")
        .def("set_tracing", [](Slab& slab, bool is_on) { slab.pool->own.tracing.store(is_on); }, "is_on"_a, "Set whether all threads of the pool write what they do to their rings of events.")
        .def("set_description", [](Slab& slab, std::size_t offset, std::size_t size_bytes) {
                 slab.pool->own.description_offset = offset;
                 slab.pool->own.description_bytes = size_bytes;
             }, "offset"_a, "size_bytes"_a, "Write where the description for programs that attach is. Called once, by the pool, before a worker attaches.")
        .def("is_dead", [](const Slab& slab, std::uint32_t lane) { return slab.workers.at(lane)->learner.dead.load() != 0; }, "lane"_a);
    nb::class_<Lease>(module, "Lease", "Base object of leased arrays: while it lives, nothing writes to their slot.");
}

void bind_loop(nb::module_& module) {
    module.attr("LOOP_REQUEST") = static_cast<int>(LoopExit::REQUEST);
    module.attr("LOOP_STOP") = static_cast<int>(LoopExit::STOP);
    nb::class_<Loop>(module, "Loop", nb::type_slots(collector_slots<Loop>()), "The hot loop of one worker.")
        .def(nb::init<std::shared_ptr<Slab>, std::uint32_t, nb::list, nb::dict>(), "slab"_a, "worker"_a, "envs"_a, "settings"_a)
        .def("run", [](Loop& loop) { return static_cast<int>(loop.run()); }, "Run commands until a slow request or stop; return LOOP_REQUEST or LOOP_STOP. Releases the GIL while it waits.")
        .def("run_until",
             [](Loop& loop, std::uint32_t server, std::uint32_t after_ticket) {
                 loop.run_until(server, after_ticket);
                 loop.raise_interrupt();
             },
             "server"_a, "after_ticket"_a, "Run a server's outstanding command if its ticket is at most after_ticket.")
        .def("wait_idle", &Loop::wait_idle, "timeout_s"_a, "Wait until no other thread runs a command (serial backend, after stop). Return False on timeout.")
        .def("refresh", &Loop::refresh, "Look up the step and reset methods of all envs again.")
        .def("restart_early_reset", &Loop::restart_early_reset, "server"_a, "Repeat an env's early reset after a call that may change the env, if episodes are logged.")
        .def("restore", &Loop::restore, "server"_a, "position"_a, "Go on with an env whose object has the state of this position, which is one of PoolState.positions().")
        .def("set_default_options", &Loop::set_default_options, "server"_a, "options"_a.none(), nb::sig("def set_default_options(self, server: int, options: bytes | None) -> None"),
             "Set the encoded options of resets without options of their own; None removes them.")
        .def("requests_seen", &Loop::requests_seen, "count"_a, "Set how many slow requests were handled so far.")
        .def("release", &Loop::release, "Drop all references to Python objects.");
    nb::class_<CoroutineLoop, Loop>(module, "CoroutineLoop", nb::type_slots(collector_slots<CoroutineLoop>()), "The loop of envs whose methods are coroutines.")
        .def(nb::init<std::shared_ptr<Slab>, std::uint32_t, nb::list, nb::dict>(), "slab"_a, "worker"_a, "envs"_a, "settings"_a)
        .def_prop_ro("event_fd", &CoroutineLoop::event_fd, "A descriptor that is readable when receive_calls() is to be called. The loop keeps owning it.")
        .def("receive_calls", &CoroutineLoop::receive_calls, nb::sig("def receive_calls(self) -> tuple[int, list[tuple[int, bool, typing.Any]]]"),
             "Return (exit, [(server, is_reset, arguments), ...]): calls to make. exit is LOOP_REQUEST, LOOP_STOP, or 2 if there are only calls.")
        .def("accept", [](CoroutineLoop& loop, std::uint32_t server, nb::handle returned) { return value_or_none(loop.accept(server, returned)); }, "server"_a, "returned"_a,
             "Take what a call returned. Return the keyword arguments of the reset that follows it, or None: the result is published.")
        .def("fail", [](CoroutineLoop& loop, std::uint32_t server, nb::handle error) { return value_or_none(loop.fail(server, error)); }, "server"_a, "error"_a,
             "Take what a call raised. Return the keyword arguments of a reset to be tried again, or None: the fault is published.")
        .def("hold", &CoroutineLoop::hold, "server"_a, "after_ticket"_a.none(), "Hold the commands of a server that are later than a ticket, or none.")
        .def("begin_request", &CoroutineLoop::begin_request, "Record that one more slow request was read; commands may follow it.")
        .def("end_request", &CoroutineLoop::end_request, "Record that no slow request is being served.")
        .def("enter", &CoroutineLoop::enter, "server"_a, "Record that the code of an env runs now.")
        .def("leave", &CoroutineLoop::leave, "Record that no env's code runs, and that the worker lives.")
        .def("give_up", &CoroutineLoop::give_up, "server"_a, "Have this worker ended because of an env that is too late. Returns only in a thread.")
        .def("stop", &CoroutineLoop::stop, "End the native thread. Idempotent.");
}

void bind_pool_state(nb::module_& module) {
    nb::class_<PoolState>(module, "PoolState", nb::type_slots(collector_slots<PoolState>()), "The state of a pool and its hot path.")
        .def(nb::init<std::shared_ptr<Slab>, nb::dict>(), "slab"_a, "settings"_a)
        .def("attach", &PoolState::attach, nb::kw_only(), "loop"_a.none() = nb::none(), "kernel"_a.none() = nb::none(), "advance"_a.none() = nb::none(), "outbox_fd"_a.none() = nb::none(), "reaper"_a.none() = nb::none(),
             nb::sig("def attach(self, *, loop: Loop | None = None, kernel: KernelLoop | None = None, advance: collections.abc.Callable[[bool], bool] | None = None, outbox_fd: int | None = None, reaper: Reaper | None = None) -> None"),
             "Connect parts. loop: the calling thread runs commands with it (serial backend). kernel: runs all envs. advance: runs an external pool in the calling thread; advance(is_waiting) starts new commands and, if is_waiting, fetches results. outbox_fd: an eventfd to add to after each delivery of commands, for the thread that sends them to other machines. reaper: watches the workers.")
        .def("step", &PoolState::step, "actions"_a.none(), nb::sig("def step(self, actions: object) -> tuple[typing.Any, ...] | None"), "Step all envs. Return Gymnasium's five values, or None if there is a fault.")
        .def("step_obs", &PoolState::step_obs, "actions"_a.none(), nb::sig("def step_obs(self, actions: object) -> typing.Any | None"), "Step all envs. Return the observations, or None if there is a fault.")
        .def("set_observation_format", &PoolState::set_observation_format, "program"_a, "wrap"_a.none(), "given"_a,
             nb::sig("def set_observation_format(self, program: tuple[object, ...], wrap: collections.abc.Callable[[typing.Any], object] | None, given: dict[int, typing.Any]) -> None"),
             "Set the form of observations in batches: a program with other factories, a function that wraps each array, and leaves whose values are given.")
        .def("send", &PoolState::send, "actions"_a.none(), "env_ids"_a.none() = nb::none(), "skips_exhausted"_a = false,
             "Send a step to some or all envs. skips_exhausted: not to exhausted ones, whose rows will be empty; only for all envs.")
        .def("send_reset", &PoolState::send_reset, "env_ids"_a.none(), "seeds"_a, "blobs"_a, "spare_seeds"_a.none() = nb::none(),
             "Send resets, with a seed and a blob, or None, per env. spare_seeds: also reset all spares in the queue, with a seed or None for each.")
        .def("wait", &PoolState::wait, "timeout_s"_a.none(), nb::kw_only(), "num_envs"_a.none() = nb::none(), "env_ids"_a.none() = nb::none(),
             "Wait until num_envs of the pending envs are ready, or those of env_ids that are busy; without either, until drain() returns something new. Return 0: ready, 1: there is a fault, 2: timed out, 3: call drain().")
        .def("watch", &PoolState::watch, "num_envs"_a,
             "Make the pool's eventfd readable when num_envs of the pending envs, or all, may be ready, or drain() may return something new. Return False if that is so already. A wait ends this.")
        .def("collect", &PoolState::collect, "max_envs"_a, "out"_a.none() = nb::none(), "env_ids"_a.none() = nb::none(),
             nb::sig("def collect(self, max_envs: int, out: object | None = None, env_ids: object | None = None) -> tuple[typing.Any, ...] | None"), "Receive ready envs, longest-waiting first. Return the fields of a Batch, or None if a result cannot be read; its env then has a fault.")
        .def("collect_rows", &PoolState::collect_rows, "env_ids"_a, nb::sig("def collect_rows(self, env_ids: object) -> tuple[typing.Any, dict[str, typing.Any]] | None"),
             "Receive these envs. Return the newest observations of all envs, and infos at their rows, or None as collect().")
        .def("collect_ready", &PoolState::collect_ready, nb::sig("def collect_ready(self) -> tuple[typing.Any, ...] | None"), "Receive all envs if all are ready. Return Gymnasium's five values, else None.")
        .def_prop_ro("unclaimed", &PoolState::unclaimed, nb::sig("def unclaimed(self) -> list[bool]"), "A list of one flag: every call that receives results sets it, the pool clears it when it has them.")
        .def("restore_unclaimed", &PoolState::restore_unclaimed, "Make the results of the last call that received some receivable again, since they did not reach the user.")
        .def("observe", &PoolState::observe, "env_ids"_a.none() = nb::none(), "Return the newest observations of envs, always copied.")
        .def("drain", &PoolState::drain, "acknowledge"_a, nb::sig("def drain(self, acknowledge: bool) -> list[typing.Any]"),
             "Return the events of pool/events.py that a decision must follow, also those that were returned before. acknowledge: the caller handles them, so that later waits return 3 only for new ones.")
        .def("apply", &PoolState::apply, "decisions"_a, nb::sig("def apply(self, decisions: collections.abc.Iterable[typing.Any]) -> int"),
             "Carry out decisions of pool/events.py, in order. Return how many were stale, and so dropped. If this raises, nothing has changed.")
        .def("discard_results", &PoolState::discard_results, "env_ids"_a.none(), "Drop the ready results of these envs.")
        .def("view", &PoolState::view, "servers"_a = std::vector<std::uint32_t>(), nb::kw_only(), "env_ids"_a = std::vector<std::uint32_t>(),
             nb::sig("def view(self, servers: collections.abc.Sequence[int] = (), *, env_ids: collections.abc.Sequence[int] = ()) -> list[typing.Any]"),
             "Return what is known of these servers, and of the servers of these envs: a ServerView of pool/events.py for each. env_ids from num_envs on: the servers in the queue.")
        .def("clear_dead_worker", &PoolState::clear_dead_worker, "worker"_a, "Abort the commands of a worker that does not run any more. Call it before the successor starts, from any thread.")
        .def("num_ended", &PoolState::num_ended, "worker"_a, "Return how many episodes the current process of a worker has completed.")
        .def("notify", &PoolState::notify, "Make the current or next wait of the pool's thread return 3. From any thread.")
        .def("limit_logs", &PoolState::limit_logs, "size_bytes"_a, "Limit the memory of all episode logs.")
        .def("episode_log", &PoolState::episode_log, "env_id"_a, nb::sig("def episode_log(self, env_id: int) -> dict[str, typing.Any]"), "Return what a crash capsule contains about an env's episode and its outstanding command.")
        .def("newest_outcome", &PoolState::newest_outcome, "env_id"_a, nb::sig("def newest_outcome(self, env_id: int) -> tuple[float, int, int]"), "Return reward, flags (1 terminated, 2 truncated) and observation hash of an env's newest result.")
        .def("positions", &PoolState::positions, "env_ids"_a.none() = nb::none(), nb::sig("def positions(self, env_ids: object | None = None) -> list[dict[str, typing.Any]]"),
             "Return what is known of each env, without its object, for restore_positions().")
        .def("spare_positions", &PoolState::spare_positions, nb::sig("def spare_positions(self) -> dict[str, typing.Any] | None"), "Return what is known of all servers, or None if there are no spares.")
        .def("restore_positions", &PoolState::restore_positions, "env_ids"_a.none(), "saved"_a, "spares"_a.none(),
             nb::sig("def restore_positions(self, env_ids: object | None, saved: list[dict[str, typing.Any]], spares: dict[str, typing.Any] | None) -> None"),
             "Give envs saved positions, or one to all of them. Envs whose position has `is_replayed` are suspended until their replay.")
        .def("newest_batch", &PoolState::newest_batch, nb::sig("def newest_batch(self) -> tuple[bool, tuple[typing.Any, ...] | None]"), "Return the newest results of all envs as collect() does, without receiving any, after whether there was a result since the start or a restore.")
        .def("usage", &PoolState::usage, nb::sig("def usage(self) -> tuple[int, int]"), "Return how many result slots are leased, and the bytes of all episode logs.")
        .def("release_staged", &PoolState::release_staged, "env_ids"_a.none(), nb::kw_only(), "is_whole"_a,
             "Before a reset: make the staged episodes of these envs their next results. is_whole: first assign each env to the server of its number, and queue the spares.")
        .def("states", &PoolState::states, nb::sig("def states(self) -> list[int]"), "Return per env the number of its EnvState.")
        .def("num_pending", &PoolState::num_pending, "Return how many envs have a command whose result was not received.")
        .def("post_request", &PoolState::post_request, "lane"_a, "Notify a lane of a slow request in its mailbox.")
        .def("close", &PoolState::close, "Stop the workers, wake a waiter, and refuse further use. From any thread.")
        .def("release", &PoolState::release, "Drop all references to Python objects.");
}

// Returns the offsets of words of a worker's first server, by name, relative to its WorkerWords.
nb::dict server_word_offsets(std::uint32_t num_servers) {
    std::vector<std::byte> learner(ServerWords::learner_bytes(num_servers)), own(ServerWords::worker_bytes(num_servers));
    const ServerWords servers = ServerWords::at(learner.data(), own.data(), num_servers);
    const auto offset = [&](const void* word) { return sizeof(WorkerWords) + static_cast<std::size_t>(static_cast<const std::byte*>(word) - own.data()); };
    nb::dict offsets;
    offsets["done"] = offset(servers.done), offsets["state"] = offset(servers.state), offsets["counters"] = offset(servers.counters);
    return offsets;
}

// A field of a structure that is read from Python.
struct Field {
    const char* name;
    std::size_t offset;
    nb::object format;
};

// Returns a structure as numpy.dtype takes it.
nb::object make_format(std::size_t size_bytes, const std::vector<Field>& fields) {
    nb::list names, formats, offsets;
    for (const Field& field : fields) names.append(field.name), formats.append(field.format), offsets.append(field.offset);
    nb::dict format;
    format["names"] = names, format["formats"] = formats, format["offsets"] = offsets, format["itemsize"] = size_bytes;
    return format;
}

#define FIELD(structure, name) Field{#name, offsetof(structure, name), format_of<decltype(structure::name)>()}

template <typename Type>
nb::object format_of() {
    if constexpr (std::is_same_v<Type, TimeHistogram>) {
        return make_format(sizeof(Type), {FIELD(Type, total_ns), FIELD(Type, max_ns), FIELD(Type, buckets)});
    } else if constexpr (std::is_same_v<Type, TraceEvent>) {
        return make_format(sizeof(Type), {FIELD(Type, begin_ns), FIELD(Type, end_ns), FIELD(Type, server), FIELD(Type, kind)});
    } else if constexpr (requires { std::tuple_size<Type>::value; }) {
        return nb::make_tuple(format_of<typename Type::value_type>(), nb::make_tuple(std::tuple_size_v<Type>));
    } else {
        static_assert(sizeof(Type) == 8 || sizeof(Type) == 4);
        return nb::str(sizeof(Type) == 8 ? "<u8" : "<u4");
    }
}

// Returns the structures that programs read, as numpy.dtype takes them, by name.
nb::dict counter_formats() {
    nb::dict formats;
    formats["header"] = make_format(sizeof(PoolWords), {FIELD(PoolWords, magic), FIELD(PoolWords, version), FIELD(PoolWords, description_offset), FIELD(PoolWords, description_bytes)});
    std::vector<Field> learner, env, process{FIELD(LearnerWords, pid), FIELD(LearnerWords, dead)}, server;
    std::vector<Field> worker{FIELD(WorkerWords, current), FIELD(WorkerWords, running), FIELD(WorkerWords, serving)};
#define LEARNER_COUNTER(name) learner.push_back({#name, offsetof(PoolWords, counters) + offsetof(LearnerCounters, name), format_of<Counter>()});
#define ENV_COUNTER(name, type) env.push_back(FIELD(EnvCounters, name));
#define PROCESS_COUNTER(name) process.push_back(FIELD(LearnerWords, name));
#define WORKER_COUNTER(name) worker.push_back({#name, offsetof(WorkerWords, counters) + offsetof(WorkerCounters, name), format_of<Counter>()});
#define SERVER_COUNTER(name, type) server.push_back(FIELD(ServerCounters, name));
#include "shared/statistics.def"
    formats["learner"] = make_format(sizeof(PoolWords), learner), formats["env"] = make_format(sizeof(EnvCounters), env);
    formats["process"] = make_format(sizeof(LearnerWords), process), formats["worker"] = make_format(sizeof(WorkerWords), worker);
    formats["server"] = make_format(sizeof(ServerCounters), server), formats["event"] = format_of<TraceEvent>();
    formats["worker_trace"] = make_format(sizeof(WorkerTrace), {FIELD(WorkerTrace, num_events), FIELD(WorkerTrace, events)});
    formats["learner_trace"] = make_format(sizeof(LearnerTrace), {FIELD(LearnerTrace, num_events), FIELD(LearnerTrace, events)});
    return formats;
}

nb::list bucket_stops_ns() {
    nb::list stops;
    for (std::uint32_t bucket = 0; bucket < NUM_BUCKETS; ++bucket) stops.append(bucket_stop_ns(bucket));
    return stops;
}

void bind_external_pool(nb::module_& module) {
    nb::class_<ExternalPoolLoop, Loop>(module, "ExternalPoolLoop", nb::type_slots(collector_slots<ExternalPoolLoop>()), "A proxy's side of the slab, for an external pool of envs.")
        .def(nb::init<std::shared_ptr<Slab>, std::uint32_t, nb::dict>(), "slab"_a, "worker"_a, "settings"_a)
        .def("receive_commands", &ExternalPoolLoop::receive_commands, "may_wait"_a, nb::sig("def receive_commands(self, may_wait: bool) -> tuple[int, typing.Any, typing.Any, list[tuple[int, typing.Any, typing.Any]] | None]"),
             "Return new commands: (exit, servers, actions, resets). Releases the GIL while it waits.")
        .def("receive_command", &ExternalPoolLoop::receive_command, "server"_a, "after_ticket"_a, nb::sig("def receive_command(self, server: int, after_ticket: int) -> tuple[int, typing.Any, typing.Any, list[tuple[int, typing.Any, typing.Any]] | None]"),
             "Return the command of one server in the same form, if its ticket is at most after_ticket.")
        .def("publish", &ExternalPoolLoop::publish, "servers"_a, "obs"_a, "reward"_a.none(), "terminated"_a.none(), "truncated"_a.none(), "infos"_a.none(),
             nb::sig("def publish(self, servers: object, obs: object, reward: object | None, terminated: object | None, truncated: object | None, infos: object | None) -> list[int]"),
             "Write results: row j belongs to servers[j]. Return the servers that must be reset first (SAME_STEP).")
        .def("fail", &ExternalPoolLoop::fail, "servers"_a, "error"_a, "phase"_a, "Publish an exception as the fault of those of these servers that have an outstanding command.")
        .def("outstanding", &ExternalPoolLoop::outstanding, nb::sig("def outstanding(self) -> list[int]"), "Return the servers whose command was received and has no result yet.")
        .def("num_outstanding", &ExternalPoolLoop::num_outstanding, "Return how many servers have a received command without a result.");
}

}  // namespace

void bind_core(nb::module_& module) {
    module.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
    module.attr("SHARED_WORDS_BYTES") = sizeof(SharedWords);
    module.def("learner_words_bytes", &learner_words_bytes, "num_servers"_a, "Return the size of the learner's words of one worker.");
    module.def("worker_words_bytes", &worker_words_bytes, "num_servers"_a, "Return the size of one worker's own words.");
    module.def("server_word_offsets", &server_word_offsets, "num_servers"_a, nb::sig("def server_word_offsets(num_servers: int) -> dict[str, int]"),
               "Return offsets of some words and of the counters of a worker's first server, by name, from the worker's words.");
    module.def("counter_formats", &counter_formats, nb::sig("def counter_formats() -> dict[str, dict[str, typing.Any]]"), "Return the structures that programs read, as numpy.dtype takes them, by name.");
    module.def("bucket_stops_ns", &bucket_stops_ns, nb::sig("def bucket_stops_ns() -> list[int]"), "Return, for each bucket of the histograms of durations, the shortest time in ns that is above it.");
    for (const auto& [name, state] : {std::pair{"ENV_IDLE", EnvState::IDLE}, {"ENV_BUSY", EnvState::BUSY}, {"ENV_READY", EnvState::READY}, {"ENV_FAULTED", EnvState::FAULTED},
                                      {"ENV_EXHAUSTED", EnvState::EXHAUSTED}, {"ENV_NEEDS_RESET", EnvState::NEEDS_RESET}}) {
        module.attr(name) = static_cast<int>(state);
    }
    const nb::object dead_workers = nb::steal(PyErr_NewExceptionWithDoc("stepmill._native.DeadWorkers", "Internal: nothing was sent, since the workers in args[0] are dead.", PyExc_Exception, nullptr));
    module.attr("DeadWorkers") = dead_workers;
    module.def("register_errors", [](nb::object usage, nb::object busy, nb::object closed, nb::object bug) { errors() = {usage, busy, closed, bug, nb::module_::import_("stepmill._native").attr("DeadWorkers")}; },
               "usage"_a, "busy"_a, "closed"_a, "bug"_a, "Register the error classes that native code raises.");
    bind_slab(module);
    bind_loop(module);
    bind_pool_state(module);
    bind_external_pool(module);
}

}  // namespace stepmill
