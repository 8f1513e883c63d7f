"""Writes crash capsules, with the facts about a fault from the pool state, the trace of the worker and the options.

An error in this code never ends a run. The notes of a capsule list what could not be stored. If a capsule could not be
written, the text of the fault's error says why.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill._version import __version__
from stepmill.backends.base import Backend, traits_of
from stepmill.pool.events import FaultKind
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.capsule import MAX_ARRAY_BYTES, MAX_OPAQUE_BYTES, Capsule, write_capsule
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied, add_clause
from stepmill.spec.json_values import NotPlain, to_plain
from stepmill.spec.options import PoolOptions, name_of_backend
from stepmill.spec.tree import Node, leaves
from stepmill.worker.messages import RequestKind, load

MAX_CAPSULES = 100  # per pool, so that an env that always fails does not fill the disk
MAX_PART_BYTES = 262_144  # for a constructor, options or attributes, as JSON
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
        return self._workers.attached_state

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
        server = self._server_of(env_id)
        plan = next(plan for plan in self._plans if server in plan.env_ids)
        notes: list[str] = []
        trace = self._read_trace(plan.worker, notes, kind)
        log = None if _is_of_start(error) else self._read_log(env_id)
        episode = self._episode(log, self._workers.settings_of(server).reset_options_of(server), notes)
        if call is not None:
            is_current = episode["command"] != "reset" and call.position == self.position_of(env_id)
            episode = {**episode, **_describe_call(call, notes, is_current=is_current)}
        if isinstance(error, WorkerDied) and not episode["command"]:
            notes.append(f"the worker died while its envs {list(plan.env_ids)} were idle: any of them may be the cause")
        return Capsule(
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            kind=_kind_of(error) if kind is None or isinstance(error, EnvTimeout) else kind.name.lower(),
            **_error_fields(error),
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

    def _server_of(self, env_id: int) -> int:
        """Return the server of an env. For spares, and before the pool runs, this is the server with the same number."""
        return self._workers.view_of(env_id).server if self._state is not None and env_id < self._num_envs else env_id

    def _episode(self, log: dict[str, Any] | None, stored_options: Any, notes: list[str]) -> dict[str, Any]:
        if log is None or self.spec is None:
            facts: dict[str, Any] = dict.fromkeys(("seed", "options", "command_seed", "command_options", "call"))
            facts |= {"is_whole": False, "command": "construct", "arrays": {}, "opaque_actions": []}
            return {**facts, "episode": 0}
        command = ("reset" if log["begins"] else "step") if log["is_pending"] else ""
        blob: Any = _native.decode(log["blob"], load) if log["blob"] else (None, None, None)
        seed = log["seed"] if blob[0] is None else blob[0]
        options = _plain("the options of reset", stored_options if blob[1] is None else blob[1], notes)
        is_explicit = log["is_explicit"]
        is_other = not is_explicit and blob[1] is not None  # the next reset gets other options
        next_options = _plain("the stored options of reset", stored_options, notes) if is_other else options
        arrays = _read_arrays(log, self.spec.action, self.spec.batch_size if self.spec.is_batched else None)
        opaque_actions = _plain("the actions", _read_opaques(log), notes, MAX_OPAQUE_BYTES)
        has_actions = opaque_actions is not None and sum(array.nbytes for array in arrays.values()) <= MAX_ARRAY_BYTES
        is_whole = log["is_whole"] and has_actions
        if not is_whole:
            arrays = {name: array[-1:] for name, array in arrays.items() if command == "step"}
            opaque_actions = []
            notes.extend(() if is_explicit else [_NOT_WHOLE])
        elif seed is None:
            notes.append(
                "the episode's seed is not known, because seeding='continue' does not seed each episode: use seeding='per_episode'"
            )
        return {
            "episode": log["episode"],
            "seed": _plain("the seed", None if is_explicit else seed, notes),
            "options": None if is_explicit else options,
            "is_whole": is_whole,
            "command": command,
            "command_seed": _plain("the seed", seed if is_explicit else log["next_seed"], notes),
            "command_options": next_options,
            "call": None,
            "arrays": arrays,
            "opaque_actions": opaque_actions,
        }

    def _plain_attributes(self, env_id: int, notes: list[str]) -> dict[str, object]:
        given = self._workers.settings_of(env_id).attributes_of(env_id)
        notes.extend(
            f"a setting that set_attr() made with the function {_name_of(name)} is not in the capsule"
            for name in given
            if callable(name)
        )
        values = {name: value for name, value in given.items() if isinstance(name, str)}
        plain = {name: _plain(f"the attribute {name}", value, notes) for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None or values[name] is None}

    def _describe_pool(self) -> dict[str, object]:
        options = self._options
        return {
            "backend": name_of_backend(options.backend),
            "num_envs": sum(len(plan.env_ids) for plan in self._plans),
            "num_workers": len(self._plans),
            "context": options.context.value,
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


def _describe_call(call: PositionedCall, notes: list[str], *, is_current: bool) -> dict[str, object]:
    facts_of_call = {"kind": call.kind.name.lower(), "payload": _plain("the call", call.payload, notes)}
    facts: dict[str, object] = {"command": "call", "call": facts_of_call}
    if is_current:
        return facts
    notes.append(
        "the env was stepped between the call and the request for its result: the episode is not in this capsule"
    )
    return {**facts, "is_whole": False, "arrays": {}, "opaque_actions": []}


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


def _plain(what: str, value: object, notes: list[str], limit_bytes: int = MAX_PART_BYTES) -> Any:
    try:
        plain = to_plain(value)
        size = len(json.dumps(plain))
        if size > limit_bytes:
            raise NotPlain(f"it would take {size} bytes, and the limit is {limit_bytes}")
    except Exception as exc:  # the object is the user's, and may raise anything
        notes.append(f"{what} cannot be stored: {exc}")
        return None
    return plain


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
