"""Kernels in C, C++, Rust: shared libraries behind `stepmill_kernel.h`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces

from stepmill import _native
from stepmill.kernels.env import KernelEnv, KernelMemory, native_calls
from stepmill.kernels.rows import describe_spaces, row_layout
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelCall, KernelProgram

_DESCRIBE = "stepmill_kernel_describe"
_BOX, _DISCRETE = 0, 1
_MAX_DIMS = 6
_PLAIN_KINDS = "biuf"


class _Space(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_char_p),
        ("num_dims", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_DIMS),
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("lows", ctypes.POINTER(ctypes.c_double)),
        ("highs", ctypes.POINTER(ctypes.c_double)),
        ("n", ctypes.c_int64),
        ("start", ctypes.c_int64),
    ]


class _Description(ctypes.Structure):
    _fields_ = [
        ("abi_version", ctypes.c_uint32),
        ("size_bytes", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("observation", _Space),
        ("action", _Space),
        ("state_bytes", ctypes.c_uint64),
        ("max_episode_steps", ctypes.c_int64),
        ("reset", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
    ]


def get_include() -> str:
    """Return the directory of `stepmill_kernel.h`: cc -I$(python -c 'import stepmill; print(stepmill.get_include())')."""
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "include")


def load(path: str | os.PathLike[str]) -> LibraryKernel:
    """Load a kernel from a shared library.

    Raises:
        UsageError: it cannot be loaded, is no kernel, or was compiled for another version of the header.
    """
    path = os.path.abspath(os.fspath(path))
    try:
        library = ctypes.CDLL(path)
    except OSError as exc:
        raise UsageError(f"the kernel {path} cannot be loaded: {exc}") from exc
    describe = getattr(library, _DESCRIBE, None)
    if describe is None:
        raise UsageError(
            f'{path} defines no {_DESCRIBE}(); include stepmill_kernel.h, and define it (extern "C" in C++)'
        )
    describe.restype = ctypes.POINTER(_Description)
    found = describe()
    if not found:
        raise UsageError(f"{_DESCRIBE}() of {path} returned NULL")
    description = found.contents
    if description.abi_version != _native.KERNEL_ABI or description.size_bytes != ctypes.sizeof(_Description):
        raise UsageError(
            f"{path} was compiled for version {description.abi_version} of stepmill_kernel.h, and this is version "
            f"{_native.KERNEL_ABI}; compile it again with -I{get_include()}"
        )
    if not description.reset or not description.step:
        raise UsageError(f"the kernel of {path} has no {'step' if description.reset else 'reset'} function; set it")
    return LibraryKernel(path, description, library)


class LibraryKernel:
    """A kernel of a shared library. Give it to a pool once for each env: `Pool([kernel] * 64, backend="kernel")`.

    On other backends it is an env function: each call returns a Gymnasium env.

    Attributes:
        path: of the library.
        name: as the library says.
        observation_space, action_space: of its envs.
    """

    def __init__(self, path: str, description: _Description, library: ctypes.CDLL) -> None:
        self.path = path
        self.name = (description.name or b"kernel").decode()
        self.observation_space = _space_of(description.observation, f"the observation of {path}")
        self.action_space = _space_of(description.action, f"the action of {path}")
        self._description, self._library = description, library

    def __repr__(self) -> str:
        return f"<stepmill kernel {self.name} of {self.path}>"

    def __reduce__(self) -> tuple[Callable[[str], LibraryKernel], tuple[str]]:
        return load, (self.path,)

    def __call__(self) -> KernelEnv:
        """Return one env, for any backend but "kernel"."""
        program = self.compile()
        memory = KernelMemory(program.state, program.observation, program.action)
        spaces = self.observation_space, self.action_space
        run = native_calls(program, memory)
        return KernelEnv(self._spec, spaces, memory, program.max_episode_steps, {}, run)

    def describe(self) -> EnvSpec:
        """Return what each of its envs says of itself."""
        return self._spec

    def compile(self) -> KernelProgram:
        """Return the kernel's functions, which are compiled already."""
        state = np.dtype([("bytes", "u1", (max(self._description.state_bytes, 1),))])
        return KernelProgram(
            name=self.name,
            call=KernelCall.C,
            reset=self._description.reset,
            step=self._description.step,
            state=state,
            saved_bytes=state.itemsize,
            observation=row_layout(self._spec.observation, "observation"),
            action=row_layout(self._spec.action, "action"),
            max_episode_steps=self._description.max_episode_steps,
            methods={},
            explain=lambda status, raised, message: ("KernelError", message or f"status {status}"),
            code=self._library,
        )

    @cached_property
    def _spec(self) -> EnvSpec:
        return describe_spaces(self.observation_space, self.action_space)


def _space_of(space: _Space, name: str) -> spaces.Space[Any]:
    if space.kind == _DISCRETE:
        if space.n < 1:
            raise UsageError(f"{name} is Discrete with n={space.n}; n must be 1 or more")
        return spaces.Discrete(space.n, start=space.start)
    try:
        dtype = np.dtype((space.dtype or b"").decode())
    except TypeError:
        dtype = np.dtype(object)
    if space.kind != _BOX or not 0 <= space.num_dims <= _MAX_DIMS or dtype.kind not in _PLAIN_KINDS:
        raise UsageError(f"{name} is no space: kind {space.kind}, dtype {space.dtype!r}, {space.num_dims} dimensions")
    shape = tuple(space.shape[: space.num_dims])
    low, high = _bound(space.lows, space.low, shape), _bound(space.highs, space.high, shape)
    return spaces.Box(low.astype(dtype), high.astype(dtype), shape, dtype.type)


def _bound(values: Any, single: float, shape: tuple[int, ...]) -> Any:
    if not values:
        return np.full(shape, single)
    return np.ctypeslib.as_array(values, (int(np.prod(shape)),)).reshape(shape).copy()
