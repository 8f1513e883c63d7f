"""What a program sends that has got the port of a node."""

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


def bomb_message(folder: Path) -> bytes:
    """Return a message that makes a file in a folder when it is unpickled."""
    return b"".join(bytes(part) for part in stream._parts(Bomb(folder / "unpickled"), np.zeros(3, np.uint8)))
