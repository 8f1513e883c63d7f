"""Crash capsules: files that describe a fault and allow its episode to be replayed.

A capsule is a container of `stepmill.spec.container`. Its header has the facts about the fault, as JSON. Its payload, in the
native codec, has what a replay needs:

    arrays   rewards   [T+1] float64   of the reset (index 0) and of T steps
             flags     [T+1] uint8     1 terminated, 2 truncated
             hashes    [T+1] uint16    of the observations
             action.K  [U, ...]        leaf K of the actions: of the T steps, and of the step that failed, if it was one
    parts    the other values by name, each encoded by itself, so that a replay loads those that it needs

What the codec cannot hold is pickled in a part. Loading a pickle can run any code, so only a trusted capsule does it.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.spec import container
from stepmill.spec.container import refuse_pickle
from stepmill.spec.errors import UsageError
from stepmill.worker.messages import load

_KIND = "crash capsule"
MAX_FILE_BYTES = 128 << 20  # of a file that is read; those that are written are far smaller


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """A fault and the episode that led to it.

    Attributes:
        made: the time of the fault, in UTC.
        kind: the kind of fault: "raised", "bad_output", "bad_action", "died", "timed_out" or "neighbour".
        phase: what the env was doing: "construct", "reset", "step", ...; empty if it was doing nothing.
        error_type, message, traceback: those of the env's exception, or of stepmill's error if the env did not raise
            one.
        exit_code, signal_name: how the worker process ended; None if it did not end.
        trace: the stack of the worker when it crashed or hung, as faulthandler writes it.
        env_id, worker, worker_env_ids: the env, its worker, and all envs of that worker.
        episode, seed: those of the logged episode. A seed of None means that the env's random generator continued.
        is_whole: whether the arrays have the episode from its reset on.
        command: the command that failed: "step" (the last of the actions), "reset", "call", "construct", or "" for none.
        call: the kind of a call that failed: "call", "render", "set_attr" ...; else empty.
        command_seed: of the reset that failed, or of the reset after the step under SAME_STEP.
        num_actions: one action per step in the log, and one for the step that failed, if a step failed.
        pickled: the names of the parts that have pickles, each with a description of its value.
        versions, pool: the versions of libraries, and the options of the pool.
        notes: what the capsule lacks, and why.
        arrays: see above.
        parts: "env_fn"; "options" of the episode, and "command_options" of the reset to which `command_seed` belongs; "call", its
            payload; "actions", for each action its parts without a fixed size; "attribute NAME" for each attribute that
            was set with `set_attr`.
        is_trusted: whether pickles may be loaded.
    """

    made: str
    kind: str
    phase: str
    error_type: str
    message: str
    traceback: str
    exit_code: int | None
    signal_name: str | None
    trace: str
    env_id: int
    worker: int
    worker_env_ids: list[int]
    episode: int
    seed: int | list[int | None] | None
    is_whole: bool
    command: str
    call: str
    command_seed: int | list[int | None] | None
    num_actions: int
    pickled: dict[str, str]
    versions: dict[str, str]
    pool: dict[str, object]
    notes: list[str]
    arrays: Mapping[str, NDArray[Any]] = field(repr=False)
    parts: Mapping[str, bytes] = field(repr=False)
    is_trusted: bool = False

    @property
    def num_steps(self) -> int:
        """The number of steps in the log, without the one that failed."""
        return max(len(self.arrays["rewards"]) - 1, 0) if "rewards" in self.arrays else 0

    def action(self, step: int) -> list[NDArray[Any]]:
        """Return the leaves of one step's action, in the dtypes and shapes of the slab."""
        num_leaves = sum(name.startswith("action.") for name in self.arrays)
        return [self.arrays[f"action.{leaf}"][step] for leaf in range(num_leaves)]

    def load(self, name: str) -> Any:
        """Return the value of a part; None if the capsule does not have it.

        Raises:
            UsageError: the part cannot be loaded here, or has a pickle, and the capsule is not trusted.
        """
        if (data := self.parts.get(name)) is None:
            return None
        python = self.versions.get("python", "")
        if b"cloudpickle" in data and not python.startswith("{}.{}.".format(*sys.version_info)):
            raise UsageError(
                f"the {name} in this capsule has functions of Python {python}; replay it with that version"
            )
        try:
            return _native.decode(data, load if self.is_trusted else refuse_pickle)
        except UsageError:
            raise
        except Exception as exc:
            raise UsageError(
                f"cannot load the {name} in this capsule here ({type(exc).__name__}: {exc}); check that its module is on the path"
            ) from exc


def _json_types(annotation: Any) -> tuple[type, ...]:
    """Return the types that a field's value may have in JSON."""
    alternatives = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return tuple(get_origin(each) or each for each in alternatives)


_ALLOWED_VALUES = {
    "kind": ("raised", "bad_output", "bad_action", "died", "timed_out", "neighbour"),
    "command": ("step", "reset", "call", "construct", ""),
}
_NOT_FACTS = ("arrays", "parts", "is_trusted")
_FACTS = {name: _json_types(each) for name, each in get_type_hints(Capsule).items() if name not in _NOT_FACTS}
RESULTS = {"rewards": np.float64, "flags": np.uint8, "hashes": np.uint16}


def write_capsule(capsule: Capsule, folder: str, name: str) -> str:
    """Write a capsule under a unique name, as a whole or not at all, and return its path.

    Raises:
        OSError: the capsule could not be written.
    """
    facts = {name: getattr(capsule, name) for name in _FACTS}
    path = os.path.join(folder, f"{name}-{secrets.token_hex(3)}.capsule")
    payload = _native.encode({"arrays": capsule.arrays, "parts": capsule.parts}, None)
    container.write(path, _KIND, {"facts": facts}, payload)
    return path


def read_capsule(path: str, *, trust: bool = False) -> Capsule:
    """Read a capsule. This runs no code from it; with `trust`, loading its parts later may.

    Raises:
        UsageError: there is no such file, or it is not a valid capsule.
    """
    if path.endswith(".npz"):
        raise UsageError(f"{path} is a crash capsule of an older format; replay it with the version that wrote it")
    header, payload = container.read(path, _KIND, MAX_FILE_BYTES)
    try:
        data: Any = _native.decode(payload, refuse_pickle)
        capsule = Capsule(**header["facts"], arrays=data["arrays"], parts=data["parts"], is_trusted=trust)
        _check(capsule)
    except Exception as exc:  # any, because the file may have been forged
        reason = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise UsageError(f"{path} is not a valid crash capsule: {reason}; give another file") from exc
    return capsule


def _check(capsule: Capsule) -> None:
    for name, types in _FACTS.items():
        if type(getattr(capsule, name)) not in types:
            raise TypeError(f"{name} is a {type(getattr(capsule, name)).__name__}")
    for name, known in _ALLOWED_VALUES.items():
        if getattr(capsule, name) not in known:
            raise ValueError(f"{name} is {getattr(capsule, name)!r:.40}")
    if any(type(part) is not bytes for part in capsule.parts.values()):
        raise TypeError("its parts are not bytes")
    results = {name: array for name, array in capsule.arrays.items() if name in RESULTS}
    actions = {name: array for name, array in capsule.arrays.items() if name not in RESULTS}
    are_typed = all(array.ndim == 1 and array.dtype == RESULTS[name] for name, array in results.items())
    if not are_typed or set(actions) != {f"action.{leaf}" for leaf in range(len(actions))}:
        raise ValueError("its arrays have the wrong names or types")
    num_results = {len(results[name]) if name in results else 0 for name in RESULTS}
    if len(num_results) > 1 or any(len(array) != capsule.num_actions for array in actions.values()):
        raise ValueError("its arrays have different lengths")
    if capsule.num_actions and capsule.num_actions < capsule.num_steps + (capsule.command == "step"):
        raise ValueError("it has fewer actions than steps")
