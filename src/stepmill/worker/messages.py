"""The messages between a pool, its launcher and its workers, sent as cloudpickle bytes.

They are named tuples, because each program waits until the starter has made these classes, and dataclasses take five
times as long.

learner ──► starter    Start (+ the launcher's socket, stdout and stderr) · Quit
learner ──► launcher   Start (+ the worker's socket) · Quit
starter, launcher ──► learner   Launched (+ a pidfd) · LaunchFailed · Exited
learner ──► worker     Build · Attach (+ the slab's descriptors) · Request
worker ──► learner     Ready · Failed · Attached · Reply · Closed

Requests and replies are sent as plain tuples, because pickle takes longer for the classes than for what is in them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias, cast

import cloudpickle
import numpy as np

from stepmill._pickling import dumps
from stepmill.spec.choices import AutoresetMode, Context, Seeding
from stepmill.spec.env import EnvSpec
from stepmill.spec.remote_env import CallLimits
from stepmill.worker.module_contents import Contents
from stepmill.worker.program_state import ProgramState

ErrorRecord: TypeAlias = Mapping[str, str]
"""An exception as text, with the keys phase, type, message and traceback."""

EnvFn: TypeAlias = Callable[[], object]

_START_SHARE = 0.9  # an env that says why it is late says more than the backend


def dump(message: object) -> bytes:
    """Return a message, or any other value, as bytes that another process of this pool can load."""
    return dump_plain(message) if is_plain(message) else dumps(message)


def dump_plain(message: object) -> bytes:
    """Return a value for which `is_plain` is true, or a message of such values, as bytes."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def is_plain(value: Any, depth: int = 4, not_named: Sequence[str] = ()) -> bool:
    """Return whether a value is small, and pickle writes the same as cloudpickle, in a tenth of the time.

    Functions of the modules `not_named` are not plain, because pickle sends their names.
    """
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is FunctionType and value.__module__ != "__main__" and value.__module__ not in not_named:
        # Cloudpickle sends it by its name, too, unless a module is registered to be sent by value.
        is_found = getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
        return is_found and not cloudpickle.list_registry_pickle_by_value()
    if kind is np.ndarray:
        return value.dtype.kind in "biufc"
    if kind not in _CONTAINERS or depth == 0 or len(value) > MAX_PLAIN_ITEMS:
        return False
    parts = (*value, *value.values()) if kind is dict else value
    return all([is_plain(part, depth - 1, not_named) for part in parts])  # noqa: C419 - faster


load: Callable[[bytes | bytearray], object] = pickle.loads
"""Returns the message from bytes of a process of this pool. Loading bytes from elsewhere could run any code."""


# ---- settings and plans ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The settings that are the same for all workers of a pool.

    Attributes:
        entropy: a number that, together with the worker's number, seeds the worker's global random generators.
        worker_env: the environment variables of all workers, in addition to those of the learner.
        worker_threads: the number of threads of numeric libraries in a worker; None does not limit it.
        affinity: cores that the threads of a kernel may use; None does not limit them.
        timers_every: measure every Nth outermost timer of `stepmill.timers`; 0 measures none.
        overlap_resets: whether an idle worker begins the next episode of an env before a command requests it.
        start_serially: whether workers start one after the other.
        reset_retries, reset_retry_wait_s: how often a worker repeats a reset that raised an exception, and the seconds
            between attempts.
        step_timeout_s, reset_timeout_s, start_timeout_s, call_timeout_s: time limits in seconds; None means no limit.
        show_progress: whether the learner shows on a terminal how many envs are built.
        measures_memory: whether a worker reads the size of its process at the end of each episode.
        watches_sharing: whether one worker of the pool watches what the envs of a process share; see `shared_state.py`.
        simulator_spin_s: for how many seconds envs outside the worker's process may be awaited without sleep.
        has_trace: whether Build comes with a further descriptor. A worker that crashes or hangs writes its traceback to
            it.
    """

    autoreset: AutoresetMode = AutoresetMode.NEXT_STEP
    seeding: Seeding = Seeding.CONTINUE
    context: Context = Context.FORKSERVER
    entropy: int = 0
    worker_env: Mapping[str, str] = field(default_factory=dict)
    worker_threads: int | None = 1
    affinity: tuple[int, ...] | None = None
    timers_every: int = 0
    overlap_resets: bool = False
    start_serially: bool = False
    reset_retries: int = 0
    reset_retry_wait_s: float = 0.0
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None
    start_timeout_s: float | None = 120.0
    call_timeout_s: float | None = 120.0
    show_progress: bool = False
    measures_memory: bool = False
    watches_sharing: bool = False
    simulator_spin_s: float = 0.0
    has_trace: bool = False

    def limits_of_envs(self, *, ends_processes: bool = False) -> CallLimits:
        """Return the limits that envs outside the worker's process have to keep by themselves.

        If the backend ends the processes of late workers, this is only a little less than the limit for the start.
        """
        start_s = None if self.start_timeout_s is None else _START_SHARE * self.start_timeout_s
        if ends_processes:
            return CallLimits(start_s, spin_s=self.simulator_spin_s)
        return CallLimits(
            start_s, self.step_timeout_s, self.reset_timeout_s, self.call_timeout_s, spin_s=self.simulator_spin_s
        )


@dataclass(frozen=True)
class WorkerPlan:
    """The envs of one worker, in the order of its servers. A spare has an env_id of num_envs or more.

    Attributes:
        first_lane, num_lanes: the number of its first lane, and how many lanes it has. If first_lane is None, the
            worker has one lane with the number of the worker.
        init: the option `workers.init`; None if there is none, or if it has been called.
        affinity: the cores that the worker may use; None does not limit them.
        environ: the environment variables of this worker only. Only a process sets them.
    """

    worker: int
    env_ids: tuple[int, ...]
    env_fns: tuple[EnvFn, ...]
    init: EnvFn | None = None
    affinity: tuple[int, ...] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    first_lane: int | None = None
    num_lanes: int = 1

    @functools.cached_property
    def lanes(self) -> dict[int, tuple[int, ...]]:
        """The envs of each lane of the worker, by the number of the lane, in contiguous ranges of almost equal size."""
        first = self.worker if self.first_lane is None else self.first_lane
        bounds = [lane * len(self.env_ids) // self.num_lanes for lane in range(self.num_lanes + 1)]
        return {first + lane: self.env_ids[begin:end] for lane, (begin, end) in enumerate(itertools.pairwise(bounds))}


@dataclass(frozen=True)
class PackedPlan:
    """A plan for a fresh process. `env_fns` are loaded, which imports their modules, after `plan.init` was called."""

    plan: WorkerPlan
    env_fns: bytes

    def unpack(self) -> WorkerPlan:
        """Return the whole plan. Exceptions of loading are raised."""
        found = load(self.env_fns)
        return dataclasses.replace(self.plan, env_fns=cast("tuple[EnvFn, ...]", found))


class ServerLocation(NamedTuple):
    """Where a server is: its lane, and its index among the servers of that lane."""

    lane: int
    local_index: int


def server_locations(plans: Sequence[WorkerPlan]) -> tuple[ServerLocation, ...]:
    """Return the location of each server, in the order of servers."""
    lanes = [each for plan in plans for each in plan.lanes.items()]
    found = {server: ServerLocation(lane, i) for lane, owned in lanes for i, server in enumerate(owned)}
    return tuple(found[server] for server in range(len(found)))


@dataclass(frozen=True)
class WorkerReport:
    """The envs that a worker has built: one spec per env, in the order of the plan. Equal specs are one object. `load_s` is as in Ready."""

    worker: int
    pid: int
    specs: tuple[EnvSpec, ...]
    load_s: float = 0.0


# ---- slow requests ---------------------------------------------------------------------------------------------------


class RequestKind(IntEnum):
    """What a request does to each of its envs."""

    CALL = 1  # payload (name, args, kwargs)
    GET_ATTR = 2  # payload name
    SET_ATTR = 3  # payload (name, values), one value per env
    RENDER = 4  # payload None
    SET_RESET_OPTIONS = 5  # payload ("options", values): for resets that have no options; None removes them
    SET_PROPERTY = 6  # payload (name, values)
    GET_PROPERTIES = 7  # payload None
    TIMERS = 8  # payload None: the outcome is the timers of the worker, for any of its envs
    END = 9  # payload None: close the envs and end, after the reply
    RESTORE = 10  # payload (set_state, (state, position) of each env): give env objects states that were saved


class Request(NamedTuple):
    """A slow request to some envs of one lane.

    Attributes:
        id: a number that is unique in the pool.
        kind: what the request does.
        servers: the envs, as local indices in the lane (0 is its first env).
        after: for each env, the ticket of the last command that was sent to it. The request runs after that command.
        payload: see `kind`. Between processes, the payload is bytes made by `dump`.
        lane: the index of the lane in the worker, counted from 0.
    """

    id: int
    kind: RequestKind
    servers: tuple[int, ...]
    after: tuple[int, ...]
    payload: object
    lane: int = 0


class Value(NamedTuple):
    """The result of a request for one env. Between processes, it is bytes made by `dump`."""

    value: object


Outcome: TypeAlias = "Value | ErrorRecord"
"""The outcome of a request for one env: a value, or the record of what the env raised."""


class Reply(NamedTuple):
    """The reply to a request, with one outcome per env of the request."""

    id: int
    outcomes: tuple[Outcome, ...]


# ---- learner to worker ----------------------------------------------------------------------------------------------


class Build(NamedTuple):
    """Build these envs. The descriptor of the pool's `BuildProgress` comes first with the message.

    Attributes:
        lanes: the envs of each lane, by the number of the lane in the pool.
        plan: a PackedPlan as bytes; None for a fork of the learner, which has inherited it.
        program: the state of the learner's program; None for a fork, which has inherited it.
    """

    settings: WorkerSettings
    worker: int
    lanes: Mapping[int, tuple[int, ...]]
    plan: bytes | None
    program: ProgramState | None


class Attach(NamedTuple):
    """Serve this slab.

    Attributes:
        plan: the plan of the slab's layout. "writable" has the ranges that each lane of this worker may write. The
            descriptors of the slab, of two memory files for each lane, and of the pool's eventfd come with the message.
        num_lanes: the number of lanes of the pool.
        num_requests: for each lane of this worker, how many requests were posted to it before.
        settings_requests: requests that the worker does before it serves.
        is_watched: whether the worker watches what its envs share; see `shared_state.py`.
    """

    plan: Mapping[str, object]
    num_lanes: int
    num_requests: tuple[int, ...]
    settings_requests: tuple[Request, ...] = ()
    is_watched: bool = False


# ---- worker to learner ----------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """All envs are built. Env i has the spec `distinct_specs[spec_indices[i]]`. Specs are bytes made by `dump`.

    `modules` has the contents of the user's modules that the worker has imported. `load_s` is the processor time in seconds for loading the
    env_fns, which imports modules. A fork of the learner has neither.
    """

    pid: int
    distinct_specs: tuple[bytes, ...]
    spec_indices: tuple[int, ...]
    modules: Contents
    load_s: float


class Failed(NamedTuple):
    """The worker cannot serve. There is (env_id, record) for each env that failed. Without such an env, env_id is None."""

    faults: tuple[tuple[int | None, ErrorRecord], ...]


class Attached:
    """The worker serves the slab."""


class Closed(NamedTuple):
    """The worker has closed its envs and ends now. There is (env_id, record) for each env that raised in close()."""

    faults: tuple[tuple[int | None, ErrorRecord], ...]


# ---- learner, starter and launcher ----------------------------------------------------------------------------------


class LauncherSetup(NamedTuple):
    """How to start a launcher.

    Attributes:
        context: how the launcher starts its workers.
        environ: the environment variables of the launcher.
        preload: the modules to import before the launcher is forked.
        stdio: the descriptors that files of the learner replace in the launcher: 1, 2 or both.
    """

    context: Context
    environ: Mapping[str, str]
    preload: Sequence[str]
    stdio: tuple[int, ...]


class Start(NamedTuple):
    """Start a process: a worker, or a launcher with this setup.

    The socket of the process's channel comes with the message, and then, for a launcher, the learner's files of `stdio`. The number is
    that of the request: a worker that could not be restarted may be reported after the request for its successor.
    """

    number: int
    worker: int = 0
    setup: LauncherSetup | None = None


class Quit:
    """Kill the remaining processes that were started, and end."""


class Launched(NamedTuple):
    """The process with this number has been started. Its pidfd comes with the message."""

    number: int
    pid: int


class LaunchFailed(NamedTuple):
    """The process with this number could not be started."""

    number: int
    reason: str


class Exited(NamedTuple):
    """A process has ended. `code` is its exit status, or the negative number of the signal that ended it."""

    number: int
    code: int


MAX_PLAIN_ITEMS = 32
_CONTAINERS = (tuple, list, dict)
_PLAIN = (str, int, float, bool, bytes, type(None))
