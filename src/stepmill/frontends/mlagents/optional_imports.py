"""The one place that imports mlagents_envs: what of it is used where it is installed. Nothing here needs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(module: str, name: str) -> Any:
    """Return a name of a module of mlagents_envs; None if this installation has no such thing, or there is none."""
    try:
        return getattr(import_module(f"mlagents_envs.{module}"), name, None)
    except ImportError:
        return None
