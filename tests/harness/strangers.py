"""Values that do harm where they are unpickled, as a program may send them that has got the port of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stepmill.backends.ray import stream


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Unloadable:
    """A value, or a function, that can be pickled and not loaded."""

    def __call__(self) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_import_error, ()


def _raise_import_error() -> None:
    raise ImportError("no such luck")


def bomb_message(folder: Path) -> bytes:
    """Return a message that makes a file in a folder when it is unpickled."""
    return b"".join(bytes(part) for part in stream._parts(Bomb(folder / "unpickled"), np.zeros(3, np.uint8)))
