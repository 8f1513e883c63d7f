"""A digest of everything that a compiled function depends on: its code, and the values that Numba compiles into it.

Numba takes global names, cells of closures, attributes of modules and default arguments as constants, so machine code is only
right as long as none of them changes. What cannot be compared from one process to the next has no digest, and is not cached.
"""

from __future__ import annotations

import builtins
import dis
import enum
import hashlib
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.extending import _Intrinsic
from numba.core.registry import CPUDispatcher
from numba.core.typing.templates import builtin_registry

_EXACT = (type(None), bool, int, float, complex, str, bytes, type(...))
# Their code changes with their version only, and the interpreter's is that of the standard library.
_FIXED = frozenset({"numpy", "numba", "llvmlite", *sys.stdlib_module_names}) - {"__main__"}


class NotComparableError(Exception):
    """A value that code depends on cannot be compared between processes. The text names the value."""


def digest_of(*values: Any, has_lines: bool = True) -> str:
    """Return a digest of values, and of everything that functions among them depend on.

    Args:
        has_lines: whether functions differ if their line numbers differ, which faults name.
    Raises:
        NotComparableError: the content of a value's type is not known.
    """
    digest = hashlib.sha256()
    versions = (sys.version, np.__version__, numba.__version__, llvmlite.__version__)
    for part in (*versions, *_Walk(has_lines=has_lines).parts("", values)):
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:32]


class _Walk:
    """Yields the parts of values. A value that was met before yields its number, so that cycles end."""

    def __init__(self, *, has_lines: bool) -> None:
        self._has_lines = has_lines
        self._met: dict[int, tuple[int, Any]] = {}  # the values are kept, so that no id is used again
        # The functions whose parts are being yielded, from the outermost to the innermost.
        self._open: list[types.FunctionType] = []

    def parts(self, name: str, value: Any) -> Iterator[str | bytes]:
        """Yield the parts of a value that code reaches as `name`."""
        kind = type(value)
        yield f"{kind.__module__}.{kind.__qualname__}"
        if kind in _EXACT:
            yield repr(value)
        elif isinstance(value, (np.dtype, np.generic, np.ndarray)):
            yield from _array_parts(name, value)
        elif id(value) in self._met:
            if any(each is getattr(value, "py_func", value) for each in self._open[:-1]):
                # Numba's bug.
                raise NotComparableError(f"{name}, one of several functions that call each other in a circle")
            yield str(self._met[id(value)][0])
        else:
            _check_known(name, value)
            self._met[id(value)] = len(self._met), value
            yield from self._compound_parts(name, value)

    def _compound_parts(self, name: str, value: Any) -> Iterator[str | bytes]:
        if isinstance(value, (tuple, list)):
            yield repr((len(value), getattr(value, "_fields", None)))
            for index, item in enumerate(value):
                yield from self.parts(f"{name}[{index}]", item)
        elif isinstance(value, slice):  # a constant since Python 3.14
            yield from self.parts(name, (value.start, value.stop, value.step))
        elif isinstance(value, dict):
            yield from self.parts(name, list(value.items()))
        elif isinstance(value, (set, frozenset)):
            yield from sorted(digest_of(item, has_lines=self._has_lines) for item in value)
        elif isinstance(value, CPUDispatcher):
            yield from self.parts(f"the options of {name}", value.targetoptions)
            yield from self.parts(f"the locals of {name}", dict(value.locals))
            yield repr(signatures_of(value))
            yield from self.parts(name, value.py_func)
        elif isinstance(value, _Intrinsic):
            yield from self.parts(name, (value._defn, value._prefer_literal, value._ctor_kwargs))
        elif isinstance(value, types.FunctionType):
            yield from self._function_parts(name, value)
        elif isinstance(value, types.CodeType):
            yield from self._code_parts(name, value)
        elif isinstance(value, enum.Enum):
            yield from self.parts(name, (value.name, value.value))
        else:
            yield from self._named_parts(name, value)

    def _named_parts(self, name: str, value: Any) -> Iterator[str | bytes]:
        """Yield the parts of a value that its name identifies: a type, a built-in function or a fixed module."""
        if isinstance(value, numba.types.Type):
            yield str(value)
        elif isinstance(value, enum.EnumMeta):
            yield from self.parts(name, [(each, value[each].value) for each in value.__members__])
        elif isinstance(value, types.ModuleType) and is_fixed(value.__name__):
            yield value.__name__
        elif isinstance(value, (type, types.BuiltinFunctionType, np.ufunc)) and is_fixed(_module_of(value)):
            yield f"{_module_of(value)}.{getattr(value, '__qualname__', value.__name__)}"
        elif isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):  # a named tuple
            yield from self.parts(name, (value.__qualname__, value._fields, getattr(value, "_field_defaults", {})))
        else:
            raise NotComparableError(f"{name}, a {type(value).__module__}.{type(value).__qualname__}")

    def _function_parts(self, name: str, function: types.FunctionType) -> Iterator[str | bytes]:
        if is_fixed(str(function.__module__)):
            yield f"{function.__module__}.{function.__qualname__}"
            return
        yield from self.parts(f"the options of {name}", jitable_options(function))
        yield from self.parts(name, function.__code__)
        yield from self.parts(f"a default of {name}", (function.__defaults__, function.__kwdefaults__))
        attributes = attribute_names(function.__code__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        values = {cell_name: content_of(cell) for cell_name, cell in cells}
        self._open.append(function)
        known = {**vars(builtins), **function.__globals__}
        values.update((each, known[each]) for each in global_names(function.__code__) if each in known)
        _check_overloads(attributes)
        for each, value in sorted(values.items()):
            yield each
            yield from self._reached_parts(each, value, attributes)
        self._open.pop()

    def _reached_parts(self, name: str, value: Any, attributes: Iterable[str]) -> Iterator[str | bytes]:
        """Yield the parts of a value, and of a module that may be edited those attributes that the code names."""
        if not isinstance(value, types.ModuleType) or is_fixed(value.__name__):
            yield from self.parts(name, value)
            return
        yield value.__name__
        if id(value) in self._met:
            return
        self._met[id(value)] = len(self._met), value
        for each in attributes:
            if each in vars(value):
                yield each
                yield from self._reached_parts(f"{name}.{each}", vars(value)[each], attributes)
        del self._met[id(value)]  # another function may name other attributes

    def _code_parts(self, name: str, code: types.CodeType) -> Iterator[str | bytes]:
        yield code.co_code
        yield getattr(code, "co_exceptiontable", b"")
        if self._has_lines:
            yield repr((code.co_filename.rpartition("/")[2], list(code.co_lines())))
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags))
        yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_name))
        yield from self.parts(f"a constant of {name}", list(code.co_consts))


def signatures_of(compiled: Any) -> list[Any]:
    """Return the signatures with which a function was declared, to which its arguments are converted."""
    return [] if compiled._can_compile else [each.signature for each in compiled.overloads.values()]


def jitable_options(function: types.FunctionType) -> dict[str, Any] | None:
    """Return the options that a function was given to `register_jitable` with; None if it was not."""
    for template in builtin_registry.functions:
        made = getattr(getattr(template, "_overload_func", None), "__qualname__", "")
        if template.key is function and made.startswith("register_jitable."):
            return {**template._jit_options, "inline": template._inline.value}
    return None


def _check_known(name: str, value: Any) -> None:
    """Refuse values whose use does not show what the code depends on."""
    if value is getattr or value is hasattr:
        raise NotComparableError(f"{name}, which takes names of attributes")
    if any(value is template.key for template in builtin_registry.functions if _is_of_user(template)):
        raise NotComparableError(f"an overload of {name}")


def _check_overloads(attributes: Iterable[str]) -> None:
    """Refuse code that the user has given to Numba for operators, functions of fixed modules, and attributes and methods of Numba's types.

    Numba finds it by types, and compiles it once in a process.
    """
    for template in filter(_is_of_user, (*builtin_registry.functions, *builtin_registry.attributes)):
        name: Any = getattr(template, "_attr", None)
        if name in attributes and is_fixed(template.key.__module__):
            raise NotComparableError(f"an overload of the attribute {name}")
        if name is None and template.key in vars(operator).values():
            raise NotComparableError(f"an overload of the operator {template.key.__name__}")
        if name is None and is_fixed(_module_of(template.key)) and template.key.__name__ in attributes:
            raise NotComparableError(f"an overload of {template.key.__name__}")


def _is_of_user(template: Any) -> bool:
    module = getattr(getattr(template, "_overload_func", None), "__module__", None)
    return module is not None and not is_fixed(module) and not module.startswith("stepmill.")


def _array_parts(name: str, value: Any) -> Iterator[str | bytes]:
    dtype = value if isinstance(value, np.dtype) else value.dtype
    if dtype.hasobject and not isinstance(value, np.dtype):
        raise NotComparableError(f"{name}, an array of objects")
    yield repr((dtype.str, dtype.descr if dtype.names else None, dtype.itemsize, dtype.alignment, dtype.fields))
    if isinstance(value, np.ndarray):
        yield repr((value.shape, value.strides, value.flags.c_contiguous, value.flags.f_contiguous))
    if not isinstance(value, np.dtype):
        yield value.tobytes()


def is_fixed(module: str) -> bool:
    return module.partition(".")[0] in _FIXED


def _module_of(value: Any) -> str:
    return "numpy" if isinstance(value, np.ufunc) else str(value.__module__)


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty, because the name is not bound yet
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def global_names(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    return {step.argval for each in _codes(code) for step in dis.get_instructions(each) if step.opname in loads}


def attribute_names(code: types.CodeType) -> list[str]:
    """Return all names in the code, so that a module with a second name there is also looked up completely."""
    return sorted({name for each in _codes(code) for name in each.co_names})
