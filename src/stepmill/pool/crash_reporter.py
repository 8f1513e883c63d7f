"""Writes crash capsules, with the facts about a fault from the pool state, the trace of the worker and the options.

An error in this code never ends a run. The notes of a capsule list what could not be stored. If a capsule could not be
written, the text of the fault's error says why.
"""

from __future__ import annotations

import io
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill._pickling import Pickler
from stepmill._version import __version__
from stepmill.backends.base import Backend, traits_of
from stepmill.pool.capsule import RESULTS, Capsule, write_capsule
from stepmill.pool.events import FaultKind
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied, add_clause
from stepmill.spec.options import PoolOptions, context_of, name_of_backend
from stepmill.spec.tree import Node, leaves
from stepmill.worker.messages import RequestKind, load

MAX_CAPSULES = 100  # per pool, so that an env that always fails does not fill the disk
MAX_ARRAY_BYTES = 64 << 20  # for all arrays of a capsule together
MAX_ACTION_BYTES = 16 << 20  # for the actions' parts without a fixed size
MAX_PART_BYTES = 262_144  # for an env_fn, options or an attribute
MAX_TEXT = 200  # characters of the text that describes a pickled part
_STDERR = 2
_NOT_WHOLE = (
    "the episode is not in this capsule: its actions cannot be stored, its log grew over restarts.replay_log_bytes, it was cut short, "
    "or its seed has over 64 bits"
)


@dataclass(frozen=True)
class PositionedCall:
    """A call of one env, with the position of the env when the call was made (see `CrashReporter.position_of`)."""

    kind: RequestKind
    payload: object
    position: object


class _Parts:
    """The parts of a capsule, and notes of those that cannot be stored."""

    def __init__(self) -> None:
        self.encoded: dict[str, bytes] = {}
        self.pickled: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, name: str, value: object, limit_bytes: int = MAX_PART_BYTES) -> bool:
        """Encode a part. Return whether it can be stored; else there is a note."""
        pickles: list[io.BytesIO] = []

        def check_size(num_bytes: int) -> None:
            if num_bytes > limit_bytes:
                raise ValueError(f"it would take {num_bytes} bytes or more, and the limit is {limit_bytes}")

        def write(chunk: bytes) -> None:
            check_size(pickles[-1].tell() + len(chunk))  # a large object is not pickled to its end
            pickles[-1].write(chunk)

        def pickle(part: object) -> bytes:
            pickles.append(io.BytesIO())
            Pickler(SimpleNamespace(write=write)).dump(part)
            return pickles[-1].getvalue()

        try:
            data = _native.encode(value, pickle)
            check_size(len(data))
            if pickles:
                self.pickled[name] = repr(value)[:MAX_TEXT]
        except Exception as exc:  # the object is the user's, and may raise anything
            self.notes.append(f"the {name} cannot be stored: {exc}")
            return False
        self.encoded[name] = data
        return True

    def remove(self, name: str) -> None:
        """Remove a part, if it was added."""
        self.encoded.pop(name, None)
        self.pickled.pop(name, None)


class CrashReporter:
    """Writes the capsules of one pool. Only the pool's thread uses it."""

    def __init__(self, workers: WorkerSupervisor, backend: Backend, options: PoolOptions) -> None:
        self._workers = workers
        self._plans = plans = [record.plan for record in workers.records]
        self._num_envs = sum(len(plan.env_ids) for plan in plans) - options.resets.spare_envs
        self._backend = backend
        self._options = options
        self._folder = None if options.crash_dir is None else os.path.abspath(os.fspath(options.crash_dir))
        self.spec: EnvSpec | None = None  # of the envs; None before the pool runs
        self._num_written = 0
        self._last_reports: dict[int, tuple[object, str]] = {}  # per env: key of its last fault, path of the capsule
        if self._folder is not None:
            make_folder(self._folder)

    @property
    def is_wanted(self) -> bool:
        """Whether capsules are written."""
        return self._folder is not None

    @property
    def _state(self) -> _native.PoolState | None:
        """The pool state, which has the logs; None before the pool runs, and after its end."""
        return self._workers.state if self._workers.is_attached else None

    def report_fault(
        self, error: StepmillError, env_id: int, kind: FaultKind | None, call: PositionedCall | None = None
    ) -> StepmillError:
        """Write a capsule of the fault of an env, if capsules are wanted. Return the error; its text names the path."""
        if self._folder is None or kind is FaultKind.INTERRUPTED:
            return error
        if self._num_written >= MAX_CAPSULES:
            return _add_capsule(error, None, f"{MAX_CAPSULES} were written")
        name = f"stepmill-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-env{env_id}"
        try:
            key = self._fault_key(error, env_id)
            if self._last_reports.get(env_id, (None, ""))[0] == key:  # a replay has failed in the same step again
                return _add_capsule(error, self._last_reports[env_id][1])
            os.makedirs(self._folder, exist_ok=True)  # it may have been deleted since the start
            path = write_capsule(self._capsule(error, env_id, kind, call), self._folder, name)
        except Exception as exc:
            return _add_capsule(error, None, f"{type(exc).__name__}: {exc}")
        self._num_written += 1
        self._last_reports[env_id] = key, path
        return _add_capsule(error, path)

    def report_death(self, error: StepmillError, worker: int, suspects: Sequence[int]) -> StepmillError:
        """Write a capsule of the death of a worker. `suspects` are envs that may have caused it, the likeliest first."""
        if self._folder is None:
            return error
        own = error.env_id if isinstance(error, (EnvError, EnvTimeout)) else None
        env_id = own if own is not None else next(iter((*suspects, *self._plans[worker].env_ids)))
        kind = None if isinstance(error, EnvError) else FaultKind.DIED if own is None else FaultKind.TIMED_OUT
        return self.report_fault(error, env_id, kind)

    def position_of(self, env_id: int) -> object:
        """Return the position of an env, for the capsule of a call that is made now. None if no capsules are wanted."""
        if self._folder is None or self._state is None or env_id >= self._num_envs:
            return None
        view = self._workers.view_of(env_id)
        return view.episode, view.length

    def report_start_failure(self, error: StepmillError) -> StepmillError:
        """Write a capsule of a failed start of a pool or worker."""
        env_id = getattr(error, "env_id", None)
        if isinstance(error, UsageError) or (env_id is None and not isinstance(error, WorkerDied)):
            return error
        if isinstance(error, WorkerDied):
            return self.report_death(error, error.worker, error.env_ids)
        return self.report_fault(error, int(env_id or 0), None)

    # ---- contents -----------------------------------------------------------------------------------------------

    def _capsule(
        self, error: StepmillError, env_id: int, kind: FaultKind | None, call: PositionedCall | None
    ) -> Capsule:
        # For spares, and before the pool runs, the server has the same number.
        is_served = self._state is not None and env_id < self._num_envs
        server = self._workers.view_of(env_id).server if is_served else env_id
        plan = next(plan for plan in self._plans if server in plan.env_ids)
        parts = _Parts()
        notes = parts.notes
        trace = self._read_trace(plan.worker, notes, kind)
        log = None if _is_of_start(error) else self._read_log(env_id)
        parts.add("env_fn", plan.env_fns[plan.env_ids.index(server)])
        episode = self._episode(log, self._workers.settings_of(server).reset_options_of(server), parts)
        if call is not None:
            is_current = episode["command"] != "reset" and call.position == self.position_of(env_id)
            episode = {**episode, **_describe_call(call, parts, is_current=is_current)}
        if isinstance(error, WorkerDied) and not episode["command"]:
            notes.append(f"the worker died while its envs {list(plan.env_ids)} were idle: any of them may be the cause")
        self._add_attributes(server, parts)
        return Capsule(
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            kind=_kind_of(error) if kind is None or isinstance(error, EnvTimeout) else kind.name.lower(),
            **_error_fields(error),
            trace=trace,
            env_id=env_id,
            worker=plan.worker,
            worker_env_ids=list(plan.env_ids),
            **episode,
            versions=versions(),
            pool=self._describe_pool(),
            notes=notes,
            pickled=parts.pickled,
            parts=parts.encoded,
        )

    def _fault_key(self, error: StepmillError, env_id: int) -> object:
        log = self._read_log(env_id)
        if log is None or not log["is_whole"]:
            return object()  # this key differs from all others
        what = (error.error_type, error.phase) if isinstance(error, EnvError) else type(error)
        return (
            what,
            log["seed"],
            log["episode"],
            log["begins"],
            log["actions"],
            log["action"],
            log["blobs"],
            log["newest_blob"],
        )

    def _read_trace(self, worker: int, notes: list[str], kind: FaultKind | None) -> str:
        has_ended = kind in (FaultKind.DIED, FaultKind.TIMED_OUT)
        traces = traits_of(self._backend).traces
        if not has_ended or traces is None:
            return ""
        text = traces.read_trace(worker)
        if not text:
            notes.append("the worker left no traceback")
        elif kind is FaultKind.DIED:  # a crash prints its stack to stderr, as it does without capsules
            os.write(_STDERR, text.encode())
        return text

    def _read_log(self, env_id: int) -> dict[str, Any] | None:
        if self._state is None or env_id >= self._num_envs:
            return None
        return self._state.episode_log(env_id)

    def _episode(self, log: dict[str, Any] | None, stored_options: Any, parts: _Parts) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "episode": 0,
            "seed": None,
            "is_whole": False,
            "command": "construct",
            "command_seed": None,
        }
        facts |= {"call": "", "num_actions": 0, "arrays": {}}
        if log is None or self.spec is None:
            return facts
        command = ("reset" if log["begins"] else "step") if log["is_pending"] else ""
        blob: Any = _native.decode(log["blob"], load) if log["blob"] else (None, None, None)
        seed = log["seed"] if blob[0] is None else blob[0]
        options = stored_options if blob[1] is None else blob[1]
        is_explicit = log["is_explicit"]
        if not is_explicit:
            parts.add("options", options)
        parts.add("command_options", options if is_explicit else stored_options)
        arrays = _read_arrays(log, self.spec.action, self.spec.batch_size if self.spec.is_batched else None)
        opaque_actions = _read_opaques(log)
        has_actions = not opaque_actions or parts.add("actions", opaque_actions, MAX_ACTION_BYTES)
        is_whole = log["is_whole"] and has_actions and sum(array.nbytes for array in arrays.values()) <= MAX_ARRAY_BYTES
        if not is_whole:
            arrays = {name: array[-1:] for name, array in arrays.items() if command == "step"}
            opaque_actions = []
            parts.remove("actions")
            parts.notes.extend(() if is_explicit else [_NOT_WHOLE])
        elif seed is None:
            parts.notes.append(
                "the episode's seed is not known, because seeding='continue' does not seed each episode: use seeding='per_episode'"
            )
        columns = [array for name, array in arrays.items() if name not in RESULTS]
        return {
            **facts,
            "episode": log["episode"],
            "seed": None if is_explicit else seed,
            "is_whole": is_whole,
            "command": command,
            "command_seed": seed if is_explicit else log["next_seed"],
            "num_actions": len(columns[0]) if columns else len(opaque_actions),
            "arrays": arrays,
        }

    def _add_attributes(self, env_id: int, parts: _Parts) -> None:
        for name, value in self._workers.settings_of(env_id).attributes_of(env_id).items():
            if isinstance(name, str):
                parts.add(f"attribute {name}", value)
            else:
                parts.notes.append(f"a setting of set_attr() with the function {_name_of(name)} is not in the capsule")

    def _describe_pool(self) -> dict[str, object]:
        options = self._options
        return {
            "backend": name_of_backend(options.backend),
            "num_envs": sum(len(plan.env_ids) for plan in self._plans),
            "num_workers": len(self._plans),
            "context": context_of(options).value,
            "is_batched": self.spec is not None and self.spec.is_batched,
            "autoreset_mode": options.autoreset_mode.value,
            "seeding": options.seeding.value,
            "on_fault": options.on_fault.value,
            "step_timeout_s": options.step_timeout_s,
            "reset_timeout_s": options.reset_timeout_s,
        }


def make_folder(folder: str) -> None:
    """Make the folder for capsules when the pool starts, so that errors are found before the first fault.

    Raises:
        UsageError: the folder cannot be made, or is not writable.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written to")
    except OSError as exc:
        raise UsageError(f"crash_dir={folder!r} cannot be used: {exc}; give a folder that can be written to") from exc


def versions() -> dict[str, str]:
    """Return the versions of Python, of packages and of the operating system, by name."""
    found = {"python": platform.python_version(), "stepmill": __version__, "numpy": np.__version__}
    if "gymnasium" in sys.modules:
        from importlib import metadata  # imported here, because the import takes long

        found["gymnasium"] = metadata.version("gymnasium")
    return {**found, "os": platform.platform()}


def _add_capsule(error: StepmillError, path: str | None, why_not: str = "") -> StepmillError:
    text = f"no crash capsule could be written: {why_not}" if path is None else f"crash capsule: {path}"
    error.capsule = path
    return add_clause(error, text)


def _describe_call(call: PositionedCall, parts: _Parts, *, is_current: bool) -> dict[str, object]:
    parts.add("call", call.payload)
    facts: dict[str, object] = {"command": "call", "call": call.kind.name.lower()}
    if is_current:
        return facts
    parts.remove("actions")
    parts.notes.append(
        "the env was stepped between the call and the request for its result: the episode is not in this capsule"
    )
    return {**facts, "is_whole": False, "num_actions": 0, "arrays": {}}


def _name_of(function: Callable[..., object]) -> str:
    """Return the name of a callable, or of the function of a partial."""
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(function).__name__))


def _is_of_start(error: StepmillError) -> bool:
    """Return whether the error was raised while an env was built, before any episode."""
    return isinstance(error, (EnvError, EnvTimeout)) and error.phase in ("construct", "restore")


def _kind_of(error: StepmillError) -> str:
    return "timed_out" if isinstance(error, EnvTimeout) else "died" if isinstance(error, WorkerDied) else "raised"


def _error_fields(error: StepmillError) -> dict[str, Any]:
    return {
        "phase": error.phase if isinstance(error, (EnvError, BadOutput, EnvTimeout)) else "",
        "error_type": error.error_type if isinstance(error, EnvError) else f"stepmill.{type(error).__name__}",
        "message": error.message,
        "traceback": error.remote_traceback if isinstance(error, (EnvError, EnvTimeout)) else "",
        "exit_code": error.exit_code if isinstance(error, WorkerDied) else None,
        "signal_name": error.signal_name if isinstance(error, WorkerDied) else None,
    }


def _read_opaques(log: Mapping[str, Any]) -> list[object]:
    """Return the parts without a fixed size of each action, as one list per step, including the pending step."""
    is_step = log["is_pending"] and not log["begins"] and log["newest_blob"]
    blobs = log["blobs"] + [log["newest_blob"]] * bool(is_step)
    decoded: list[Any] = [_native.decode(blob, load) for blob in blobs]
    return [parts for _, _, parts in decoded]


def _read_arrays(log: Mapping[str, Any], action: Node, batch_size: int | None) -> dict[str, NDArray[Any]]:
    """Return the log as arrays. The last row of the actions belongs to the pending step, or else to the last step."""
    is_step = log["is_pending"] and not log["begins"]
    rows = (log["actions"] + log["action"]) if is_step or not log["is_whole"] else log["actions"]
    arrays: dict[str, NDArray[Any]] = {name: np.array(log[name], dtype) for name, dtype in RESULTS.items()}
    table = np.frombuffer(rows, np.uint8).reshape(-1, max(len(log["action"]), 1))
    at = 0
    for index, (_, leaf) in enumerate(leaves(action)):
        shape = leaf.shape if batch_size is None else (batch_size, *leaf.shape)
        size = leaf.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        column = np.ascontiguousarray(table[:, at : at + size])
        arrays[f"action.{index}"] = column.view(leaf.dtype).reshape(len(column), *shape)
        at += size
    return arrays
