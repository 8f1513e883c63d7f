"""Crash capsules: files that describe a fault and allow its episode to be replayed.

    NAME.npz   a zip archive: capsule.json, and NumPy arrays, which `numpy.load` reads
               rewards  [T+1] float64   of the reset (index 0) and of T steps
               flags    [T+1] uint8     1 terminated, 2 truncated
               hashes   [T+1] uint16    of the observations
               action.K [U, ...]        leaf K of the actions: of the T steps, and of the step that failed, if it was one
               opaque_actions.json      their parts without a fixed size, as a list of U lists; only if there are any

A capsule contains no pickle, so reading it runs no code. The size of a capsule is limited when it is written and when
it is read.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import UsageError

FORMAT = "stepmill crash capsule 2"
FACTS_NAME = "capsule.json"
MAX_FACTS_BYTES = 4 << 20
OPAQUES_NAME = "opaque_actions.json"
MAX_ARRAY_BYTES = 64 << 20  # for all arrays together
MAX_OPAQUE_BYTES = 16 << 20  # for the actions' parts without a fixed size, as JSON
MAX_MEMBERS = 256
MAX_FILE_BYTES = MAX_ARRAY_BYTES + MAX_OPAQUE_BYTES + MAX_FACTS_BYTES + (1 << 20)
MAX_NDIM = 32
MAX_DEPTH = 256  # how deep the facts may be nested; the result of `to_plain` is less deep
_MEMBER_MARK = b"PK\x01\x02"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[biufc]\d{1,2})', 'fortran_order': False, 'shape': \(([\d, ]{0,400})\), \} *\n"
)


@dataclass(frozen=True, kw_only=True)
class Capsule:
    """A fault and the episode that led to it. Every field except `arrays` is JSON.

    Attributes:
        made: the time of the fault, in UTC.
        kind: the kind of fault: "raised", "bad_output", "bad_action", "died", "timed_out" or "neighbour".
        phase: what the env was doing: "construct", "reset", "step", ...; empty if it was doing nothing.
        error_type, message, traceback: those of the env's exception, or of stepmill's error if the env did not raise
            one.
        exit_code, signal_name: how the worker process ended; None if it did not end.
        trace: the stack of the worker when it crashed or hung, as faulthandler writes it.
        env_id, worker, worker_env_ids: the env, its worker, and all envs of that worker.
        constructor: the env_fn in the form of `to_plain`; None if it has no such form.
        episode, seed, options: those of the logged episode. A seed of None means that the env's random generator
            continued.
        is_whole: whether the arrays have the episode from its reset on.
        command: the command that failed: "step" (the last of the actions), "reset", "call", "construct", or "" for none.
        call: for a call, its kind ("call", "render", "set_attr" ...) and payload in the form of `to_plain`; else None.
        command_seed, command_options: those of the reset that failed, or of the reset after the step under SAME_STEP.
        attributes: the attributes that were set on the env with `set_attr`.
        versions, pool: the versions of libraries, and the options of the pool.
        notes: what the capsule lacks, and why.
        opaque_actions: for each action, its parts without a fixed size in the form of `to_plain`; empty if there are
            none.
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
    opaque_actions: list[list[object]] = field(default_factory=list, repr=False)

    @property
    def num_steps(self) -> int:
        """The number of steps in the log, without the one that failed."""
        return max(len(self.arrays["rewards"]) - 1, 0) if "rewards" in self.arrays else 0

    @property
    def num_actions(self) -> int:
        """The number of actions: one per step in the log, and one for the step that failed, if a step failed."""
        return len(self.arrays.get("action.0", self.opaque_actions))

    def action(self, step: int) -> list[NDArray[Any]]:
        """Return the leaves of one step's action, in the dtypes and shapes of the slab."""
        names = sorted((name for name in self.arrays if name.startswith("action.")), key=lambda name: int(name[7:]))
        return [self.arrays[name][step] for name in names]


def _json_types(annotation: Any) -> tuple[type, ...]:
    """Return the types that a field's value may have in JSON; `object` allows any type, and gives none."""
    alternatives = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return tuple(get_origin(each) or each for each in alternatives if each is not object)


_ALLOWED_VALUES = {
    "kind": ("raised", "bad_output", "bad_action", "died", "timed_out", "neighbour"),
    "command": ("step", "reset", "call", "construct", ""),
}
_OWN_MEMBERS = ("arrays", "opaque_actions")  # fields that are not among the facts
_TYPES = {name: _json_types(each) for name, each in get_type_hints(Capsule).items() if name not in _OWN_MEMBERS}
_RESULTS = {"rewards": np.float64, "flags": np.uint8, "hashes": np.uint16}


def write_capsule(capsule: Capsule, folder: str, name: str) -> str:
    """Write a capsule atomically under a unique name, and return its path.

    Raises:
        OSError: the capsule could not be written. No partial file remains.
    """
    facts = {"format": FORMAT, **{key: value for key, value in asdict(capsule).items() if key not in _OWN_MEMBERS}}
    path = os.path.join(folder, f"{name}-{secrets.token_hex(3)}.npz")
    partial = f"{path}.part"
    try:
        with open(partial, "xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(FACTS_NAME, json.dumps(facts, indent=1))
            if capsule.opaque_actions:
                archive.writestr(OPAQUES_NAME, json.dumps(capsule.opaque_actions))
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
    """Read a capsule. This runs no code from it.

    Raises:
        UsageError: there is no such file, or it is not a valid capsule.
    """
    try:
        data = _read_file(path)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or exc}; give the path of a crash capsule") from exc
    except ValueError as exc:
        raise UsageError(f"{path!r} is not a crash capsule: {exc}; give another file") from exc
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _checked(*_read_members(archive))
    except (MemoryError, RecursionError) as exc:
        raise UsageError(f"{path} is not a crash capsule: it needs too much memory; give another file") from exc
    except Exception as exc:  # zipfile, zlib and json raise many kinds of errors for invalid bytes
        reason = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise UsageError(f"{path} is not a valid crash capsule: {reason}; give another file") from exc


def _read_file(path: str) -> bytes:
    """Return the bytes of a regular file of limited size. Other kinds of files may be endless, or may block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    if data.count(_MEMBER_MARK) > 2 * MAX_MEMBERS:  # zipfile allocates memory for each before it can count them
        raise ValueError("it has too many members")
    return data


def _read_members(archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, NDArray[Any]], object]:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"it has {len(members)} members, and at most {MAX_MEMBERS} are allowed")
    left = MAX_ARRAY_BYTES + MAX_OPAQUE_BYTES + MAX_FACTS_BYTES
    arrays: dict[str, NDArray[Any]] = {}
    facts: object = None
    opaque_actions: object = []
    for member in members:
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{member.filename!r} is compressed with a method that capsules do not use")
        # The size in the archive's header may be wrong, so no more than the bytes that are left are unpacked.
        limit = {FACTS_NAME: MAX_FACTS_BYTES, OPAQUES_NAME: MAX_OPAQUE_BYTES}.get(member.filename, left)
        with archive.open(member) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"{member.filename!r} is too large")
        left -= len(data)
        if member.filename == FACTS_NAME:
            facts = json.loads(data)
        elif member.filename == OPAQUES_NAME:
            opaque_actions = json.loads(data)
        elif member.filename.endswith(".npy"):
            arrays[member.filename.removesuffix(".npy")] = _read_array(data)
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"its {FACTS_NAME} does not have the format {FORMAT!r}")
    return facts, arrays, opaque_actions


def _read_array(data: bytes) -> NDArray[Any]:
    """Return the array of an .npy file of `write_capsule`. NumPy's reader is not used: it evaluates the header."""
    major = data[6] if len(data) > 6 else 0
    num_bytes = 2 if major == 1 else 4
    if data[:6] != b"\x93NUMPY" or major not in (1, 2):
        raise ValueError("one of its arrays is not an .npy file")
    start = 8 + num_bytes
    end = start + int.from_bytes(data[8:start], "little")
    header = _HEADER.fullmatch(data[start:end])
    if header is None:
        raise ValueError("an array has a header that is not allowed in capsules")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(length) for length in header[2].split(b",") if length.strip())
    body = data[end:]
    if len(shape) > MAX_NDIM or dtype.itemsize * math.prod(shape) != len(body):
        raise ValueError(f"an array of shape {shape[:MAX_NDIM]} has {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(shape)


def _checked(facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], opaque_actions: Any) -> Capsule:
    _check_depth([facts, opaque_actions])
    values = {entry.name: facts[entry.name] for entry in fields(Capsule) if entry.name not in _OWN_MEMBERS}
    for name, types in _TYPES.items():
        if types and type(values[name]) not in types:
            raise ValueError(f"{name} is a {type(values[name]).__name__}")
    for name, known in _ALLOWED_VALUES.items():
        if values[name] not in known:
            raise ValueError(f"{name} is {values[name]!r:.40}")
    if not isinstance(opaque_actions, list) or not all(isinstance(parts, list) for parts in opaque_actions):
        raise ValueError(f"its {OPAQUES_NAME} is not a list of lists")
    _check_arrays(arrays, opaque_actions, is_step=values["command"] == "step")
    return Capsule(**values, arrays=arrays, opaque_actions=opaque_actions)


def _check_arrays(arrays: Mapping[str, NDArray[Any]], opaque_actions: list[object], *, is_step: bool) -> None:
    results = {name: array for name, array in arrays.items() if name in _RESULTS}
    actions = {name: array for name, array in arrays.items() if name not in _RESULTS}
    if any(array.ndim != 1 or array.dtype != _RESULTS[name] for name, array in results.items()):
        raise ValueError("its results have the wrong types")
    if set(actions) != {f"action.{leaf}" for leaf in range(len(actions))} or any(
        array.ndim == 0 for array in actions.values()
    ):
        raise ValueError("its actions have the wrong names or shapes")
    num_results = {len(results[name]) if name in results else 0 for name in _RESULTS}
    num_actions = {len(array) for array in actions.values()} | ({len(opaque_actions)} if opaque_actions else set())
    if len(num_results) > 1 or len(num_actions) > 1:
        raise ValueError("its arrays have different lengths")
    least = max(*num_results, 1) - 1 + is_step
    if num_actions and min(num_actions) < least:
        raise ValueError("it has fewer actions than steps")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise ValueError("its facts are nested too deeply")


def _children(node: object) -> list[object]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
