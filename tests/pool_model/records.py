"""What is known of env objects, rows, commands and envs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.pool_model.envs import Place

IDLE, PENDING, FAULTED, EXHAUSTED, NEEDS_RESET = "IDLE", "PENDING", "FAULTED", "EXHAUSTED", "NEEDS_RESET"
UNKNOWN = -(10**6)  # number of episodes


@dataclass
class EnvObject:
    """What is known of an env object between episodes.

    Attributes:
        levels: what its level may be: several values after a call that failed.
        past_levels: all that were set: the last one before a reset that is repeated is not known.
        bumps: how many calls it may have counted; None is any number.
        num_calls: how many calls may have changed it.
    """

    identity: int
    seed: int = -1
    count: int = 0
    levels: set[int] = field(default_factory=lambda: {0})
    past_levels: set[int] = field(default_factory=lambda: {0})
    bumps: set[int] | None = field(default_factory=lambda: {0})
    num_calls: int = 0

    @property
    def level(self) -> int:
        return max(self.levels)

    def set_level(self, level: int, *, is_certain: bool = True) -> None:
        """Record that the level was set, or, if not `is_certain`, that it may have been."""
        self.num_calls += 1
        self.past_levels.add(level)
        self.levels = {level} if is_certain else {*self.levels, level}

    def may_have_counted(self) -> None:
        """Record that a call failed, which may have been counted."""
        self.num_calls += 1
        self.bumps = None if self.bumps is None else self.bumps | {bumps + 1 for bumps in self.bumps}


@dataclass
class Row:
    """One row of an env: its object, and where the result received last has left it.

    Attributes:
        calls_before: how many calls of the object came before the command that began the episode.
        good_left: after a call has met a rebuilt object in the middle of an episode, the good results until a fault must come.
    """

    object: EnvObject
    place: Place
    is_over: bool = True
    calls_before: int = 0
    good_left: int | None = None


@dataclass
class Knowledge:
    """What was known of an object when a command was sent."""

    levels: set[int]
    bumps: set[int] | None
    num_calls: int

    @classmethod
    def of(cls, row: Row) -> Knowledge:
        own = row.object
        return cls(set(own.levels), None if own.bumps is None else set(own.bumps), own.num_calls)


@dataclass
class Command:
    """A command whose result was not received.

    Attributes:
        actions: of a step, one for each row; None for a reset.
        seeds: of a reset, one for each row.
        verb: how the reset fails.
        known: of the object of each row, when the command was sent.
    """

    actions: Sequence[int] | None
    seeds: Sequence[int | None]
    bonus: int
    verb: int
    known: Sequence[Knowledge]


@dataclass
class Env:
    """One env of the pool.

    Attributes:
        command: the one whose result was not received.
        bonus: the option that is kept for later resets.
        base, episode: the seed that the user gave last, and the number of the episode since.
        risks: how many deaths of its worker it may still have to show.
        is_loose: whether resets may have happened that no result has shown.
        is_unknown: whether the seed and number of its episode are not known, until a reset with a seed.
        is_skipped: whether it was exhausted in a step of all envs whose results were not received.
        is_called: whether something was called that a replay cannot undo.
    """

    env_id: int
    rows: list[Row]
    status: str = NEEDS_RESET
    command: Command | None = None
    bonus: int = 0
    base: int | None = None
    episode: int = 0
    num_ended: int = 0
    risks: int = 0
    is_loose: bool = False
    is_unknown: bool = False
    is_called: bool = False
    is_skipped: bool = False

    @property
    def is_pending(self) -> bool:
        return self.command is not None or self.is_skipped
