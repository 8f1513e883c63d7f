"""Describes a kernel, which is an env in compiled code, to the engine."""

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

    C = 0  # the convention of `stepmill_kernel.h`
    NUMBA = 1  # the convention of Numba: two further arguments, and an exception in place of a status


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """One row of an observation or action, as a kernel sees it: its leaves one after the other.

    Attributes:
        dtype: the dtype of the row, which is plain, or structured with one field per leaf and the shape ().
        shape: the shape of the row.
        offsets: the offsets of the leaves in bytes, in the order of the tree.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the row in bytes."""
        return self.dtype.itemsize * int(np.prod(self.shape))


def memory_of(state: np.dtype[Any], infos: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return the dtype of the memory of one env: its infos, if it has any, then its state."""
    return state if infos is None else np.dtype([("info", infos), ("state", state)], align=True)


def zero_infos(infos: np.dtype[Any] | None) -> list[tuple[str, Any]]:
    """Return (name, zero) for each info. A zero is an array or a NumPy scalar, or for a bool an array of shape []."""
    if infos is None:
        return []
    zeros = {name: np.zeros(infos[name].shape, infos[name].base) for name in infos.names or ()}
    return [(name, zero if zero.dtype.kind == "b" else zero[()]) for name, zero in zeros.items()]


def info_offsets(infos: np.dtype[Any] | None) -> list[int]:
    """Return the offset of each info in its record, in bytes."""
    fields = None if infos is None else infos.fields
    return [] if fields is None else [int(field[1]) for field in fields.values()]


# Memory of an env of a kernel outside its state: (save, load, first, second, kind, size_bytes, spans). The addresses of two functions of a
# library, which are called as save(first, second, bytes, kind) and load(first, second, bytes, kind) with two addresses and an int; the
# size of all that is saved; and the address and the size of each span of memory that is copied.
OutsideMemory: TypeAlias = "tuple[int, int, int, int, int, int, list[tuple[int, int]]]"


class KernelEnvMemory(Protocol):
    """Owns the memory of an env outside its state."""

    def describe(self) -> OutsideMemory:
        """Return where the memory is, for as long as this object lives."""

    def check(self) -> None:
        """Raise UsageError if the memory cannot be saved."""


@dataclass(frozen=True, kw_only=True)
class KernelProgram:
    """Compiled functions, and the memory that they use.

    Attributes:
        name: the name of the kernel, for errors.
        call: how the functions are called.
        reset, step: the addresses of the functions.
        state: the dtype of the state of one env.
        infos: the dtype of the infos that the functions write; None if there are none.
        saved_bytes: how many bytes of the state, from its beginning, belong to a snapshot. `prepare` writes the rest.
        observation, action: the layouts of the rows.
        max_episode_steps: an episode is truncated after this many steps; 0 means no limit.
        methods: the functions that `Pool.call` finds by name. Their first argument is the env's state.
        explain: turns (status, address of the exception of Numba, message) into the type and message of an exception.
        code: an object that must live as long as the addresses are called.
        prepare: a function that is called with the state of each env before its first reset. Its result lives as long
            as the env. None if an env has no memory outside its state.
        identity: distinguishes the kernel from others with the same name and rows, whose snapshots it does not accept.
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
    prepare: Callable[[Any], KernelEnvMemory] | None = None
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
        """A text that is equal for kernels whose envs accept each other's snapshots."""
        parts = (self.name, self.memory.descr, self.saved_bytes, self.observation, self.action, self.identity)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@runtime_checkable
class KernelMaker(Protocol):
    """The object that replaces each env function in `Pool(..., backend="kernel")`."""

    def describe(self) -> EnvSpec:
        """Return the spec of its envs."""

    def compile(self) -> KernelProgram:
        """Return the compiled kernel. Each call returns the same object."""
