"""What the core asks Python to decide about, the events that `drain` returns; the decisions that `apply` takes; and what `view` returns.

An event is returned again until a decision has moved its env or worker on, so that an interrupt between `drain` and `apply`
loses nothing. Events and decisions are keyed by env and ticket, or by worker and generation (how often it was restarted). A decision
whose key is not current is stale: `apply` drops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Remedy(IntEnum):
    """What becomes of the episode of an env that has a fault, or whose object is lost; the numbers are those of `env_table.hpp`.

    RAISE: it is lost, the fault is about to be raised, and the env is FAULTED.
    CUT: it ends; the result says so. A command that begins an episode is given again, and loses none.
    MASK: the same, and the env is EXHAUSTED once that result is received. From then on until a reset, its rows have reward 0, no flags, no
        info and its last observation.
    KEEP: it is replayed. Until then the env counts as busy.
    """

    RAISE = 0
    CUT = 1
    MASK = 2
    KEEP = 3


class FaultKind(IntEnum):
    """Why a command has no valid result; the numbers are those of `_native/shared/protocol.hpp`."""

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
    ticket: int
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
    """A worker has ended or was given up, and its successor is not being started."""

    worker: int
    generation: int


Event = EnvFailed | ReplayPaused | WorkerDied


# ---- decisions ---------------------------------------------------------------------------------------------------------
# `PoolState.apply` commits each with the method of its name (decisions.cpp), Replay with begin_replay, ServeWorker with finish_restart.


@dataclass(frozen=True)
class EnvDecision:
    """A decision about an env. `ticket`: of its newest command."""

    env_id: int
    ticket: int


@dataclass(frozen=True)
class Settle(EnvDecision):
    """The pending command has a fault, or the env cannot be replayed. Says what becomes of its episode.

    The episode of an idle env is cut by its next step. NEXT_STEP and DISABLED return the result of a cut
    episode at once, SAME_STEP after a reset. `info`: the `info["fault"]` of that result.
    """

    remedy: Remedy
    info: Mapping[str, str]


@dataclass(frozen=True)
class MarkNew:
    """The object of a FAULTED env was rebuilt, so that the env can be reset and stepped again."""

    env_id: int


@dataclass(frozen=True)
class Replay(EnvDecision):
    """Play the episode of a suspended env again; pause with ReplayAt after each command whose number is in `places`.

    If the pending command begins an episode, it is given again instead, and the env is not suspended any more.
    `is_finished_here`: after the last command, finish the replay in place of ReplayPlayed.
    """

    places: Sequence[int]
    is_finished_here: bool


class ContinueReplay(EnvDecision):
    """Play on after ReplayAt. After ReplayPlayed, the env is in the state that the user expects: give its pending command."""


@dataclass(frozen=True)
class WorkerDecision:
    """A decision about a worker. `generation`: how often it was restarted."""

    worker: int
    generation: int


@dataclass(frozen=True)
class BeginRestart(WorkerDecision):
    """Commands for the worker's envs wait for its successor.

    Attributes:
        remedy: of the episodes of its envs. CUT, MASK: those of idle envs, by their next step. KEEP: all are replayed after the restart.
            RAISE: none is lost, because FailWorker came before.
        info: as of Settle, of idle envs.
        is_recycling: none of its envs is in an episode, and none of their results is lost.
    """

    remedy: Remedy
    info: Mapping[str, str]
    is_recycling: bool = False


@dataclass(frozen=True)
class ServeWorker(WorkerDecision):
    """The successor carries out the commands that waited for it. `pid`, `pidfd`: of its process, which is watched unless `pidfd` is -1."""

    pidfd: int
    pid: int


class CancelRestart(WorkerDecision):
    """There is no successor: commands that wait for it become faults."""


@dataclass(frozen=True)
class FailWorker(WorkerDecision):
    """The worker stays dead: as CancelRestart, and its envs are FAULTED, those with a result once it is received."""


Decision = EnvDecision | MarkNew | WorkerDecision


# ---- views -------------------------------------------------------------------------------------------------------------


class ServerView(NamedTuple):
    """What the core knows of an env object, a server.

    Attributes:
        server, worker: its number, and that of its worker.
        env_id: the env that it serves; None: it is a spare in the queue.
        ticket: number of its newest command.
        phase: its ObjectPhase of `phases.def`.
        is_logged: whether the log of its episode is complete.
        episode, length: number of the episode, and how many of its results were received.
        length_before: the length of the previous episode.
        is_pending: whether its env has a command whose result was not received.
        is_between: whether the pending command begins an episode, or the next command will.
        is_staged: whether its next episode was begun in advance.
    """

    server: int
    worker: int
    env_id: int | None
    ticket: int
    phase: str
    is_logged: bool
    episode: int
    length: int
    length_before: int
    is_pending: bool
    is_between: bool
    is_staged: bool

    @property
    def is_suspended(self) -> bool:
        """Whether its episode must be replayed before the env's results can be received."""
        return self.phase in ("AWAITING_REPLAY", "REPLAYING", "PAUSED")

    @property
    def first_place(self) -> int:
        """The last place before the part to be replayed, which begins with a pending reset or the reset of the episode."""
        return self.length if self.is_between else 0

    @property
    def is_ahead(self) -> bool:
        """Whether a command is pending or staged: calls that are made now come after it."""
        return self.is_pending or self.is_staged


class LaneView(NamedTuple):
    """What the core knows of a thread of a worker that may be dead.

    Attributes:
        running_env: the env whose command it ran last; None: a spare, or no command.
        is_in_request: whether it was in a slow request and not in a command, or the pool is closed.
    """

    running_env: int | None
    is_in_request: bool
