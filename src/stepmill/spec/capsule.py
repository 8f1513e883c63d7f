"""Crash capsules: what is known of a fault, in a file from which the episode can be played again.

    NAME.npz   a zip archive: capsule.json, and NumPy arrays, which `numpy.load` reads
               rewards  [T+1] float64   of the reset (index 0) and of T steps
               flags    [T+1] uint8     1 terminated, 2 truncated
               hashes   [T+1] uint16    of the observations
               action.K [U, ...]        leaf K of the actions: of the T steps, and of the step that failed, if it was one

No pickle: reading a capsule runs no code. What a capsule may hold is bounded, and so is what is read of one.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import UsageError

FORMAT = "stepmill crash capsule 2"
FACTS_NAME = "capsule.json"
MAX_FACTS_BYTES = 4 << 20
MAX_ARRAY_BYTES = 64 << 20  # of all arrays
MAX_MEMBERS = 256


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """A fault and the episode that led to it. Every field but `arrays` is JSON.

    Attributes:
        made: when, in UTC.
        kind: of fault: "raised", "bad_output", "bad_action", "died", "timed_out".
        phase: what the env was doing: "construct", "reset", "step", ...; empty if it did nothing.
        error_type, message, traceback: of the exception, or of stepmill's error if there was none in an env.
        exit_code, signal_name: how the worker's process ended, if it did.
        trace: where the worker stood when it crashed or hung, in faulthandler's words.
        env_id, worker, worker_env_ids: the env, its worker, and the envs that it shared the worker with.
        constructor: the env_fn in the form of `to_plain`; None if it has none.
        episode, seed, options: of the logged episode. A seed of None: the env's own generator went on.
        is_whole: whether the arrays have the episode from its reset on.
        command: what failed: "step" (the last of the actions), "reset", "call", "construct", or "" for none.
        call: of that call, its kind ("call", "render", "set_attr" ...) and payload in the form of `to_plain`; else None.
        command_seed, command_options: of that reset, or of the reset that follows the step under SAME_STEP.
        attributes: what `set_attr` had set on the env.
        versions, pool: what it all ran on.
        notes: what is missing, and why.
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
    constructor: object
    episode: int
    seed: object
    options: object
    is_whole: bool
    command: str
    command_seed: object
    command_options: object
    call: object
    attributes: dict[str, object]
    versions: dict[str, str]
    pool: dict[str, object]
    notes: list[str]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict, repr=False)

    @property
    def num_steps(self) -> int:
        """How many steps the log has, without the one that failed."""
        return max(len(self.arrays["rewards"]) - 1, 0) if "rewards" in self.arrays else 0

    def action(self, step: int) -> list[NDArray[Any]]:
        """Return the leaves of one step's action, each as the slab had it."""
        names = sorted((name for name in self.arrays if name.startswith("action.")), key=lambda name: int(name[7:]))
        return [self.arrays[name][step] for name in names]


# The type that JSON must have for each field; what is not here may be anything.
_TYPES: dict[str, tuple[type, ...]] = {
    "made": (str,),
    "kind": (str,),
    "phase": (str,),
    "error_type": (str,),
    "message": (str,),
    "traceback": (str,),
    "exit_code": (int, type(None)),
    "signal_name": (str, type(None)),
    "trace": (str,),
    "env_id": (int,),
    "worker": (int,),
    "worker_env_ids": (list,),
    "episode": (int,),
    "is_whole": (bool,),
    "command": (str,),
    "attributes": (dict,),
    "versions": (dict,),
    "pool": (dict,),
    "notes": (list,),
}


def write_capsule(capsule: Capsule, folder: str, name: str) -> str:
    """Write a capsule whole or not at all, under a name that no other has; return its path.

    Raises:
        OSError: it could not be written; nothing is left.
    """
    facts = {"format": FORMAT, **{key: value for key, value in asdict(capsule).items() if key != "arrays"}}
    path = os.path.join(folder, f"{name}-{secrets.token_hex(3)}.npz")
    partial = f"{path}.part"
    try:
        with open(partial, "xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(FACTS_NAME, json.dumps(facts, indent=1))
            _write_arrays(archive, capsule.arrays)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise
    return path


def _write_arrays(archive: zipfile.ZipFile, arrays: Mapping[str, NDArray[Any]]) -> None:
    for key, array in arrays.items():
        with archive.open(f"{key}.npy", "w") as member:
            np.lib.format.write_array(member, array, allow_pickle=False)


def read_capsule(path: str) -> Capsule:
    """Read a capsule; runs nothing of what is in it.

    Raises:
        UsageError: there is no such file, or it is no capsule, or a broken one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            facts, arrays = _read_members(archive)
        return _checked(facts, arrays)
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror or exc}; give the path of a crash capsule") from exc
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError) as exc:
        raise UsageError(f"{path} is no crash capsule, or a broken one: {exc}; give another file") from exc
    except (MemoryError, RecursionError) as exc:
        raise UsageError(f"{path} is no crash capsule: it asks for too much memory; give another file") from exc


def _read_members(archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"{len(members)} members are too many")
    left = MAX_ARRAY_BYTES + MAX_FACTS_BYTES
    arrays: dict[str, NDArray[Any]] = {}
    facts: object = None
    for member in members:
        # The size that the archive states is not believed: no more than what is left is ever unpacked.
        limit = MAX_FACTS_BYTES if member.filename == FACTS_NAME else left
        with archive.open(member) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"{member.filename} is too large")
        left -= len(data)
        if member.filename == FACTS_NAME:
            facts = json.loads(data)
        elif member.filename.endswith(".npy"):
            arrays[member.filename.removesuffix(".npy")] = _read_array(data)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"its {FACTS_NAME} does not say {FORMAT!r}")
    return facts, arrays


def _read_array(data: bytes) -> NDArray[Any]:
    file = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    if dtype.hasobject or dtype.kind not in "biufc" or is_fortran:
        raise ValueError(f"an array of {dtype} has no place here")
    size = dtype.itemsize
    for length in shape:
        size *= length
    body = data[file.tell() :]
    if size != len(body):
        raise ValueError(f"an array of {shape} has {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(shape)


def _checked(facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Capsule:
    values = {entry.name: facts[entry.name] for entry in fields(Capsule) if entry.name != "arrays"}
    for name, types in _TYPES.items():
        if type(values[name]) not in types:
            raise ValueError(f"{name} is a {type(values[name]).__name__}")
    length = {name: len(array) if array.ndim else -1 for name, array in arrays.items()}
    num_results = {length.get(name, 0) for name in ("rewards", "flags", "hashes")}
    num_actions = {count for name, count in length.items() if name.startswith("action.")}
    known = all(name in ("rewards", "flags", "hashes") or _is_action(name) for name in arrays)
    if not known or len(num_results) > 1 or len(num_actions) > 1 or min({0, *length.values()}) < 0:
        raise ValueError("its arrays do not belong together")
    least = max(*num_results, 1) - 1 + (values["command"] == "step")
    if num_actions and min(num_actions) < least:
        raise ValueError("it has fewer actions than steps")
    return Capsule(**values, arrays=arrays)


def _is_action(name: str) -> bool:
    return name.startswith("action.") and name[7:].isascii() and name[7:].isdigit() and len(name) < 12
