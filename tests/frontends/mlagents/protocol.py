"""Names that the tests and their Unity players share, and how a player becomes a built game."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from pathlib import Path

PLAYER = Path(__file__).with_name("player.py")
STATS_ID = uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520")
FLOATS_ID = uuid.UUID("60ccf7d0-4f7e-11ea-b238-784f4387d1f7")
UNKNOWN_ID = uuid.UUID("00000000-0000-0000-0000-0000000000ff")
IMAGE = (4, 5, 3)


def make_game(folder: Path, player: Path = PLAYER) -> Path:
    """Make a player an executable; its errors are in the file `errors` beside it."""
    program = folder / "game.x86_64"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -W ignore "{player}" "$@" 2>>"{folder}/errors"\n')
    program.chmod(0o755)
    return program


def free_ports(num: int) -> int:
    """Return the first of so many ports in a row that nobody uses."""
    bases = range(20000 + os.getpid() % 20000, 60000, 16)
    return next(base for base in bases if all(is_free(port) for port in range(base, base + num)))


def is_free(port: int) -> bool:
    """Whether no process listens on a port."""
    try:
        with socket.socket() as probe:
            probe.bind(("localhost", port))
    except OSError:
        return False
    return True
