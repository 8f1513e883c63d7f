"""Tests and programs that run with the original and with ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepmill.spec.errors import UsageError
from tests.originals.rows import ORIGINAL, OURS


class Maker:
    """Makes objects of one side, and closes them."""

    def __init__(self, whose: str) -> None:
        self.whose, self.is_ours = whose, whose == OURS
        self.made: list[Any] = []

    def keep(self, one: Any) -> Any:
        """Return an object, which is closed at the end."""
        self.made.append(one)
        return one

    def refuses(self, error: type[BaseException] = UsageError, match: str = "") -> Any:
        """Expect an error of ours."""
        return pytest.raises(error, match=match) if self.is_ours else contextlib.nullcontext()

    def only_ours(self, error: Any = TypeError) -> Any:
        """Expect an error of the original's."""
        return contextlib.nullcontext() if self.is_ours else pytest.raises(error)

    def close(self) -> None:
        """Close the objects."""
        for one in self.made:
            one.close()


def assert_same_with_either(program: Callable[[Any], Any], maker: Callable[[str], Any]) -> None:
    """Run a program with the maker of either side, which is closed after it. Both must return the same."""
    found = []
    for whose in (ORIGINAL, OURS):
        make = maker(whose)
        found.append(program(make))
        make.close()
    assert found[0] == found[1]


def fixture_of(maker: Callable[[str], Any]) -> Any:
    """Return a fixture `make`: the maker of the side under test, which is closed at the end."""

    @pytest.fixture
    def make(whose: str) -> Iterator[Any]:
        made = maker(whose)
        yield made
        made.close()

    return make


def raises(whose: str, *, ours: Any = (), original: Any = ()) -> Any:
    """Expect the exception of that side; () is none."""
    expected = ours if whose == OURS else original
    return pytest.raises(expected) if expected else contextlib.nullcontext()
