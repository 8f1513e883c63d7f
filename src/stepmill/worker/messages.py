"""What travels between a pool, its launcher and its workers: frozen dataclasses, as cloudpickle bytes.

learner ──► launcher   LaunchWorker (+ the worker's socket) · Quit
launcher ──► learner   Launched (+ a pidfd) · LaunchFailed · Exited
learner ──► worker     Build · Attach (+ the slab's descriptors) · Request
worker ──► learner     Building · Ready · Failed · Attached · Reply · Closed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import cloudpickle

from stepmill.spec.env import EnvSpec
from stepmill.spec.options import AutoresetMode, Context, Seeding
from stepmill.worker.program_state import ProgramState

Record: TypeAlias = Mapping[str, str]
"""An exception as text, with the keys phase, type, message and traceback."""

EnvFn: TypeAlias = Callable[[], object]


def dump(message: object) -> bytes:
    """Returns a message, or any value, as bytes that another process of this pool can load."""
    data: bytes = cloudpickle.dumps(message)
    return data


def load(data: bytes | bytearray) -> object:
    """Returns the message behind bytes made by a process of this pool. Never give it bytes from elsewhere."""
    message: object = cloudpickle.loads(data)
    return message


# ---- what a pool decides once --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What every worker of a pool must know.

    Attributes:
        entropy: seeds the global generators of the workers, together with the worker's number.
        worker_env: environment variables on top of the learner's.
        worker_threads: threads of numeric libraries in a worker; None leaves them alone.
        affinity: cores that the workers may use; None leaves that alone.
        timers_every: measure one in so many of the outermost timers of `stepmill.timers`; 0 is none.
        overlap_resets: with nothing else to do, begin the next episode of an env that ended its last.
        start_serially: one worker after the other.
        reset_retries, reset_retry_wait_s: how often a reset that raised is tried again by the worker, and how long after.
        start_timeout_s, call_timeout_s: None is no limit.
        has_trace: a descriptor comes along with Build, into which a worker writes where it stood when it crashed or hung.
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
    start_timeout_s: float | None = 120.0
    call_timeout_s: float | None = 120.0
    has_trace: bool = False


@dataclass(frozen=True)
class WorkerPlan:
    """The envs of one worker, in the order of its servers. A spare has an env_id of num_envs or more."""

    worker: int
    env_ids: tuple[int, ...]
    env_fns: tuple[EnvFn, ...]


@dataclass(frozen=True)
class WorkerReport:
    """What a worker has built: one spec per env, in the order of the plan. Equal specs are one object."""

    worker: int
    pid: int
    specs: tuple[EnvSpec, ...]


# ---- slow requests ---------------------------------------------------------------------------------------------------


class RequestKind(IntEnum):
    """What to do with each of the envs that a request names."""

    CALL = 1  # payload (name, args, kwargs)
    GET_ATTR = 2  # payload name
    SET_ATTR = 3  # payload (name, values), one value per env
    RENDER = 4  # payload None
    KEEP_OPTIONS = 5  # payload ("options", values): what resets without options of their own are given; None forgets
    SET_PROPERTY = 6  # payload (name, values)
    GET_PROPERTIES = 7  # payload None
    TIMERS = 8  # payload None: the timers of the worker, whichever env is named


@dataclass(frozen=True)
class Request:
    """Something slow to do with some envs of one worker.

    Attributes:
        id: of this request, unique within the pool.
        kind: what to do.
        servers: which envs, as places in the worker's plan (0 is its first env).
        after: per env, the ticket of the command last sent to it: the request runs after that one.
        payload: what `kind` says; between processes as bytes made by `dump`.
    """

    id: int
    kind: RequestKind
    servers: tuple[int, ...]
    after: tuple[int, ...]
    payload: object


@dataclass(frozen=True)
class Value:
    """What an env returned for a request; between processes as bytes made by `dump`."""

    value: object


Outcome: TypeAlias = "Value | Record"
"""What a request brought for one env: a value, or the record of what it raised."""


@dataclass(frozen=True)
class Reply:
    """What a request brought, one outcome per env of the request."""

    id: int
    outcomes: tuple[Outcome, ...]


# ---- learner to worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """Build these envs.

    Attributes:
        plan: WorkerPlan as bytes, or None in a fork, which has inherited it.
        program: what the worker takes over from the learner's program; None in a fork, which has it.
    """

    settings: WorkerSettings
    worker: int
    env_ids: tuple[int, ...]
    plan: bytes | None
    program: ProgramState | None


@dataclass(frozen=True)
class Attach:
    """Serve this slab.

    Attributes:
        plan: where everything lies in it. The slab's descriptor and this worker's own two come along.
        num_workers: of the pool.
        num_requests: how many requests the pool had posted to this worker's predecessors; they are not for it.
        orders: requests to be done before the worker serves.
    """

    plan: Mapping[str, object]
    num_workers: int
    num_requests: int
    orders: tuple[Request, ...] = ()


# ---- worker to learner ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Building:
    """The worker has begun to construct this env, so that a death or a hang in there can be blamed."""

    env_id: int


@dataclass(frozen=True)
class Ready:
    """All envs are built. Env i has the spec `distinct[which[i]]`; the specs are bytes made by `dump`."""

    pid: int
    distinct: tuple[bytes, ...]
    which: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """The worker cannot serve: (env_id, record) for each env to blame; no env_id if it is none's fault."""

    faults: tuple[tuple[int | None, Record], ...]


@dataclass(frozen=True)
class Attached:
    """The worker serves the slab."""


@dataclass(frozen=True)
class Closed:
    """The worker has closed its envs and ends now: (env_id, record) for each that raised in close()."""

    faults: tuple[tuple[int | None, Record], ...]


# ---- learner and launcher -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchWorker:
    """Start a process for this worker. Its end of the channel comes along."""

    worker: int


@dataclass(frozen=True)
class Quit:
    """Kill the workers that are left, and end."""


@dataclass(frozen=True)
class Launched:
    """A worker's process runs. Its pidfd comes along."""

    worker: int
    pid: int


@dataclass(frozen=True)
class LaunchFailed:
    """A worker's process could not be started; the text says why."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Exited:
    """A worker's process is gone and reaped. `code` is the exit status, or minus the signal's number."""

    worker: int
    pid: int
    code: int
