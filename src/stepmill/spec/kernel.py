"""The description of a kernel, an env in compiled code, for the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from stepmill.spec.env import EnvSpec

Raised: TypeAlias = "tuple[str, str]"
"""Type and message of what a kernel raised."""


class KernelCall(IntEnum):
    """How the functions of a kernel are called. The numbers are those of native code."""

    C = 0  # as `stepmill_kernel.h` says
    NUMBA = 1  # as Numba compiles functions: two arguments more, and an exception in place of a status


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """One row of an observation or action, as a kernel sees it: its leaves one after the other.

    Attributes:
        dtype: of the row: a plain one with `shape`, or a structured one with a field per leaf and shape ().
        shape: of the row.
        offsets: of the leaves, in the order of the tree.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the row."""
        return self.dtype.itemsize * int(np.prod(self.shape))


def memory_of(state: np.dtype[Any], infos: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return the dtype of the memory of one env: its infos, if it has any, then its state."""
    return state if infos is None else np.dtype([("info", infos), ("state", state)], align=True)


def zero_infos(infos: np.dtype[Any] | None) -> list[tuple[str, Any]]:
    """Return a zero for each info under its name: an array or NumPy scalar; of a bool an array [], which merges to bools."""
    if infos is None:
        return []
    zeros = {name: np.zeros(infos[name].shape, infos[name].base) for name in infos.names or ()}
    return [(name, zero if zero.dtype.kind == "b" else zero[()]) for name, zero in zeros.items()]


def info_offsets(infos: np.dtype[Any] | None) -> list[int]:
    """Return where each info begins in its record."""
    fields = None if infos is None else infos.fields
    return [] if fields is None else [int(field[1]) for field in fields.values()]


class OutsideMemory(Protocol):
    """What one env of a kernel remembers beside its state."""

    @property
    def size_bytes(self) -> int:
        """Bytes that `save` returns."""

    def save(self) -> bytes:
        """Return a copy of it."""

    def load(self, memory: bytes) -> None:
        """Restore what `save` of an env of the same kernel has returned."""


@dataclass(frozen=True, kw_only=True)
class KernelProgram:
    """Compiled functions, and the memory that they work on.

    Attributes:
        name: of the kernel, for errors.
        call: how the functions are called.
        reset, step: addresses of the functions.
        state: dtype of what one env remembers.
        infos: dtype of the infos that the functions write; None if there are none.
        saved_bytes: how many bytes of the state belong to a snapshot, from its beginning; the rest is written by `prepare`.
        observation, action: rows.
        max_episode_steps: after this many steps an episode is truncated; 0 is no limit.
        methods: functions that `Pool.call` finds by name, called with the env's state first.
        explain: turns (status, address of what Numba raised, message) into the type and message of an exception.
        code: what must live as long as the addresses are called.
        prepare: is called with the state of each env before its first reset; what it returns lives as long as the env. None:
            the state is all that an env remembers.
        identity: tells the kernel from others with the same name and rows, whose snapshots it does not take.
    """

    name: str
    call: KernelCall
    reset: int
    step: int
    state: np.dtype[Any]
    saved_bytes: int
    observation: RowLayout
    action: RowLayout
    max_episode_steps: int
    methods: Mapping[str, Callable[..., Any]]
    explain: Callable[[int, int, str], Raised]
    code: object
    prepare: Callable[[Any], OutsideMemory] | None = None
    identity: str = ""
    infos: np.dtype[Any] | None = None

    @cached_property
    def memory(self) -> np.dtype[Any]:
        """The memory of one env, which the functions get as their state: the state, after its infos if there are any."""
        return memory_of(self.state, self.infos)

    @property
    def num_saved_bytes(self) -> int:
        """How many bytes of the memory belong to a snapshot."""
        start = 0 if self.memory.fields is None or self.infos is None else int(self.memory.fields["state"][1])
        return start + self.saved_bytes

    @cached_property
    def digest(self) -> str:
        """Tells whose snapshots its envs take."""
        parts = (self.name, self.memory.descr, self.saved_bytes, self.observation, self.action, self.identity)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@runtime_checkable
class KernelMaker(Protocol):
    """What stands for each env function of `Pool(..., backend="kernel")`."""

    def describe(self) -> EnvSpec:
        """Return what each of its envs says of itself."""

    def compile(self) -> KernelProgram:
        """Return the compiled kernel; the second time the same one."""
