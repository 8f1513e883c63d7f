"""The tests here run other libraries' engines, which leave processes and descriptors behind: they are ended, not counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import leaks


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Replaces the fixture that fails a test for what it leaves behind."""
    yield
    leaks.kill_descendants()
