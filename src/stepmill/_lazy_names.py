"""Names of a package that are loaded on first use: those that it imports `if TYPE_CHECKING`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from its source: type checkers read the same lines."""
    module = sys.modules[package]
    blocks = [node.body for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> object:
        """Load a public name from its module, once."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value: object = import_module(f"{home}.{name}") if home == package else getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *homes}), sorted(homes)
