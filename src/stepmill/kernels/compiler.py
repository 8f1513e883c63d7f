"""Compiles kernels written in Python to machine code, with Numba. Imported when the first kernel is compiled.

Compiled code is cached under `$NUMBA_CACHE_DIR` or `$XDG_CACHE_HOME/stepmill/kernels`, in one directory per kernel. Its name is a
digest of everything that the code depends on. Two processes may compile the same kernel at the same time.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
import pickle
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
from numba.core.bytecode import FunctionIdentity
from numba.core.compiler_lock import global_compiler_lock
from numba.core.errors import NumbaError, NumbaWarning

from stepmill._version import __version__
from stepmill.kernels.cache_folder import ENTRY, open_cache, write_checksums
from stepmill.kernels.code_digest import NotComparableError, digest_of
from stepmill.kernels.env import RESULT
from stepmill.kernels.numba_copies import FreshCopies
from stepmill.kernels.numba_rng import rng_type
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelCall, KernelProgram, Raised, RowLayout, memory_of
from stepmill.spec.notices import warn

if TYPE_CHECKING:
    from stepmill.kernels.python import PythonKernel

numba_config: Any = numba.config
_ALLOCATIONS = ("NRT_MemInfo_alloc", "NRT_Allocate")
_REFUSED = "allocates"  # a file in the cache of a kernel: the name of its function that allocates memory
# In 1, code of two kernels may have equal symbols; in 2 to 4, digests or code missed some of the code's dependencies.
_CACHE_FORMAT = "5"
_THIS_PROCESS = secrets.token_hex(8)
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')

# The functions that native code calls. They convert pointers to the arrays and numbers that the user's functions take.
_ENTRY = """from numba import carray

def entry_reset(state, rng, obs, result):
    reset({state}, rng, {obs}{info})
    return 0

def entry_step(state, action, rng, obs, result):
    reward, terminated, truncated = step({state}, {action}, rng, {obs}{info})
    result.reward = reward
    result.terminated = terminated
    result.truncated = truncated
    return 0
"""


@contextmanager
def _unique_symbols() -> Iterator[None]:
    """Number the functions that are compiled in the block from a random number. No other thread compiles meanwhile.

    The symbols of compiled code contain a number that Numba gives to each function, in each process from 1. If two
    cached kernels from different processes have equal symbols, the linker takes the code loaded first for both.
    """
    with global_compiler_lock:
        numbers = FunctionIdentity._unique_ids
        FunctionIdentity._unique_ids = itertools.count(secrets.randbits(60))
        try:
            yield
        finally:
            FunctionIdentity._unique_ids = numbers


@_unique_symbols()
def compile_kernel(kernel: PythonKernel, observation: RowLayout, action: RowLayout) -> KernelProgram:
    """Return the compiled kernel.

    Raises:
        UsageError: Numba refuses a function, or a function allocates memory. The message names the function's line.
    """
    _check_enabled(kernel)
    views = {"obs": _view("obs", observation), "action": _view("action", action, is_action=True)}
    has_infos = kernel.infos is not None
    text = _ENTRY.format(
        **views, state="state.state" if has_infos else "state", info=", state.info" if has_infos else ""
    )
    folder = _find_cache(kernel, text)
    numba_options: dict[str, Any] = {"boundscheck": kernel.is_debug, "error_model": "python", "fastmath": False}
    copies = FreshCopies(numba_options)
    scope = {"reset": copies.copy(kernel.reset), "step": copies.copy(kernel.step), "__name__": __name__}
    path = "<stepmill kernel>" if folder is None else str(folder / ENTRY)
    exec(compile(text, path, "exec"), scope)  # generated above
    numba_options["cache"] = folder is not None
    state, rng = numba.from_dtype(memory_of(kernel.state, kernel.infos)), rng_type
    obs = _pointer_type(observation)
    result = numba.from_dtype(RESULT)
    reset = numba.types.int64(state, rng, obs, result)
    step = numba.types.int64(state, _pointer_type(action), rng, obs, result)
    code = []
    for name, signature, function in (("reset", reset, kernel.reset), ("step", step, kernel.step)):
        dispatcher = _compile(kernel, scope[f"entry_{name}"], signature, numba_options, function)
        code.append(dispatcher.overloads[dispatcher.signatures[0]])
        if not sum(dispatcher.stats.cache_hits.values()):  # cached code was checked when it was compiled
            _check_allocations(kernel, function, code[-1], folder)
    if folder is not None:
        write_checksums(folder.name)
    addresses = [int(item.library.get_pointer_to_function(item.fndesc.llvm_func_name)) for item in code]
    return KernelProgram(
        name=kernel.name,
        call=KernelCall.NUMBA,
        reset=addresses[0],
        step=addresses[1],
        state=kernel.state,
        saved_bytes=kernel.saved_bytes,
        observation=observation,
        action=action,
        max_episode_steps=kernel.max_episode_steps,
        methods=kernel.methods,
        explain=explain,
        code=code,
        prepare=getattr(kernel, "prepare", None),
        identity=_identity(kernel),
        infos=kernel.infos,
    )


def _check_enabled(kernel: PythonKernel) -> None:
    if numba_config.DISABLE_JIT:
        raise UsageError(
            f"Numba compiles nothing, because NUMBA_DISABLE_JIT is set; unset it, or run {kernel.name} as Python with "
            "backend='serial' and kernel(compiled=False)"
        )


def _compile(
    kernel: PythonKernel, entry: Any, signature: Any, numba_options: dict[str, Any], function: Callable[..., Any]
) -> Any:
    try:
        dispatcher = numba.njit(**numba_options)(entry)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            dispatcher.compile(signature)
    except NumbaError as exc:
        raise UsageError(_refusal(kernel, function, exc)) from exc
    except Exception as exc:
        # The cached code cannot be read, or names a module that this process cannot import: compile without the cache.
        # Otherwise a package that Numba needs for the code is missing, or this is a bug in Numba.
        if not numba_options["cache"]:
            raise UsageError(_refusal(kernel, function, exc)) from exc
        return _compile(kernel, entry, signature, {**numba_options, "cache": False}, function)
    for warning in found:
        _warn_once(kernel.name, str(warning.message), is_of_numba=issubclass(warning.category, NumbaWarning))
    return dispatcher


@cache
def _warn_once(kernel: str, text: str, *, is_of_numba: bool) -> None:
    """Pass on a warning, once for all pools of a kernel. Numba's own names lines of generated code."""
    if "Cannot cache" in text:
        reason = "arrays of more than a megabyte, or addresses" if is_of_numba else text.removeprefix("Cannot cache ")
        text = (
            f"the kernel {kernel} is compiled again in each process, because it holds {reason}; keep large arrays in the "
            "state, or make them smaller, and use numbers, arrays, tuples of them, and compiled functions"
        )
    else:
        text = f"when the kernel {kernel} was compiled: {text}"
    warn(text, NumbaWarning if is_of_numba else UserWarning)


def _refusal(kernel: PythonKernel, function: Callable[..., Any], error: Exception) -> str:
    """Return the text of an error: Numba's message, and the line of the user's function that it names."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    source_file = os.path.basename(inspect.getsourcefile(function) or "")
    places = [(file, line) for file, line in _PLACE.findall(text) if os.path.basename(file) == source_file]
    where = f", {source_file} line {places[-1][1]}" if places else ""
    return (
        f"Numba cannot compile {function.__name__} of the kernel {kernel.name}{where}; change it, or try it as Python with "
        f"backend='serial' and kernel(compiled=False). Numba says:\n{text}"
    )


def _check_allocations(kernel: PythonKernel, function: Callable[..., Any], code: Any, folder: Path | None) -> None:
    """Refuse code that allocates memory in each step: all threads would wait for each other in the allocator."""
    if not any(name in code.library.get_llvm_str() for name in _ALLOCATIONS):
        return
    if folder is not None:
        _write_once(folder / _REFUSED, function.__name__)
    raise _allocation_error(kernel, function.__name__)


def _allocation_error(kernel: PythonKernel, function: str) -> UsageError:
    return UsageError(
        f"{function} of the kernel {kernel.name} allocates memory (new arrays, lists, or array expressions); "
        "keep arrays in the state, and write to their elements in a loop (out[i] = a[i] + b[i]; out[:] = a + b allocates)"
    )


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _view(name: str, layout: RowLayout, *, is_action: bool = False) -> str:
    """Return the expression that turns the pointer `name` into the argument of the user's function."""
    if layout.dtype.names is not None:
        return f"carray({name}, 1)[0]"
    if not layout.shape:
        return f"carray({name}, 1)[0]" if is_action else f"carray({name}, (1,))"
    return f"carray({name}, {layout.shape})"


def _pointer_type(layout: RowLayout) -> Any:
    return numba.types.CPointer(numba.from_dtype(layout.dtype))  # type: ignore[no-untyped-call]


# ---- the cache ---------------------------------------------------------------------------------------------------------


def _find_cache(kernel: PythonKernel, text: str) -> Path | None:
    """Return the directory of a kernel's code; None if there is none. A kernel that was refused for its allocations is refused again."""
    digest = _digest(kernel, text)
    folder = None if digest is None else open_cache(digest)
    if folder is not None and (folder / _REFUSED).exists():
        raise _allocation_error(kernel, (folder / _REFUSED).read_text())
    return None if folder is None or not _write_once(folder / ENTRY, text) else folder


def _write_once(path: Path, text: str) -> bool:
    """Write a file atomically, unless it exists. With a newer modification time, Numba would compile again.

    Return whether it exists then. It does not if the disk is full, for example.
    """
    if not path.exists():
        # Machines that share the folder may have processes with equal pids.
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with suppress(OSError):  # if the file exists, another process was faster
            fresh.write_text(text)
            os.link(fresh, path)
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return path.exists()


def _digest(kernel: PythonKernel, text: str) -> str | None:
    """Return a digest of all that the compiled kernel depends on; None, after a warning, if some of it cannot be compared."""
    settings = _CACHE_FORMAT, __version__, numba_config.BOUNDSCHECK, kernel.is_debug
    parts = (text, settings, kernel.state, kernel.infos, kernel.reset, kernel.step)
    try:
        return digest_of(*parts)
    except NotComparableError as exc:
        _warn_once(kernel.name, f"Cannot cache {exc}", is_of_numba=False)
        return None


def _identity(kernel: PythonKernel) -> str:
    """Return a text that distinguishes a kernel's snapshots from those of kernels with other code, constants or tables.

    If some of these cannot be compared, other processes refuse the snapshots.
    """
    try:
        return digest_of(kernel.identity, kernel.reset, kernel.step, has_lines=False)
    except NotComparableError:
        return f"{kernel.identity} {_THIS_PROCESS}"


# ---- faults ------------------------------------------------------------------------------------------------------------


class _Raised(ctypes.Structure):
    """How compiled code describes an exception that it has raised."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int32),
        ("digest", ctypes.c_void_p),
        ("unwrap", ctypes.c_void_p),
        ("num_allocated", ctypes.c_int32),
    ]


def explain(status: int, raised: int, message: str) -> Raised:
    """Return the type and the message of an exception that compiled code has raised, with its line if that is known."""
    if not raised:
        return "KernelError", message or f"status {status}"
    info = _Raised.from_address(raised)
    if info.num_allocated > 0:  # only Numba's own caller can read arguments that were computed
        return (
            "KernelError",
            "it raised an exception whose text contains computed values, which cannot be read; use a constant text",
        )
    kind, arguments, place = pickle.loads(ctypes.string_at(info.data, info.size))
    where = f" ({os.path.basename(place[1])} line {place[2]}, in {place[0]})" if place else ""
    return kind.__name__, ", ".join(str(argument) for argument in arguments or ()) + where
