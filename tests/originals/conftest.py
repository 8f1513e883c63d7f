"""The tests here run other libraries' engines, which leave processes and descriptors behind: they are ended, not counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import leaks
from tests.originals.rows import ORIGINAL, OURS


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Replaces the fixture that fails a test for what it leaves behind."""
    yield
    leaks.kill_descendants()


@pytest.fixture(params=[ORIGINAL, OURS])
def whose(request: pytest.FixtureRequest) -> Any:
    """Whose classes the test uses."""
    return request.param
