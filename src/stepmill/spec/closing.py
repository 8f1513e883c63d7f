"""`CloseAtEnd`: objects that a `with` block closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class CloseAtEnd:
    """A context manager that calls `close`, which its class defines, at the end of the block."""

    def close(self) -> object:
        """End what the object owns."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
