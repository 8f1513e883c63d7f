"""How hard property tests try: as `make test` does, or many times as hard when STEPMILL_HYPOTHESIS=explore."""

from __future__ import annotations

import os

EXPLORES = os.environ.get("STEPMILL_HYPOTHESIS") == "explore"
_FACTOR = 20 if EXPLORES else 1


def examples(count: int) -> int:
    """Return how many examples to try where `make test` tries `count`."""
    return count * _FACTOR
