"""Copies of functions for Numba, with which Numba compiles again all that they call.

A compiled function keeps the values that its globals had when it was first compiled, and Numba's own cache (`cache=True`) those of
another process. A kernel must not use such code, which would enter the kernel's cache as code for the current values.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numba
from numba.core.extending import _Intrinsic
from numba.core.registry import CPUDispatcher
from numba.core.typing.templates import builtin_registry

from stepmill.kernels.code_digest import (
    attribute_names,
    content_of,
    global_names,
    is_fixed,
    jitable_options,
    signatures_of,
)


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
        if isinstance(value, tuple):
            items = [self.copy(item, names) for item in value]
            return value._make(items) if hasattr(value, "_make") else tuple(items)
        if isinstance(value, _Intrinsic) and not is_fixed(str(value._defn.__module__)):
            return self._copy_intrinsic(value)
        function = value.py_func if isinstance(value, CPUDispatcher) else value
        if not isinstance(function, types.FunctionType) or is_fixed(str(function.__module__)) or _is_known(function):
            return value
        if (id(value),) not in self._copies:
            self._copy_function(value, function)
        return self._copies[id(value),]

    def _copy_function(self, value: Any, function: types.FunctionType) -> None:
        scope = dict(function.__globals__)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        code, names = function.__code__, attribute_names(function.__code__)
        defaults, keywords = self.copy(function.__defaults__, names), function.__kwdefaults__ or {}
        twin = types.FunctionType(code, scope, function.__name__, defaults, cells)
        twin.__kwdefaults__ = {name: self.copy(default, names) for name, default in keywords.items()}
        twin.__module__, twin.__qualname__ = function.__module__, function.__qualname__
        if value is function:
            options: dict[str, Any] = jitable_options(function) or {"nopython": True, **self._options}
        else:
            options = {"locals": value.locals, "pipeline_class": value._compiler.pipeline_class, **value.targetoptions}
        dispatcher = numba.jit(**options)(twin)
        self._copies[id(value),] = dispatcher
        scope.update((name, self.copy(scope[name], names)) for name in global_names(code) if name in scope)
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self.copy(content_of(original), names)
        signatures = [] if value is function else signatures_of(value)
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()

    def _copy_intrinsic(self, value: _Intrinsic) -> _Intrinsic:
        if (id(value),) not in self._copies:
            twin = _Intrinsic(value._name, value._defn, value._prefer_literal, **value._ctor_kwargs)
            twin._register()
            self._copies[id(value),] = twin
        return self._copies[id(value),]  # type: ignore[no-any-return]

    def _copy_module(self, module: types.ModuleType, names: list[str]) -> types.ModuleType:
        key = id(module), *names
        if key not in self._copies:
            self._copies[key] = twin = types.ModuleType(module.__name__)
            vars(twin).update(vars(module))
            vars(twin).update((name, self.copy(vars(module)[name], names)) for name in names if name in vars(module))
        return self._copies[key]  # type: ignore[no-any-return]


def _is_known(function: types.FunctionType) -> bool:
    """Whether Numba has other code for a function than its own."""
    return jitable_options(function) is None and any(value is function for value, _ in builtin_registry.globals)
