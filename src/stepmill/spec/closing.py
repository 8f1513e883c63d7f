"""Closes objects at the end of a `with` block, or if a block raises an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class CloseAtEnd:
    """A context manager that calls `close`, which its class defines, at the end of the block."""

    def close(self) -> object:
        """Release everything that the object owns."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def close_on_error(close: Callable[[], object]) -> Iterator[None]:
    """Call `close` if the block raises an exception, so that a constructor that fails leaves no worker running."""
    try:
        yield
    except BaseException:
        close()
        raise
