"""What the engine has to know of a kernel: an env in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
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


@dataclass(frozen=True, kw_only=True)
class KernelProgram:
    """Compiled functions, and the memory that they work on.

    Attributes:
        name: of the kernel, for errors.
        call: how the functions are called.
        reset, step: addresses of the functions.
        state: dtype of what one env remembers.
        observation, action: rows.
        max_episode_steps: after this many steps an episode is truncated; 0 is no limit.
        methods: functions that `Pool.call` finds by name, called with the env's state first.
        explain: turns (status, address of what Numba raised, message) into the type and message of an exception.
        code: what must live as long as the addresses are called.
        prepare: is called with the state of each env before its first reset; what it returns lives as long as the env. A
            kernel that has one keeps memory beside its state, and its envs have no snapshots.
    """

    name: str
    call: KernelCall
    reset: int
    step: int
    state: np.dtype[Any]
    observation: RowLayout
    action: RowLayout
    max_episode_steps: int
    methods: Mapping[str, Callable[..., Any]]
    explain: Callable[[int, int, str], Raised]
    code: object
    prepare: Callable[[Any], object] | None = None


@runtime_checkable
class KernelMaker(Protocol):
    """What stands for each env function of `Pool(..., backend="kernel")`."""

    def describe(self) -> EnvSpec:
        """Return what each of its envs says of itself."""

    def compile(self) -> KernelProgram:
        """Return the compiled kernel; the second time the same one."""
