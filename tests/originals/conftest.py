"""Tests here run other people's engines, which leave processes and descriptors behind: those are ended, and not counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import leaks


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Takes the place of the fixture that counts."""
    yield
    leaks.kill_descendants()
