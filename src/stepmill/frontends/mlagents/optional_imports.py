"""Imports mlagents_envs, which is optional. No other module imports it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache  # a failed import searches the whole path again
def load(module: str, name: str) -> Any:
    """Return a name of a module of mlagents_envs, or None if the library is not installed or lacks the name."""
    try:
        return getattr(import_module(f"mlagents_envs.{module}"), name, None)
    except ImportError:
        return None
