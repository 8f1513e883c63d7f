"""Kernels in C, C++ or Rust: shared libraries that implement `stepmill_kernel.h`."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from stepmill import _native
from stepmill.kernels.env import KernelEnv, KernelMemory, native_calls
from stepmill.kernels.row_layouts import describe_spaces, row_layout
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelCall, KernelProgram

_DESCRIBE = "stepmill_kernel_describe"
_BOX, _DISCRETE = 0, 1
_MAX_DIMS = 6
_PLAIN_KINDS = "biuf"
_LIBRARIES: dict[tuple[str, str], ctypes.CDLL] = {}  # loaded libraries, by path and digest
_MAX_ROW_BYTES = 2**28


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
        UsageError: the library cannot be loaded, is not a kernel, is for another version of the header, or has a wrong
            field.
    """
    path = os.path.abspath(os.fspath(path))
    try:
        library, digest = _open(path)
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
    if description.abi_version != _native.KERNEL_ABI:
        raise UsageError(
            f"{path} was compiled for version {description.abi_version} of stepmill_kernel.h, but this is version "
            f"{_native.KERNEL_ABI}; compile it again with -I{get_include()}"
        )
    size, wanted = description.size_bytes, ctypes.sizeof(_Description)
    _require(size == wanted, f"{path}: size_bytes", size, f"sizeof(stepmill_kernel), {wanted}")
    if not description.reset or not description.step:
        raise UsageError(f"the kernel of {path} has no {'step' if description.reset else 'reset'} function; set it")
    return LibraryKernel(path, description, library, digest)


def _open(path: str) -> tuple[ctypes.CDLL, str]:
    """Load a library; return it with a digest of its file.

    `dlopen` returns the library that it has already loaded from a path. If the file has changed since, a copy of it is
    loaded.
    """
    content = Path(path).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if (path, digest) not in _LIBRARIES:
        if any(known == path for known, _ in _LIBRARIES):
            with open(os.memfd_create(os.path.basename(path)), "wb") as copy:
                copy.write(content)
                copy.flush()
                # Under a name that it has not had: the descriptor may have the number of an earlier one.
                place = f"/proc/self/fd/{'./' * len(_LIBRARIES)}{copy.fileno()}"
                _LIBRARIES[path, digest] = ctypes.CDLL(place)
        else:
            _LIBRARIES[path, digest] = ctypes.CDLL(path)
    return _LIBRARIES[path, digest], digest


def _load_same(path: str, digest: str) -> LibraryKernel:
    """Load the library that another process has loaded.

    Raises:
        UsageError: its file has changed since.
    """
    kernel = load(path)
    if kernel.digest != digest:
        raise UsageError(
            f"{path} was compiled again after the pool's program loaded it; load it again, and make a new pool"
        )
    return kernel


class LibraryKernel:
    """A kernel of a shared library. Give it to a pool once for each env: `Pool([kernel] * 64, backend="kernel")`.

    On other backends it is an env function: each call returns a Gymnasium env.

    Attributes:
        path: the path of the library.
        digest: the digest of its file.
        name: the name that the library gives.
        observation_space, action_space: the spaces of its envs.
    """

    def __init__(self, path: str, description: _Description, library: ctypes.CDLL, digest: str) -> None:
        self.path, self.digest = path, digest
        self.name = _text_of(description.name, f"{path}: name") or "kernel"
        self.observation_space = _space_of(description.observation, f"{path}: observation")
        self.action_space = _space_of(description.action, f"{path}: action")
        size, limit = description.state_bytes, description.max_episode_steps
        _require(size < 2**31, f"{path}: state_bytes", size, "less than 2 GiB")
        _require(limit >= 0, f"{path}: max_episode_steps", limit, "1 or more, or 0 for no limit")
        self._description, self._library = description, library
        spaces = repr((self.observation_space, self.action_space))
        self._identity = hashlib.sha256((digest + spaces).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"<stepmill kernel {self.name} of {self.path}>"

    def __reduce__(self) -> tuple[Callable[[str, str], LibraryKernel], tuple[str, str]]:
        return _load_same, (self.path, self.digest)

    def __call__(self) -> KernelEnv:
        """Return one env, for any backend except "kernel"."""
        program = self.compile()
        memory = KernelMemory(program.state, program.observation, program.action)
        spaces = self.observation_space, self.action_space
        run = native_calls(program, memory)
        return KernelEnv(self._spec, spaces, memory, program.max_episode_steps, {}, run)

    def describe(self) -> EnvSpec:
        """Return the spec of its envs."""
        return self._spec

    def compile(self) -> KernelProgram:
        """Return the functions of the kernel, which are already compiled."""
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
            identity=self._identity,
        )

    @cached_property
    def _spec(self) -> EnvSpec:
        return describe_spaces(self.observation_space, self.action_space)


def _require(is_allowed: object, field: str, value: object, allowed: str) -> None:
    if not is_allowed:
        raise UsageError(f"{field} is {value}; it must be {allowed}")


def _text_of(value: bytes | None, field: str) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{field} is {value!r}; it must be UTF-8") from exc


def _space_of(space: _Space, name: str) -> spaces.Space[Any]:
    """Return a space; `name` begins the names of its fields in errors."""
    _require(space.kind in (_BOX, _DISCRETE), f"{name}.kind", space.kind, f"{_BOX} (Box) or {_DISCRETE} (Discrete)")
    if space.kind == _DISCRETE:
        _require(space.n >= 1, f"{name}.n", space.n, "1 or more")
        most = 2**63 - space.n
        _require(space.start <= most, f"{name}.start", space.start, f"at most {most}, since start + n - 1 is an int64")
        return spaces.Discrete(space.n, start=space.start)
    text = _text_of(space.dtype, f"{name}.dtype")
    try:
        dtype = np.dtype(text)
    except Exception:  # NumPy's parser may raise anything
        dtype = np.dtype(object)
    is_plain = dtype.kind in _PLAIN_KINDS and dtype.isnative and dtype.itemsize <= 8
    _require(is_plain, f"{name}.dtype", repr(text), "a native number of 1 to 8 bytes, as NumPy names it: f4, u1, ...")
    _require(0 <= space.num_dims <= _MAX_DIMS, f"{name}.num_dims", space.num_dims, f"0 to {_MAX_DIMS}")
    shape = tuple(space.shape[: space.num_dims])
    is_small = (
        min(shape, default=0) >= 0 and math.prod(max(dim, 1) for dim in shape) <= _MAX_ROW_BYTES // dtype.itemsize
    )
    _require(is_small, f"{name}.shape", shape, f"dimensions of 0 or more, of at most {_MAX_ROW_BYTES} bytes together")
    low = _bound_of(space.lows, space.low, shape, dtype, f"{name}.low")
    high = _bound_of(space.highs, space.high, shape, dtype, f"{name}.high")
    wrong = low[low > high]
    _require(not wrong.size, f"{name}.low", wrong[:1], "at most the upper bound, for each element")
    return spaces.Box(low, high, shape, dtype.type)


def _bound_of(values: Any, single: float, shape: tuple[int, ...], dtype: np.dtype[Any], field: str) -> Any:
    """Return a bound in the type of its space."""
    given = np.ctypeslib.as_array(values, (math.prod(shape),)).reshape(shape) if values else np.asarray(single)
    is_float = dtype.kind == "f"
    low, high = (-np.inf, np.inf) if is_float else (0, 1)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    is_whole = is_float | (given == np.floor(given))
    wrong = given[~((given >= float(low)) & (given <= float(high)) & is_whole)]  # a NaN is wrong
    allowed = f"from {low} to {high} for {dtype}" if is_float else f"whole, from {low} to {high} for {dtype}"
    _require(not wrong.size, field, wrong[:1], allowed)
    with np.errstate(all="ignore"):  # a double beyond all float32 is infinite, and 2.0**63 is the largest int64
        return np.full(shape, np.where(given >= float(high), np.asarray(high, dtype), given.astype(dtype)), dtype)
