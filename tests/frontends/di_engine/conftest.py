"""A fixture for tests of DI-engine's managers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

MakeManager = Callable[..., Any]


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """Make managers, `make_manager(cls, env_fns, **cfg)`; they are closed at the end."""
    made: list[Any] = []

    def make_one(cls: Any, env_fns: Any, **cfg: Any) -> Any:
        made.append(cls(env_fns, cfg))
        return made[-1]

    yield make_one
    for manager in made:
        manager.close()
    made.clear()
