"""Knows when the program ends: its exit functions run, and close the pools that are left."""

from __future__ import annotations

import atexit
import weakref

from stepmill import _native


def is_ending() -> bool:
    """Return whether the program's exit functions run."""
    return _native.is_exiting()


# The exit function of `weakref` closes the pools that are left. Exit functions run in the reverse order of their
# registration, and `weakref` registers its own with the first finalizer: this one makes sure that there is one.
weakref.finalize(is_ending, int)
atexit.register(_native.begin_exit)
