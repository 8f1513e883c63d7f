"""Events, decisions and views of the pool state, which is called the core here.

`drain` returns events, about which Python decides. `apply` carries out decisions. `view` returns the state of env
objects.

`drain` returns an event again until a decision has changed the state of its env or worker. Therefore an interrupt
between `drain` and `apply` loses nothing. The key of an event or decision is an env and a ticket, or a worker and a
generation (how often the worker was restarted). If the key of a decision is not current, the decision is stale, and
`apply` drops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Remedy(IntEnum):
    """What happens to the episode of an env that has a fault, or whose object is lost.

    The numbers are those of `env_table.hpp`.

    RAISE: The episode is lost, the fault is about to be raised, and the env is FAULTED.
    CUT: The episode ends, and the result says so. A command that begins an episode is given again, and no episode is
        lost.
    KEEP: The episode is replayed. Until then the env counts as busy.
    """

    RAISE = 0
    CUT = 1
    KEEP = 2


class FaultKind(IntEnum):
    """Why a command has no valid result. `_native/shared/protocol.hpp` has the same numbers."""

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
        number: the number of the fault's kind. A worker may have overwritten it.
        record: the encoded description of the exception, or None.
        worker: the worker of the env.
        ticket: the number of the command.
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
        """The kind of the fault, or None if its number is unknown."""
        return FaultKind(self.number) if self.number in FaultKind._value2member_map_ else None


@dataclass(frozen=True)
class ReplayPaused:
    """A replay waits for a decision. `step` is the number of its newest command. The number of the reset is 0."""

    env_id: int
    ticket: int
    step: int


class ReplayAt(ReplayPaused):
    """The replay has reached a command after which calls must be repeated."""


class ReplayPlayed(ReplayPaused):
    """The replay has played the whole log, with the same outcomes."""


class ReplayDiffers(ReplayPaused):
    """The outcome of the newest command of the replay differs from the logged outcome."""


class ReplayFailed(ReplayPaused):
    """The env has a fault at this step, or its worker died."""


@dataclass(frozen=True)
class Death:
    """A worker has ended or was given up, and its successor is not being started.

    Attributes:
        worker, generation: the number of the worker, and how often it was restarted.
        env_ids: the envs that it serves, in order. With spares, these may differ from those of its plan.
        running: the envs whose commands it ran last, at most one per lane.
        faults: the pending commands that were lost.
    """

    worker: int
    generation: int
    env_ids: Sequence[int]
    running: Sequence[int]
    faults: Sequence[EnvFailed] = ()


Event = EnvFailed | ReplayPaused | Death


# ---- decisions ---------------------------------------------------------------------------------------------------------
# `PoolState.apply` commits each decision with the method of its name (decisions.cpp), except Replay with begin_replay
# and ServeWorker with finish_restart.


@dataclass(frozen=True)
class EnvDecision:
    """A decision about an env. `ticket` is that of its newest command."""

    env_id: int
    ticket: int


@dataclass(frozen=True)
class ResolveFault(EnvDecision):
    """The pending command has a fault, or the env cannot be replayed. `remedy` says what happens to the episode.

    The next step of an idle env cuts its episode. NEXT_STEP and DISABLED return the result of a cut episode at once,
    and SAME_STEP returns it after a reset. `info` is the `info["fault"]` of that result.
    """

    remedy: Remedy
    info: Mapping[str, str]


@dataclass(frozen=True)
class MarkNew:
    """The object of a FAULTED env was rebuilt, so the env can be reset and stepped again."""

    env_id: int


@dataclass(frozen=True)
class Replay(EnvDecision):
    """Play the episode of a suspended env again, and pause with ReplayAt after each command whose number is in `places`.

    If the pending command begins an episode, the core gives this command again instead, and the env is no longer
    suspended. If `is_finished_here`, the core finishes the replay after the last command, without ReplayPlayed.
    """

    places: Sequence[int]
    is_finished_here: bool


class ContinueReplay(EnvDecision):
    """Continue after ReplayAt. After ReplayPlayed, the env has the expected state, and gets its pending command."""


@dataclass(frozen=True)
class WorkerDecision:
    """A decision about a worker. `generation` is how often it was restarted."""

    worker: int
    generation: int


@dataclass(frozen=True)
class BeginRestart(WorkerDecision):
    """Restart a worker. The commands for its envs wait for its successor.

    Attributes:
        remedy: what happens to the episodes of its envs. CUT cuts the episodes of idle envs at their next step.
            KEEP replays all episodes after the restart. With RAISE, idle envs become FAULTED, and so does an env with a
            result once that is received.
        info: the `info["fault"]` of idle envs, as in ResolveFault.
        is_recycling: whether none of its envs is in an episode, so that no result of theirs is lost.
    """

    remedy: Remedy
    info: Mapping[str, str]
    is_recycling: bool = False


@dataclass(frozen=True)
class ServeWorker(WorkerDecision):
    """Let the successor carry out the commands that waited for it.

    `pid` and `pidfd` are those of its process, which is watched unless `pidfd` is -1.
    """

    pidfd: int
    pid: int


class CancelRestart(WorkerDecision):
    """There is no successor. The commands that wait for it become faults."""


@dataclass(frozen=True)
class FailWorker(WorkerDecision):
    """The worker stays dead. Its envs become FAULTED, also those whose commands waited for it or were lost.

    An env with a result becomes FAULTED once the result is received.
    """


Decision = EnvDecision | MarkNew | WorkerDecision


# ---- views -------------------------------------------------------------------------------------------------------------


class ServerView(NamedTuple):
    """The state of an env object, a server, in the core.

    Attributes:
        server, worker: the numbers of the server and of its worker.
        env_id: the env that the server serves; None if it is a spare in the queue.
        ticket: the number of its newest command.
        phase: its ObjectPhase of `phases.def`.
        is_logged: whether the log of its episode is complete.
        episode, length: the number of the episode, and how many of its results were received.
        length_before: the length of the previous episode.
        num_ended: how many episodes of its budget the env has ended.
        is_pending: whether its env has a command whose result was not received.
        is_between: whether the pending command begins an episode, or the next command does.
        is_staged: whether its next episode was begun in advance.
        has_run_last: whether its lane, whose worker may be dead, ran a command of it last.
        is_lane_in_request: whether its lane was in a slow request and not in a command.
        num_requests: how many slow requests were ever sent to its lane.
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
    num_ended: int
    is_pending: bool
    is_between: bool
    is_staged: bool
    has_run_last: bool
    is_lane_in_request: bool
    num_requests: int

    @property
    def is_suspended(self) -> bool:
        """Whether its episode must be replayed before the env's results can be received."""
        return self.phase in ("AWAITING_REPLAY", "REPLAYING", "PAUSED")

    @property
    def first_place(self) -> int:
        """The last place before the part to replay, which begins with a pending reset or with the reset of the episode."""
        return self.length if self.is_between else 0

    @property
    def is_ahead(self) -> bool:
        """Whether a command is pending or staged. Calls that are made now come after it."""
        return self.is_pending or self.is_staged
