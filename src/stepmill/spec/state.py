"""What an env is doing, as the pool sees it."""

from __future__ import annotations

from enum import IntEnum


class EnvState(IntEnum):
    """Moves: IDLE → BUSY by send or reset; BUSY → READY when it is done; READY → IDLE by recv; BUSY → FAULTED by a fault;
    FAULTED → BUSY by a reset. The numbers are those of the native ledger.
    """

    IDLE = 0  # waits for an action
    BUSY = 1  # steps or resets
    READY = 2  # its result waits for recv
    FAULTED = 3  # has no honest result; a reset brings it back
