"""What must come: one book per row, one memory per env object. Every result is held against them.

Row i of the pool is served by object i, unless there are spares: then any object may begin an episode there, and ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.batch import Batch
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import OnFault
from stepmill.testing.chaos.envs import ACTION, BUMPS, CLOCK, IDENTITY, LEVEL, TAG, length_of
from stepmill.testing.chaos.kinds import Kind
from stepmill.testing.chaos.report import ChaosReport

RESET = -2  # stands for the action of a command that only resets


@dataclass
class Memory:
    """What an env object may hold: every value that is possible, more than one after a call that failed; None is any."""

    levels: set[int] = field(default_factory=lambda: {0})
    bumps: set[int] | None = field(default_factory=lambda: {0})
    num_calls: int = 0

    def copy(self) -> Memory:
        """Return what it is now."""
        return Memory(set(self.levels), None if self.bumps is None else set(self.bumps), self.num_calls)


@dataclass
class Book:
    """What is known of one row: its last good observation, and the action under way (None: it waits for a command)."""

    obs: NDArray[np.int64]
    is_ended: bool = False
    action: int | None = None
    memory: Memory | None = None  # of the object when the command was given; None where the episode is yet to begin

    @property
    def identity(self) -> int:
        return int(self.obs[IDENTITY])


@dataclass(frozen=True)
class Result:
    """One row of a batch."""

    row: int
    obs: NDArray[np.int64]
    reward: float
    terminated: bool
    truncated: bool
    fault: str | None
    why: str = ""


def results_of(batch: Batch, rows_each: int) -> Iterator[Result]:
    """Take a batch apart."""
    info: Mapping[str, Any] = batch.info
    count = len(batch.env_id)
    has_fault = info["_fault"] if "fault" in info else np.zeros(count, bool)
    for i in range(count):
        fault = {key: values[i] for key, values in info["fault"].items() if key[0] != "_"} if has_fault[i] else {}
        yield Result(
            int(batch.env_id[i]) * rows_each + i % rows_each,
            np.array(batch.obs[i]),
            float(batch.reward[i]),
            bool(batch.terminated[i]),
            bool(batch.truncated[i]),
            str(fault["kind"]) if fault else None,
            str(fault),
        )


def named_in(error: StepmillError) -> set[int]:
    """The envs that an error names, with those of the errors that came together with it."""

    def each(one: StepmillError) -> Iterator[int]:
        yield from getattr(one, "env_ids", ())
        env_id = getattr(one, "env_id", None)
        if env_id is not None:
            yield env_id

    return {env_id for one in (error, *getattr(error, "others", ())) for env_id in each(one)}


class Books:
    """All that is known of a round's pool."""

    def __init__(self, kind: Kind, report: ChaosReport) -> None:
        self._kind = kind
        self._report = report
        self.rows: list[Book] = []
        self.told: set[int] = set()  # envs of which a call has told that they are lost
        self.memories = [Memory() for _ in range((kind.num_envs + kind.num_spares) * kind.rows_each)]

    def begin(self, first: Batch) -> None:
        """Take the first observations."""
        self.rows = [Book(np.array(obs)) for obs in first.obs]
        for row, book in enumerate(self.rows):
            if book.identity != row or book.obs[CLOCK] != 0:
                self._report.complain(f"row {row} began with {book.obs.tolist()}")

    def rows_of(self, env_id: int) -> Sequence[Book]:
        """Return the books of an env's rows."""
        return self.rows[env_id * self._kind.rows_each : (env_id + 1) * self._kind.rows_each]

    def is_pending(self, env_id: int) -> bool:
        """Whether the env has a command whose result was not received."""
        return self.rows_of(env_id)[0].action is not None

    @property
    def pending(self) -> list[int]:
        """The envs that have one."""
        return [env_id for env_id in range(self._kind.num_envs) if self.is_pending(env_id)]

    @property
    def idle(self) -> list[int]:
        """The envs that have none."""
        return [env_id for env_id in range(self._kind.num_envs) if not self.is_pending(env_id)]

    def command(self, env_id: int, actions: Sequence[int]) -> None:
        """Note what an env is about to be told, an action per row."""
        for book, action in zip(self.rows_of(env_id), actions, strict=True):
            book.action = action
            book.memory = None if book.is_ended else self.memories[book.identity].copy()

    def withdraw(self, env_id: int) -> None:
        """The env was not told after all."""
        for book in self.rows_of(env_id):
            book.action = book.memory = None

    def expect_reset(self, env_id: int) -> None:
        """The env has a fault that was told; what comes next of it begins an episode."""
        for book in self.rows_of(env_id):
            book.is_ended, book.action, book.memory = True, RESET, None
            if self._kind.policy is not OnFault.REPLAY:
                self.memories[book.identity].bumps = None  # calls are not made again

    def take(self, batch: Batch) -> None:
        """Hold each row of a batch against its book."""
        for result in results_of(batch, self._kind.rows_each):
            book = self.rows[result.row]
            complaint = self._find_wrong(book, result)
            if complaint is not None:
                self._report.complain(
                    f"row {result.row}, action {book.action}, after {book.obs.tolist()}: {complaint}: {result}"
                )
            if result.fault is not None:
                self._report.broken += 1
                self._report.kinds[result.fault] += 1
            self._report.transitions += 1
            self._report.replays += self._kind.policy is OnFault.REPLAY
            self._report.episodes += result.truncated
            self._learn(book, result)
            if result.truncated and self._kind.policy is not OnFault.REPLAY:
                self.memories[book.identity].bumps = None  # between episodes a death leaves no mark
            book.obs, book.is_ended, book.action = result.obs, result.truncated, None

    def _find_wrong(self, book: Book, result: Result) -> str | None:
        if book.action is None:
            return "it had no command; doubled"
        if result.fault is not None and self._kind.policy is OnFault.REPLAY:
            return "broken, and should have been played again"
        if book.is_ended:
            return self._find_wrong_in_first(book, result)
        if result.fault is not None:
            is_marked = result.truncated and not result.terminated and result.reward == 0.0
            return None if is_marked and np.array_equal(result.obs, book.obs) else "not marked as broken"
        clock = book.obs[CLOCK] + 1
        expected = [book.identity, book.obs[TAG], clock, book.action]
        if result.obs[: ACTION + 1].tolist() != expected or result.reward != float(clock):
            return "not the next transition"
        is_over = bool(clock >= length_of(book.identity, self._kind.rows_each))
        if result.truncated != is_over or result.terminated:
            return "wrong flags"
        memory = book.memory
        if memory is not None and int(result.obs[LEVEL]) not in memory.levels:
            return f"its level must be one of {memory.levels}"
        if memory is not None and memory.bumps is not None and int(result.obs[BUMPS]) not in memory.bumps:
            return f"its bumps must be one of {memory.bumps}"
        return None

    def _find_wrong_in_first(self, book: Book, result: Result) -> str | None:
        is_first = result.obs[CLOCK] == 0 and result.obs[ACTION] == -1 and result.obs[TAG] != book.obs[TAG]
        is_plain = not (result.terminated or result.truncated or result.fault) and result.reward == 0.0
        if not (is_first and is_plain):
            return "not the first of an episode"
        identity = int(result.obs[IDENTITY])
        if self._kind.num_spares == 0:
            return None if identity == result.row else "attributed to the wrong env"
        served = {other.identity for other in self.rows if other is not book and not other.is_ended}
        is_there = 0 <= identity < len(self.memories) and identity not in served
        return None if is_there else f"its object serves others, {served}"

    def _learn(self, book: Book, result: Result) -> None:
        """What a step shows of its object's memory narrows down what is possible, unless it was called since."""
        if not 0 <= result.obs[IDENTITY] < len(self.memories):
            return
        memory = self.memories[result.obs[IDENTITY]]
        if result.fault is not None or book.is_ended:
            if self._kind.policy is not OnFault.REPLAY:
                memory.bumps = None  # it may have been built anew, and calls are not made again
            return
        if book.memory is not None and book.memory.num_calls == memory.num_calls:
            memory.levels = {int(result.obs[LEVEL])}
            memory.bumps = {int(result.obs[BUMPS])}

    # ---- calls --------------------------------------------------------------------------------------------------

    def check_identity(self, env_id: int, identity: int) -> bool:
        """Whether a call of that env may be answered by this object."""
        book = self.rows[env_id]
        if not book.is_ended or self._kind.num_spares == 0:
            return identity == book.identity
        return 0 <= identity < len(self.memories)

    def note_bump(self, identity: int, bumps: int) -> str | None:
        """Note the answer to a bump; return what is wrong with it, if anything is."""
        memory = self.memories[identity]
        known, memory.bumps = memory.bumps, {bumps}
        memory.num_calls += 1
        is_between = all(book.is_ended for book in self.rows if book.identity == identity)
        if is_between and self._kind.policy is not OnFault.REPLAY:
            memory.bumps = None  # between episodes a death leaves no mark
        is_possible = bumps > 0 if known is None else bumps - 1 in known
        return None if is_possible else f"object {identity} has {bumps} bumps, after one of {known}"

    def doubt_bump(self, env_id: int) -> None:
        """A bump failed: it happened or not, to whomever serves that env."""
        identities = range(len(self.memories)) if self.rows[env_id].is_ended else [self.rows[env_id].identity]
        for identity in identities:
            memory = self.memories[identity]
            memory.num_calls += 1
            memory.bumps = None if memory.bumps is None else memory.bumps | {bumps + 1 for bumps in memory.bumps}

    def note_level(self, level: int, *, is_certain: bool) -> None:
        """All objects were given a level, or may have been."""
        for memory in self.memories:
            memory.num_calls += 1
            memory.levels = {level} if is_certain else memory.levels | {level}
