"""What the pool state asks Python to decide about: the events that `drain` returns.

An event is returned again until a decision has moved its env or worker on, so that an interrupt between `drain` and the
decision loses nothing. It is identified by its env and ticket, or by its worker and generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from stepmill import _native


class FaultKind(IntEnum):
    """Why a command has no valid result; the numbers are those of `_native/protocol.hpp`."""

    RAISED = 1
    BAD_OUTPUT = 2
    BAD_ACTION = 3
    DIED = 4
    TIMED_OUT = 5
    NEIGHBOUR = 6
    INTERRUPTED = 7


@dataclass(frozen=True)
class EnvFailed:
    """A pending command ended in a fault.

    Attributes:
        env_id: the env of the command.
        number: of the fault's kind. A worker may have overwritten it.
        record: encoded description of the exception, or None.
        worker: the worker of the env.
        ticket: number of the command.
        begins_episode: whether the command begins an episode.
        was_resetting: whether the env was in `reset`; a step may call `reset`, too.
    """

    env_id: int
    number: int
    record: bytes | dict[str, str] | None
    worker: int
    ticket: int
    begins_episode: bool
    was_resetting: bool

    @property
    def kind(self) -> FaultKind | None:
        """The kind of the fault; None if its number is unknown."""
        return FaultKind(self.number) if self.number in FaultKind._value2member_map_ else None


@dataclass(frozen=True)
class ReplayPaused:
    """A replay waits for a decision. `step`: number of its newest command; that of its reset is 0."""

    env_id: int
    step: int


class ReplayAt(ReplayPaused):
    """It has reached a command after which calls must be repeated."""


class ReplayPlayed(ReplayPaused):
    """It has played the whole log, with the same outcomes."""


class ReplayDiffers(ReplayPaused):
    """The outcome of its newest command differs from the logged one."""


class ReplayFailed(ReplayPaused):
    """The env has a fault at this step, or its worker died."""


@dataclass(frozen=True)
class WorkerDied:
    """A worker has ended or was given up, and its successor is not being started. `generation`: how often it was restarted."""

    worker: int
    generation: int


Event = EnvFailed | ReplayPaused | WorkerDied


def read_faults(state: _native.PoolState) -> list[EnvFailed]:
    """Return the faults of pending commands, and leave all events to the fault handler."""
    return [event for event in state.drain(acknowledge=False) if isinstance(event, EnvFailed)]
