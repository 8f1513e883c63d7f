"""How hard tests try: property tests as `make test` does, or many times as hard when STEPMILL_HYPOTHESIS=explore."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

EXPLORES = os.environ.get("STEPMILL_HYPOTHESIS") == "explore"
_FACTOR = 20 if EXPLORES else 1


def examples(count: int) -> int:
    """Return how many examples to try where `make test` tries `count`."""
    return count * _FACTOR


def every_second(firsts: Iterable[object], seconds: Iterable[object]) -> list[Any]:
    """Return all pairs, as parameters of a test. Each value is in a pair that `make test` tries; every second pair is marked slow."""
    pairs = product(enumerate(firsts), enumerate(seconds))
    return [pytest.param(a, b, marks=pytest.mark.slow if (m + n) % 2 else ()) for (m, a), (n, b) in pairs]
