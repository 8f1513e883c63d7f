"""Copies of functions for Numba, with which Numba compiles again all that they call.

A compiled function keeps the values that its globals had when it was first compiled, and Numba's own cache (`cache=True`) those of
another process. A kernel must not use such code, which would enter the kernel's cache as code for the current values.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numba
from numba.core.registry import CPUDispatcher
from numba.core.typing.templates import builtin_registry

from stepmill.kernels.code_digest import attribute_names, content_of, global_names, is_fixed, signatures_of


class FreshCopies:
    """Copies of the functions of one kernel. A function is copied once, so that functions may call each other.

    Args:
        options: Numba's options for functions that the user has not compiled.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._copies: dict[tuple[object, ...], Any] = {}

    def copy(self, value: Any, names: list[str] | None = None) -> Any:
        """Return a function compiled lazily, a module with copies of the functions that are named, or the value itself."""
        if isinstance(value, types.ModuleType) and not is_fixed(value.__name__):
            return self._copy_module(value, names or [])
        if type(value) is tuple:
            return tuple(self.copy(item, names) for item in value)
        function = value.py_func if isinstance(value, CPUDispatcher) else value
        if not isinstance(function, types.FunctionType) or is_fixed(str(function.__module__)) or _is_known(function):
            return value
        if (id(value),) not in self._copies:
            self._copy_function(value, function)
        return self._copies[id(value),]

    def _copy_function(self, value: Any, function: types.FunctionType) -> None:
        scope = dict(function.__globals__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        code = function.__code__
        twin = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells)
        twin.__kwdefaults__ = function.__kwdefaults__
        twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
        if value is function:
            dispatcher = numba.njit(**self._options)(twin)
        else:
            dispatcher = numba.jit(
                locals=value.locals, pipeline_class=value._compiler.pipeline_class, **value.targetoptions
            )(twin)
        self._copies[id(value),] = dispatcher
        names = attribute_names(code)
        scope.update((name, self.copy(scope[name], names)) for name in global_names(code) if name in scope)
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.copy(content_of(original), names)
        signatures = [] if value is function else signatures_of(value)
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()

    def _copy_module(self, module: types.ModuleType, names: list[str]) -> types.ModuleType:
        key = id(module), *names
        if key not in self._copies:
            self._copies[key] = twin = types.ModuleType(module.__name__)
            vars(twin).update(vars(module))
            vars(twin).update((name, self.copy(vars(module)[name], names)) for name in names if name in vars(module))
        return self._copies[key]  # type: ignore[no-any-return]


def _is_known(function: types.FunctionType) -> bool:
    """Whether Numba has its own code for a function."""
    return any(value is function for value, _ in builtin_registry.globals)
