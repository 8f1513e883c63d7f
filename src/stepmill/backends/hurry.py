"""How long workers may take to end: less after Ctrl-C, when all is to be over within a second."""

from __future__ import annotations

import sys

from stepmill.backends.program_end import is_ending

HURRY_S = 0.4


def hurried(timeout_s: float) -> float:
    """Return how many of these seconds workers have to close their envs, if they are to end now."""
    return min(timeout_s, HURRY_S) if is_interrupted() else timeout_s


def is_interrupted() -> bool:
    """Whether it is Ctrl-C that ends a pool: its KeyboardInterrupt passes through here, or has ended the program.

    A program that has dealt with it and goes on may take its time.
    """
    passing = sys.exc_info()[0]
    ended = getattr(sys, "last_type", None) if is_ending() else None  # set when its traceback was printed
    return any(kind is not None and issubclass(kind, KeyboardInterrupt) for kind in (passing, ended))
