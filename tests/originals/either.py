"""Runs one program with the original and with ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.originals.rows import ORIGINAL, OURS


def assert_same_with_either(program: Callable[[Any], Any], maker: Callable[[str], Any]) -> None:
    """Run a program with the maker of either side, which is closed after it. Both must return the same."""
    found = []
    for whose in (ORIGINAL, OURS):
        make = maker(whose)
        found.append(program(make))
        make.close()
    assert found[0] == found[1]
