"""State of the learner's program that a fresh worker process does not inherit: warnings filters, registered envs and adapters.

    learner   ProgramState.read()  ──► Build ──►  worker   apply_filters(), load_registries()

A fork of the learner inherits this state.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Literal, NamedTuple, Protocol, cast

# Maps each library with a registry of envs to the module that dumps and loads the registry. This package imports
# neither.
_REGISTRIES = {"gymnasium": "stepmill.envs.gymnasium_registry", "stepmill.envs.registered": "stepmill.envs.registered"}

_Action = Literal["default", "error", "ignore", "always", "module", "once"]


class _RegistryModule(Protocol):
    def dump_registry(self) -> bytes: ...
    def load_registry(self, data: bytes) -> Callable[[], None]: ...


class WarningFilter(NamedTuple):
    """One entry of `warnings.filters`, as strings and numbers. `category` is a module and the name of a class in it."""

    action: str
    message: str
    category: tuple[str, str]
    module: str
    lineno: int


class ProgramState(NamedTuple):
    """The warnings filters of a program, and the registries of libraries by the name of the library."""

    filters: tuple[WarningFilter, ...]
    registries: Mapping[str, bytes]

    @classmethod
    def read(cls) -> ProgramState:
        """Return the state of this process, with the registries of the libraries that it has imported."""
        filters = [
            WarningFilter(action, _pattern(message), (each.__module__, each.__qualname__), _pattern(module), lineno)
            for action, message, category, module, lineno in warnings.filters
            for each in (category if isinstance(category, tuple) else (category,))
        ]
        dumped = {
            library: cast("_RegistryModule", import_module(home)).dump_registry()
            for library, home in _REGISTRIES.items()
            if library in sys.modules
        }
        return cls(tuple(filters), dumped)

    def apply_filters(self) -> None:
        """Replace the warnings filters of this process.

        Filters whose category is in a module that is not imported are omitted, because the import may take seconds.
        """
        warnings.resetwarnings()
        for each in self.filters:
            category = _loaded_category(*each.category)
            if category is not None:
                action = cast("_Action", each.action)
                warnings.filterwarnings(action, each.message, category, each.module, each.lineno, append=True)

    def load_registries(self) -> Callable[[], None]:
        """Return a function that updates the registries of this process. Call it before each env is built."""
        loaded = [
            cast("_RegistryModule", import_module(_REGISTRIES[library])).load_registry(data)
            for library, data in self.registries.items()
        ]

        def register_all() -> None:
            for register in loaded:
                register()

        return register_all


def _pattern(pattern: re.Pattern[str] | str | None) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""


def _loaded_category(module: str, name: str) -> type[Warning] | None:
    found: object = None
    with contextlib.suppress(AttributeError):
        found = functools.reduce(getattr, name.split("."), cast("object", sys.modules.get(module)))
    return found if isinstance(found, type) and issubclass(found, Warning) else None
