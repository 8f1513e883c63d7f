"""What must come: one book per row, one memory per env object. Every result is held against them.

Row i of the pool is served by object i, unless there are spares: then any object may begin an episode there, and ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.batch import Batch
from stepmill.spec.options import AutoresetMode
from stepmill.testing.chaos.envs import ACTION, BUMPS, CLOCK, IDENTITY, LEVEL, TAG, UNREADABLE, length_of
from stepmill.testing.chaos.kinds import Kind
from stepmill.testing.chaos.report import ChaosReport
from stepmill.testing.chaos.results import Numbers, Result, results_of

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
    num_ended: int = 0
    num_calls: int = 0  # that the object had been given when the action was
    calls_before: int = 0  # the same for the action that began the episode
    is_between: bool = False  # whether all rows of its env had ended when the action was given
    is_exhausted: bool = False  # and gets no command: its row is to be empty
    good_left: int | None = None  # a call has met a new object in mid-episode: so many good results until that is told

    @property
    def identity(self) -> int:
        return int(self.obs[IDENTITY])


def _episode_of(length: int) -> Numbers:
    """Return and length of an episode of so many steps, whose rewards are 1, 2, 3 and so on."""
    return length * (length + 1) / 2, length


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

    @property
    def ended(self) -> list[int]:
        """The envs that the user has to reset before they are stepped: with autoreset off."""
        is_off = self._kind.mode is AutoresetMode.DISABLED
        return [env_id for env_id in self.idle if self.rows_of(env_id)[0].is_ended] if is_off else []

    @property
    def exhausted(self) -> list[int]:
        """The envs that have played their budget."""
        return [env_id for env_id in self.idle if self.rows_of(env_id)[0].is_exhausted]

    def command(self, env_id: int, actions: Sequence[int]) -> None:
        """Note what an env is about to be told, an action per row."""
        for book, action in zip(self.rows_of(env_id), actions, strict=True):
            book.action = action
            book.is_between = all(row.is_ended for row in self.rows_of(env_id))
            book.memory = None if book.is_ended else self.memories[book.identity].copy()
            book.num_calls = self.memories[book.identity].num_calls

    def withdraw(self, env_id: int) -> None:
        """The env was not told after all."""
        for book in self.rows_of(env_id):
            book.action = book.memory = None

    def expect_reset(self, env_id: int) -> None:
        """What comes next of the env begins an episode: it was told to, or has a fault that was told."""
        for book in self.rows_of(env_id):
            book.is_ended, book.is_between, book.action, book.memory = True, True, RESET, None
            book.good_left = None
            book.num_calls = self.memories[book.identity].num_calls
            book.num_ended = 0 if book.is_exhausted else book.num_ended
            book.is_exhausted = False
            if not self._kind.is_replayed:
                self.memories[book.identity].bumps = None  # calls are not made again

    def take(self, batch: Batch) -> None:
        """Hold each row of a batch against its book."""
        for result in results_of(batch, self._kind.rows_each):
            self._take(self.rows[result.row], result)

    def _take(self, book: Book, result: Result) -> None:
        complaint = self.find_wrong(book, result)
        if complaint is not None:
            with np.printoptions(linewidth=1000):
                text = f"row {result.row}, action {book.action}, after {book.obs.tolist()}: {complaint}: {result}"
            self._report.complain(text)
        if result.fault is not None:
            self._report.broken += 1
            self._report.kinds[result.fault] += 1
        self._report.transitions += 1
        self._report.replays += self._kind.is_replayed
        self._report.episodes += result.truncated
        book.action = None if book.is_exhausted else book.action
        if book.action is None:
            return
        self._learn(book, result)
        self._count_down(book, result)
        book.obs, book.action = result.obs, None
        book.num_ended += result.truncated
        book.is_exhausted = self._kind.budget is not None and book.num_ended >= self._kind.budget
        is_turned = self._kind.mode is AutoresetMode.SAME_STEP and not book.is_exhausted
        waits_on = book.is_ended and result.fault is not None
        book.is_ended = waits_on or (result.truncated and not is_turned)

    def _count_down(self, book: Book, result: Result) -> None:
        if book.good_left == 0 and result.fault is None:
            self._report.complain(f"row {result.row}: its env was built anew in mid-episode, which nobody told")
        is_over = result.fault is not None or result.truncated
        book.good_left = None if is_over or not book.good_left else book.good_left - 1

    # ---- what is wrong ------------------------------------------------------------------------------------------

    def find_wrong(self, book: Book, result: Result) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is."""
        wrong = self._find_wrong_in_result(book, result)
        return self._find_wrong_in_omitted(book, result) if wrong is None else wrong

    def _find_wrong_in_omitted(self, book: Book, result: Result) -> str | None:
        """A value that cannot be read is told with the result of its step, and with no other."""
        is_of_step = result.fault is None and not book.is_ended and not book.is_exhausted
        is_wanted = self._kind.has_unreadable and is_of_step and book.action == UNREADABLE
        wanted = ((result.row // self._kind.rows_each, "info['page']"),) if is_wanted else ()
        return None if result.omitted == wanted else f"told that {result.omitted} could not be read, not {wanted}"

    def _find_wrong_in_result(self, book: Book, result: Result) -> str | None:
        if book.action is None:
            return "it had no command; doubled"
        if book.is_exhausted:
            is_empty = not (result.truncated or result.terminated or result.fault or result.at) and result.reward == 0.0
            is_empty &= np.array_equal(result.obs, book.obs)
            return None if is_empty else "not the empty row of an exhausted env"
        if result.fault is not None:
            return self._find_wrong_in_broken(book, result)
        if book.is_ended:
            return self._find_wrong_in_first(book, result)
        if self._kind.mode is AutoresetMode.SAME_STEP and result.truncated:
            return self._find_wrong_in_turn(book, result)
        if result.final_obs is not None:
            return "a last observation, and no end"
        return self._find_wrong_in_next(book, result, result.obs, result.at)

    def _find_wrong_in_broken(self, book: Book, result: Result) -> str | None:
        if self._kind.is_replayed and not self._may_break(book, result):
            return "broken, and should have been played again"
        if book.is_between:
            return "nothing was there to be broken"
        if book.is_ended:
            return self._find_wrong_in_waiting(book, result)
        if not result.truncated or result.terminated or result.reward != 0.0:
            return "not marked as broken"
        # A worker may have died over the result of one step more.
        length = int(book.obs[CLOCK])
        if result.episode not in [_episode_of(length), _episode_of(length + 1)]:
            return "wrong return or length of what was broken"
        if self._kind.mode is not AutoresetMode.SAME_STEP:
            is_last = np.array_equal(result.obs, book.obs) and result.at is None and result.final_obs is None
            return None if is_last else "not the last good observation"
        if result.final_obs is None or not np.array_equal(result.final_obs, book.obs):
            return "not the last good observation"
        return self._find_wrong_in_new(book, result)

    def _find_wrong_in_waiting(self, book: Book, result: Result) -> str | None:
        """Its env broke over other rows: this one waits once more for its next episode, and ends no second time."""
        is_plain = not (result.truncated or result.terminated or result.episode or result.at) and result.reward == 0.0
        is_last = np.array_equal(result.obs, book.obs) and result.final_obs is None
        return None if is_plain and is_last else "marked as broken between two episodes"

    def _may_break(self, book: Book, result: Result) -> bool:
        """Where no process can be ended, marks of calls are not undone."""
        # A spare may have been reset long before it began to serve.
        since = 0 if self._kind.num_spares else book.calls_before
        is_called = self.memories[book.identity].num_calls > since
        return self._kind.backend != "process" and is_called and "not_replayable" in result.why

    def _find_wrong_in_turn(self, book: Book, result: Result) -> str | None:
        """SAME_STEP: one episode ends and the next begins, or none does if it was the last."""
        if result.final_obs is None:
            return "an end without its last observation"
        wrong = self._find_wrong_in_next(book, result, result.final_obs, result.final_at)
        if wrong is not None:
            return wrong
        if self._is_last(book):
            is_last = np.array_equal(result.obs, result.final_obs) and result.at is None
            return None if is_last else "an episode was begun that nobody will play"
        return self._find_wrong_in_new(book, result)

    def _is_last(self, book: Book) -> bool:
        return self._kind.budget is not None and book.num_ended + 1 == self._kind.budget

    def _find_wrong_in_next(self, book: Book, result: Result, obs: NDArray[np.int64], at: Numbers | None) -> str | None:
        clock = int(book.obs[CLOCK]) + 1
        expected = [book.identity, book.obs[TAG], clock, book.action]
        if obs[: ACTION + 1].tolist() != expected or result.reward != float(clock):
            return "not the next transition"
        if at != tuple(expected[: CLOCK + 1]):
            return f"its info is of {at}"
        length = length_of(book.identity, self._kind.rows_each, is_ragged=self._kind.is_ragged)
        if result.truncated != (clock >= length) or result.terminated:
            return "wrong flags"
        if result.episode != (_episode_of(clock) if result.truncated else None):
            return "wrong return or length"
        memory = book.memory
        if memory is not None and int(obs[LEVEL]) not in memory.levels:
            return f"its level must be one of {memory.levels}"
        if memory is not None and memory.bumps is not None and int(obs[BUMPS]) not in memory.bumps:
            return f"its bumps must be one of {memory.bumps}"
        return None

    def _find_wrong_in_first(self, book: Book, result: Result) -> str | None:
        """The result of a reset says no more than that."""
        is_plain = not (result.terminated or result.truncated or result.episode) and result.reward == 0.0
        if not is_plain or result.final_obs is not None:
            return "not the first of an episode"
        return self._find_wrong_in_new(book, result)

    def _find_wrong_in_new(self, book: Book, result: Result) -> str | None:
        is_first = result.obs[CLOCK] == 0 and result.obs[ACTION] == -1 and result.obs[TAG] != book.obs[TAG]
        if not is_first:
            return "not the first of an episode"
        if result.at != tuple(result.obs[: CLOCK + 1].tolist()):
            return f"its info is of {result.at}"
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
        is_known = book.memory is not None and book.memory.num_calls == memory.num_calls
        is_new = book.is_ended or (result.truncated and self._kind.mode is AutoresetMode.SAME_STEP)
        if is_new:
            book.calls_before = book.num_calls
        if result.fault is None and not book.is_ended and is_known:
            memory.levels = {int(result.obs[LEVEL])}
            memory.bumps = {int(result.obs[BUMPS])}
        # An object may have been built anew, where calls are not made again; between episodes a death leaves no mark.
        is_over = result.truncated and not is_new
        if not self._kind.is_replayed and (result.fault is not None or book.is_ended or is_over):
            memory.bumps = None

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
        if is_between and not self._kind.is_replayed:
            memory.bumps = None  # between episodes a death leaves no mark
        if (bumps > 0) if known is None else (bumps - 1 in known):
            return None
        if self._kind.is_replayed or known is None or not 0 < bumps <= memory.num_calls:
            return f"object {identity} has {bumps} bumps, after one of {known}"
        for book in self.rows:
            if book.identity == identity and not book.is_ended and book.good_left is None:
                book.good_left = int(book.action is not None)
        return None

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
