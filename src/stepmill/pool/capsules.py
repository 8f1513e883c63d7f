"""Writes crash capsules: what is known of a fault, from the books, the worker's last words and the options.

Nothing here ever fails the run: what cannot be told is noted in the capsule, and a capsule that cannot be written is noted in
the error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill._version import __version__
from stepmill.backends.base import Backend, Traced
from stepmill.pool.faults import FaultKind
from stepmill.spec.capsule import MAX_ARRAY_BYTES, Capsule, write_capsule
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import BackendName, PoolOptions
from stepmill.spec.plain import NotPlain, to_plain
from stepmill.spec.tree import Node, leaves, opaques
from stepmill.worker.messages import RequestKind, WorkerPlan

MAX_CAPSULES = 100  # of one pool: an env that fails for ever must not fill the disk
MAX_PART_BYTES = 262_144  # of a constructor, of options, of attributes; as JSON
_STDERR = 2


@dataclass(frozen=True)
class Call:
    """A call of one env: what it was given, and where it stood then (`CapsuleDesk.place_of`)."""

    kind: RequestKind
    payload: object
    place: object


class CapsuleDesk:
    """One pool's capsules. Used by the pool's thread."""

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self._plans = plans
        self._num_envs = sum(len(plan.env_ids) for plan in plans) - options.spare_envs
        self._backend = backend
        self._options = options
        self._folder = None if options.crash_dir is None else os.path.abspath(os.fspath(options.crash_dir))
        self._ledger: _native.Ledger | None = None
        self._spec: EnvSpec | None = None
        self._attributes: Callable[[int], Mapping[Any, object]] = _nothing_set
        self._num_written = 0
        self._told: dict[int, tuple[object, str]] = {}  # per env: the place of its last fault, and the capsule's path
        if self._folder is not None:
            make_folder(self._folder)

    @property
    def is_wanted(self) -> bool:
        """Whether there are to be capsules at all."""
        return self._folder is not None

    def attach(self, ledger: _native.Ledger, spec: EnvSpec, attributes: Callable[[int], Mapping[Any, object]]) -> None:
        """Take the pool state whose logs these are; `attributes(server)` returns what `set_attr` has set on an env object."""
        self._ledger, self._spec, self._attributes = ledger, spec, attributes

    def let_go(self) -> None:
        """Let go of all that is closed by now."""
        self._ledger = None
        self._attributes = _nothing_set

    def keep(
        self, error: StepmillError, env_id: int, kind: FaultKind | None, call: Call | None = None
    ) -> StepmillError:
        """Write a capsule of an env's fault, if there are to be any; return the error, which names its path."""
        if self._folder is None or kind is FaultKind.INTERRUPTED:
            return error
        if self._num_written >= MAX_CAPSULES:
            return _told(error, None, f"{MAX_CAPSULES} were written")
        name = f"stepmill-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-env{env_id}"
        try:
            place = self._place(error, env_id)
            if self._told.get(env_id, (None, ""))[0] == place:  # a replay that fails at the same place again
                return _told(error, self._told[env_id][1])
            os.makedirs(self._folder, exist_ok=True)  # somebody may have tidied up since the start
            path = write_capsule(self._capsule(error, env_id, kind, call), self._folder, name)
        except Exception as exc:
            return _told(error, None, f"{type(exc).__name__}: {exc}")
        self._num_written += 1
        self._told[env_id] = place, path
        return _told(error, path)

    def keep_death(self, error: StepmillError, worker: int, env_ids: Sequence[int]) -> StepmillError:
        """The same for a worker's end; `env_ids` were under way. The capsule is of the env that it was at."""
        if self._folder is None:
            return error
        running = self._ledger.running_env(worker) if self._ledger is not None else -1
        served = self._ledger.envs_of(worker) if self._ledger is not None else ()
        guess = next(iter((*env_ids, *served, *self._plans[worker].env_ids)))
        own = error.env_id if isinstance(error, (EnvError, EnvTimeout)) else None
        culprit = own if own is not None else running if running >= 0 else guess
        kind = None if isinstance(error, EnvError) else FaultKind.DIED if own is None else FaultKind.TIMED_OUT
        return self.keep(error, culprit, kind)

    def keep_call(self, error: StepmillError, env_id: int, call: Call) -> StepmillError:
        """The same for what an env raised when it was called."""
        return self.keep(error, env_id, FaultKind.RAISED, call)

    def place_of(self, env_id: int) -> object:
        """Return where an env stands, for a capsule of a call that is made now; None if there are to be none."""
        if self._folder is None or self._ledger is None or env_id >= self._num_envs:
            return None
        return self._ledger.log_place(self._server_of(env_id))[:2]

    def keep_start(self, error: StepmillError) -> StepmillError:
        """The same for a pool that did not come to be."""
        env_id = getattr(error, "env_id", None)
        if isinstance(error, UsageError) or (env_id is None and not isinstance(error, WorkerDied)):
            return error
        if isinstance(error, WorkerDied):
            return self.keep_death(error, error.worker, error.env_ids)
        return self.keep(error, int(env_id or 0), None)

    # ---- what goes in -------------------------------------------------------------------------------------------

    def _capsule(self, error: StepmillError, env_id: int, kind: FaultKind | None, call: Call | None) -> Capsule:
        server = self._server_of(env_id)
        plan = next(plan for plan in self._plans if server in plan.env_ids)
        notes: list[str] = []
        trace = self._read_trace(plan.worker, notes, kind)
        log = None if _is_of_start(error) else self._read_log(env_id)
        episode = self._episode(log, notes)
        if call is not None:
            is_settled = episode["command"] != "reset" and call.place == self.place_of(env_id)
            episode = {**episode, **_describe_call(call, notes, is_settled=is_settled)}
        if isinstance(error, WorkerDied) and not episode["command"]:
            notes.append(f"the worker died while its envs {list(plan.env_ids)} were idle: any of them may be the cause")
        return Capsule(
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            kind=_kind_of(error) if kind is None else kind.name.lower(),
            **_words_of(error),
            trace=trace,
            env_id=env_id,
            worker=plan.worker,
            worker_env_ids=list(plan.env_ids),
            constructor=_plain("the env_fn", plan.env_fns[plan.env_ids.index(server)], notes),
            **episode,
            attributes=self._plain_attributes(server, notes),
            versions=versions(),
            pool=self._describe_pool(),
            notes=notes,
        )

    def _place(self, error: StepmillError, env_id: int) -> object:
        log = self._read_log(env_id)
        if log is None or not log["is_whole"]:
            return object()  # no two of these are the same
        what = (error.error_type, error.phase) if isinstance(error, EnvError) else type(error)
        return what, log["seed"], log["episode"], log["begins"], log["actions"], log["action"]

    def _read_trace(self, worker: int, notes: list[str], kind: FaultKind | None) -> str:
        has_ended = kind in (FaultKind.DIED, FaultKind.TIMED_OUT)
        if not has_ended or not isinstance(self._backend, Traced):
            return ""
        text = self._backend.read_trace(worker)
        if not text:
            notes.append("the worker left no word of where it stood")
        elif kind is FaultKind.DIED:  # who watches stderr finds the stack of a crash there as ever
            os.write(_STDERR, text.encode())
        return text

    def _read_log(self, env_id: int) -> dict[str, Any] | None:
        if self._ledger is None or env_id >= self._num_envs:
            return None
        return self._ledger.episode_log(env_id)

    def _server_of(self, env_id: int) -> int:
        """Which object it is; before the pool runs, and of spares, the one of the same number."""
        return self._ledger.server_of(env_id) if self._ledger is not None and env_id < self._num_envs else env_id

    def _episode(self, log: dict[str, Any] | None, notes: list[str]) -> dict[str, Any]:
        if log is None or self._spec is None:
            facts = dict.fromkeys(("seed", "options", "command_seed", "command_options", "call"))
            return {**facts, "episode": 0, "is_whole": False, "command": "construct", "arrays": {}}
        command = ("reset" if log["begins"] else "step") if log["is_pending"] else ""
        blob = log["blob"] or (None, None, None)
        seed, options = (log["seed"] if blob[0] is None else blob[0]), _plain("the options of reset", blob[1], notes)
        arrays = _read_arrays(log, self._spec.action, self._spec.batch_size if self._spec.is_batched else None)
        is_whole = log["is_whole"] and sum(array.nbytes for array in arrays.values()) <= MAX_ARRAY_BYTES
        if not is_whole:
            arrays = {name: array[-1:] for name, array in arrays.items() if command == "step"}
            notes.extend(_why_not_whole(log, self._spec.action))
        elif seed is None:
            notes.append("the episode's seed is not known, seeding='continue' lets generators go on: use 'per_episode'")
        if self._ledger is not None and opaques(self._spec.observation):
            notes.append("parts of no fixed size are not in the observation hashes")
        is_explicit = log["is_explicit"]
        return {
            "episode": log["episode"],
            "seed": _plain("the seed", None if is_explicit else seed, notes),
            "options": None if is_explicit else options,
            "is_whole": is_whole,
            "command": command,
            "command_seed": _plain("the seed", seed if is_explicit else log["next_seed"], notes),
            "command_options": options if is_explicit else None,
            "call": None,
            "arrays": arrays,
        }

    def _plain_attributes(self, env_id: int, notes: list[str]) -> dict[str, object]:
        given = self._attributes(env_id)
        notes.extend(
            f"what set_attr() has set by the function {_name_of(name)} is not in the capsule"
            for name in given
            if callable(name)
        )
        values = {name: value for name, value in given.items() if isinstance(name, str)}
        plain = {name: _plain(f"the attribute {name}", value, notes) for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None or values[name] is None}

    def _describe_pool(self) -> dict[str, object]:
        options = self._options
        backend = options.backend.value if isinstance(options.backend, BackendName) else type(options.backend).__name__
        return {
            "backend": backend,
            "num_envs": sum(len(plan.env_ids) for plan in self._plans),
            "num_workers": len(self._plans),
            "context": options.context.value,
            "is_batched": self._spec is not None and self._spec.is_batched,
            "autoreset_mode": options.autoreset_mode.value,
            "seeding": options.seeding.value,
            "on_fault": options.on_fault.value,
            "step_timeout_s": options.step_timeout_s,
            "reset_timeout_s": options.reset_timeout_s,
        }


def _nothing_set(_: int) -> Mapping[str, object]:
    """Stands for a pool whose user has set nothing on its envs."""
    return {}


def make_folder(folder: str) -> None:
    """Make the folder for capsules, before the first fault needs it.

    Raises:
        UsageError: it cannot be made, or not be written to.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written to")
    except OSError as exc:
        raise UsageError(f"crash_dir={folder!r} cannot be used: {exc}; give a folder that can be written to") from exc


def versions() -> dict[str, str]:
    """Return what all this runs on."""
    found = {"python": platform.python_version(), "stepmill": __version__, "numpy": np.__version__}
    if "gymnasium" in sys.modules:
        found["gymnasium"] = metadata.version("gymnasium")
    return {**found, "os": platform.platform()}


def _told(error: StepmillError, path: str | None, why_not: str = "") -> StepmillError:
    text = f"no crash capsule could be written: {why_not}" if path is None else f"crash capsule: {path}"
    error.message = f"{error.message}; {text}"
    error.args = (error.message,)
    error.capsule = path
    return error


def _describe_call(call: Call, notes: list[str], *, is_settled: bool) -> dict[str, object]:
    told = {"kind": call.kind.name.lower(), "payload": _plain("the call", call.payload, notes)}
    facts: dict[str, object] = {"command": "call", "call": told}
    if is_settled:
        return facts
    notes.append("the env went on after that call, before its result was asked for: the episode is not in here")
    return {**facts, "is_whole": False, "arrays": {}}


def _name_of(function: Callable[..., object]) -> str:
    """Of a partial the name of its function; whatever else can be called may have none."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(function).__name__))


def _is_of_start(error: StepmillError) -> bool:
    """Whether it is of an env that was being built, so that no episode led to it."""
    return isinstance(error, (EnvError, EnvTimeout)) and error.phase in ("construct", "restore")


def _kind_of(error: StepmillError) -> str:
    return "timed_out" if isinstance(error, EnvTimeout) else "died" if isinstance(error, WorkerDied) else "raised"


def _words_of(error: StepmillError) -> dict[str, Any]:
    return {
        "phase": error.phase if isinstance(error, (EnvError, BadOutput, EnvTimeout)) else "",
        "error_type": error.error_type if isinstance(error, EnvError) else f"stepmill.{type(error).__name__}",
        "message": error.message,
        "traceback": error.remote_traceback if isinstance(error, EnvError) else "",
        "exit_code": error.exit_code if isinstance(error, WorkerDied) else None,
        "signal_name": error.signal_name if isinstance(error, WorkerDied) else None,
    }


def _plain(what: str, value: object, notes: list[str]) -> Any:
    try:
        plain = to_plain(value)
        size = len(json.dumps(plain))
        if size > MAX_PART_BYTES:
            raise NotPlain(f"it would take {size} bytes")
    except Exception as exc:  # whatever a stranger's object does when it is looked at
        notes.append(f"{what} cannot be told: {exc}")
        return None
    return plain


def _why_not_whole(log: Mapping[str, Any], action: Node) -> list[str]:
    if log["is_explicit"]:
        return []  # nothing of what was before that reset is needed
    if opaques(action):
        return ["the actions are not in here: those of no fixed size (Text, Sequence, Graph ...) are not logged"]
    return [
        "the episode is not in here: its log grew over replay_log_bytes, it was cut short, or its seed has over 64 bits"
    ]


def _read_arrays(log: Mapping[str, Any], action: Node, batch_size: int | None) -> dict[str, NDArray[Any]]:
    """Return the log as arrays; the last row of actions is that of the step under way, or of the last step."""
    is_step = log["is_pending"] and not log["begins"]
    rows = (log["actions"] + log["action"]) if is_step or not log["is_whole"] else log["actions"]
    arrays: dict[str, NDArray[Any]] = {
        "rewards": np.array(log["rewards"], np.float64),
        "flags": np.array(log["flags"], np.uint8),
        "hashes": np.array(log["hashes"], np.uint16),
    }
    table = np.frombuffer(rows, np.uint8).reshape(-1, max(len(log["action"]), 1))
    at = 0
    for index, (_, leaf) in enumerate(leaves(action)):
        shape = leaf.shape if batch_size is None else (batch_size, *leaf.shape)
        size = leaf.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        column = np.ascontiguousarray(table[:, at : at + size])
        arrays[f"action.{index}"] = column.view(leaf.dtype).reshape(len(column), *shape)
        at += size
    return arrays
