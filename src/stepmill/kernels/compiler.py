"""Kernels in Python to machine code, by Numba. Imported where Numba is installed, when the first kernel is compiled.

Compiled code is kept in files, in a directory for each kernel that is named by a digest of all that its code depends on:
`$NUMBA_CACHE_DIR`, or `$XDG_CACHE_HOME/stepmill/kernels`. Two processes may compile the same kernel at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import pickle
import re
import shutil
import types as python_types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba.core.errors import NumbaError
from numba.core.registry import CPUDispatcher

from stepmill._version import __version__
from stepmill.kernels.env import RESULT
from stepmill.kernels.numba_rng import rng_type
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import KernelCall, KernelProgram, Raised, RowLayout

if TYPE_CHECKING:
    from stepmill.kernels.python import PythonKernel

_ALLOCATIONS = ("NRT_MemInfo_alloc", "NRT_Allocate")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')

# What native code calls: it takes pointers, and makes arrays and numbers of them for the user's functions.
_ENTRY = """from numba import carray

def entry_reset(state, rng, obs, result):
    reset(state, rng, {obs})
    return 0

def entry_step(state, action, rng, obs, result):
    reward, terminated, truncated = step(state, {action}, rng, {obs})
    result.reward = reward
    result.terminated = terminated
    result.truncated = truncated
    return 0
"""


def compile_kernel(kernel: PythonKernel, observation: RowLayout, action: RowLayout) -> KernelProgram:
    """Return the compiled kernel.

    Raises:
        UsageError: Numba refuses a function, which is named with its line; or it allocates memory.
    """
    text = _ENTRY.format(obs=_view("obs", observation), action=_view("action", action, is_action=True))
    folder = _cache_folder(_digest(kernel, text))
    how: dict[str, Any] = {"boundscheck": kernel.is_debug, "error_model": "python", "fastmath": False}
    scope: dict[str, Any] = {
        "reset": _jit(kernel.reset, how),
        "step": _jit(kernel.step, how),
        "__name__": __name__,
    }
    path = "<stepmill kernel>" if folder is None else _write_once(folder / "entry.py", text)
    exec(compile(text, path, "exec"), scope)  # the text is ours
    how["cache"] = folder is not None
    state, rng, obs = numba.from_dtype(kernel.state), rng_type, _pointer(observation)
    result = numba.from_dtype(RESULT)
    reset = numba.types.int64(state, rng, obs, result)
    step = numba.types.int64(state, _pointer(action), rng, obs, result)
    code = []
    for name, signature, function in (("reset", reset, kernel.reset), ("step", step, kernel.step)):
        dispatcher = _compile(kernel, scope[f"entry_{name}"], signature, how, function)
        code.append(dispatcher.overloads[dispatcher.signatures[0]])
        if not sum(dispatcher.stats.cache_hits.values()):  # what is refused is not kept
            _check_allocations(kernel, function, code[-1], folder)
    addresses = [int(item.library.get_pointer_to_function(item.fndesc.llvm_func_name)) for item in code]
    return KernelProgram(
        name=kernel.name,
        call=KernelCall.NUMBA,
        reset=addresses[0],
        step=addresses[1],
        state=kernel.state,
        observation=observation,
        action=action,
        max_episode_steps=kernel.max_episode_steps,
        methods=kernel.methods,
        explain=explain,
        code=code,
        prepare=getattr(kernel, "prepare", None),
    )


def _jit(function: Any, how: dict[str, Any], made: dict[int, Any] | None = None) -> Any:
    """Return a function as Numba compiles it: one in which the plain functions that it calls are compiled, too."""
    made = {} if made is None else made
    if isinstance(function, CPUDispatcher) or id(function) in made:
        return made.get(id(function), function)
    made[id(function)] = function  # one that calls itself is left to Numba
    scope = inspect.getclosurevars(function)
    names = {name: _jit(value, how, made) for name, value in scope.globals.items() if _is_users(value)}
    cells = {name: _jit(value, how, made) for name, value in scope.nonlocals.items() if _is_users(value)}
    closure = tuple(
        python_types.CellType(cells[name]) if name in cells else cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    copy = python_types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, closure
    )
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    made[id(function)] = numba.njit(**how)(copy)
    return made[id(function)]


def _is_users(value: object) -> bool:
    is_plain = isinstance(value, python_types.FunctionType)
    return is_plain and str(value.__module__).partition(".")[0] not in ("numpy", "numba", "math")


def _compile(
    kernel: PythonKernel, entry: Any, signature: Any, how: dict[str, Any], function: Callable[..., Any]
) -> Any:
    try:
        dispatcher = numba.njit(**how)(entry)
        dispatcher.compile(signature)
    except NumbaError as exc:
        raise UsageError(_refusal(kernel, function, exc)) from exc
    except Exception:
        # What was kept names a module that this process cannot import, or cannot be read: it is made again.
        if not how["cache"]:
            raise
        return _compile(kernel, entry, signature, {**how, "cache": False}, function)
    return dispatcher


def _refusal(kernel: PythonKernel, function: Callable[..., Any], error: NumbaError) -> str:
    """Return what Numba says, with the line of the user's function where it stopped."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    own = os.path.basename(inspect.getsourcefile(function) or "")
    places = [(file, line) for file, line in _PLACE.findall(text) if os.path.basename(file) == own]
    where = f", {own} line {places[-1][1]}" if places else ""
    return (
        f"Numba cannot compile {function.__name__} of the kernel {kernel.name}{where}; change it, or try it as Python with "
        f"backend='serial' and kernel(compiled=False). Numba says:\n{text}"
    )


def _check_allocations(kernel: PythonKernel, function: Callable[..., Any], code: Any, folder: Path | None) -> None:
    """Refuse code that allocates memory in each step: all threads would wait for each other there."""
    if not any(name in code.library.get_llvm_str() for name in _ALLOCATIONS):
        return
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    raise UsageError(
        f"{function.__name__} of the kernel {kernel.name} allocates memory (new arrays, lists, or array expressions); "
        "keep arrays in the state, and write to them element by element or with out[:] = ..."
    )


# ---- arguments ---------------------------------------------------------------------------------------------------------


def _view(name: str, layout: RowLayout, *, is_action: bool = False) -> str:
    """Return the expression of what a user's function gets for a row."""
    if layout.dtype.names is not None:
        return f"carray({name}, 1)[0]"
    if not layout.shape:
        return f"carray({name}, 1)[0]" if is_action else f"carray({name}, (1,))"
    return f"carray({name}, {layout.shape})"


def _pointer(layout: RowLayout) -> Any:
    return numba.types.CPointer(numba.from_dtype(layout.dtype))  # type: ignore[no-untyped-call]


# ---- the cache ---------------------------------------------------------------------------------------------------------


def _cache_folder(digest: str) -> Path | None:
    """Return the directory of one kernel; None where none can be made."""
    root = os.environ.get("NUMBA_CACHE_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "stepmill", "kernels"
    )
    folder = Path(root).expanduser() / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _write_once(path: Path, text: str) -> str:
    """Make a file as a whole, unless it is there: Numba looks at the time of its last change."""
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(text)
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            fresh.unlink()
    return str(path)


def _digest(kernel: PythonKernel, text: str) -> str:
    parts = [text, __version__, numba.__version__, repr(kernel.state), repr(kernel.is_debug)]
    for function in (kernel.reset, kernel.step):
        parts.extend(_code_parts(function, set()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _code_parts(function: Any, seen: set[int]) -> Iterator[str]:
    """Yield all that the machine code of a function depends on: its code, and what its names stand for."""
    function = getattr(function, "py_func", function)
    if id(function) in seen or not isinstance(function, python_types.FunctionType):
        yield "" if isinstance(function, python_types.FunctionType) else _value_part(function)
        return
    seen.add(id(function))
    yield from _constants(function.__code__)
    scope = inspect.getclosurevars(function)
    for name, value in sorted({**scope.globals, **scope.nonlocals}.items()):
        yield name
        yield from _code_parts(value, seen)


def _constants(code: python_types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            yield from _constants(constant)
        else:
            yield repr(constant)


def _value_part(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() + repr((value.dtype, value.shape))
    if isinstance(value, python_types.ModuleType):
        return f"{value.__name__} {getattr(value, '__version__', '')}"
    return repr(value)


# ---- faults ------------------------------------------------------------------------------------------------------------


class _Raised(ctypes.Structure):
    """What Numba's code leaves of an exception."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int32),
        ("digest", ctypes.c_void_p),
        ("unwrap", ctypes.c_void_p),
        ("num_allocated", ctypes.c_int32),
    ]


def explain(status: int, raised: int, message: str) -> Raised:
    """Return type and message of the exception that compiled code has raised, with the line where it is known."""
    if not raised:
        return "KernelError", message or f"status {status}"
    info = _Raised.from_address(raised)
    if info.num_allocated > 0:  # its arguments are values of the run, whose memory only Numba's own caller can read
        return "KernelError", "it raised an exception whose text holds values; give it a constant text to see it here"
    kind, arguments, place = pickle.loads(ctypes.string_at(info.data, info.size))
    where = f" ({os.path.basename(place[1])} line {place[2]}, in {place[0]})" if place else ""
    return kind.__name__, ", ".join(str(argument) for argument in arguments or ()) + where
