"""Predicts results: one record per row, one memory per env object. Every result is checked against them.

Object i serves row i unless there are spares: then any object may begin an episode of the row, and plays it to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.batch import Batch
from stepmill.spec.options import AutoresetMode
from tests.chaos.envs import ACTION, BUMPS, CLOCK, IDENTITY, LEVEL, TAG, UNREADABLE, length_of
from tests.chaos.kinds import Kind
from tests.chaos.report import ChaosReport
from tests.chaos.results import Numbers, Result, results_of

RESET = -2  # in place of an action, for a command that only resets


@dataclass
class Memory:
    """The possible state of an env object: several values after a call that failed; None is any value."""

    levels: set[int] = field(default_factory=lambda: {0})
    bumps: set[int] | None = field(default_factory=lambda: {0})
    num_calls: int = 0

    def copy(self) -> Memory:
        """Return a copy."""
        return Memory(set(self.levels), None if self.bumps is None else set(self.bumps), self.num_calls)


@dataclass
class RowRecord:
    """What is known of one row: its last good observation, and the pending action (None if there is none)."""

    obs: NDArray[np.int64]
    is_ended: bool = False
    action: int | None = None
    memory: Memory | None = None  # of the object when the command was given; None before an episode
    num_ended: int = 0
    num_calls: int = 0  # number of calls of the object when the action was given
    calls_before: int = 0  # the same for the action that began the episode
    is_between: bool = False  # whether all rows of its env had ended when the action was given
    is_exhausted: bool = False  # it gets no command, and its row must be empty
    good_left: int | None = (
        None  # after a call met a rebuilt object in the middle of an episode: good results until a fault must come
    )

    @property
    def identity(self) -> int:
        return int(self.obs[IDENTITY])


def _episode_of(length: int) -> Numbers:
    """Return the return and length of an episode of `length` steps, whose rewards are 1, 2, 3 and so on."""
    return length * (length + 1) / 2, length


class Oracle:
    """All that is known of the pool of a round."""

    def __init__(self, kind: Kind, report: ChaosReport) -> None:
        self._kind = kind
        self._report = report
        self.rows: list[RowRecord] = []
        self.reported: set[int] = set()  # envs that the error of a call has named
        self.memories = [Memory() for _ in range((kind.num_envs + kind.num_spares) * kind.rows_each)]

    def begin(self, first: Batch) -> None:
        """Store the first observations."""
        self.rows = [RowRecord(np.array(obs)) for obs in first.obs]
        for row, record in enumerate(self.rows):
            if record.identity != row or record.obs[CLOCK] != 0:
                self._report.complain(f"row {row} began with {record.obs.tolist()}")

    def rows_of(self, env_id: int) -> Sequence[RowRecord]:
        """Return the records of the rows of an env."""
        return self.rows[env_id * self._kind.rows_each : (env_id + 1) * self._kind.rows_each]

    def is_pending(self, env_id: int) -> bool:
        """Whether the env has a command whose result was not received."""
        return self.rows_of(env_id)[0].action is not None

    @property
    def pending(self) -> list[int]:
        """The envs with such a command."""
        return [env_id for env_id in range(self._kind.num_envs) if self.is_pending(env_id)]

    @property
    def idle(self) -> list[int]:
        """The envs without such a command."""
        return [env_id for env_id in range(self._kind.num_envs) if not self.is_pending(env_id)]

    @property
    def ended(self) -> list[int]:
        """The envs that the user has to reset before the next step: only with autoreset disabled."""
        is_off = self._kind.mode is AutoresetMode.DISABLED
        return [env_id for env_id in self.idle if self.rows_of(env_id)[0].is_ended] if is_off else []

    @property
    def exhausted(self) -> list[int]:
        """The envs that have played their budget."""
        return [env_id for env_id in self.idle if self.rows_of(env_id)[0].is_exhausted]

    def record_command(self, env_id: int, actions: Sequence[int]) -> None:
        """Record the actions that are about to be sent to an env, one per row."""
        for record, action in zip(self.rows_of(env_id), actions, strict=True):
            record.action = action
            record.is_between = all(row.is_ended for row in self.rows_of(env_id))
            record.memory = None if record.is_ended else self.memories[record.identity].copy()
            record.num_calls = self.memories[record.identity].num_calls

    def withdraw_command(self, env_id: int) -> None:
        """Record that the actions were not sent."""
        for record in self.rows_of(env_id):
            record.action = record.memory = None

    def expect_reset(self, env_id: int) -> None:
        """Record that the next result of an env begins an episode."""
        for record in self.rows_of(env_id):
            record.is_ended, record.is_between, record.action, record.memory = True, True, RESET, None
            record.good_left = None
            record.num_calls = self.memories[record.identity].num_calls
            record.num_ended = 0 if record.is_exhausted else record.num_ended
            record.is_exhausted = False
            if not self._kind.is_replayed:
                self.memories[record.identity].bumps = None  # calls are not repeated

    def check_batch(self, batch: Batch) -> None:
        """Check each row of a batch against its record, and update the record."""
        for result in results_of(batch, self._kind.rows_each):
            self.check_result(self.rows[result.row], result)

    def check_result(self, record: RowRecord, result: Result) -> None:
        complaint = self.find_wrong(record, result)
        if complaint is not None:
            with np.printoptions(linewidth=1000):
                text = f"row {result.row}, action {record.action}, after {record.obs.tolist()}: {complaint}: {result}"
            self._report.complain(text)
        if result.fault is not None:
            self._report.broken += 1
            self._report.kinds[result.fault] += 1
        self._report.transitions += 1
        self._report.replays += self._kind.is_replayed
        self._report.episodes += result.truncated
        record.action = None if record.is_exhausted else record.action
        if record.action is None:
            return
        self._update_memory(record, result)
        self._count_good_results(record, result)
        record.obs, record.action = result.obs, None
        record.num_ended += result.truncated
        record.is_exhausted = self._kind.budget is not None and record.num_ended >= self._kind.budget
        is_turned = self._kind.mode is AutoresetMode.SAME_STEP and not record.is_exhausted
        waits_on = record.is_ended and result.fault is not None
        record.is_ended = waits_on or (result.truncated and not is_turned)

    def _count_good_results(self, record: RowRecord, result: Result) -> None:
        if record.good_left == 0 and result.fault is None:
            self._report.complain(
                f"row {result.row}: its env was rebuilt in the middle of an episode, and no fault was reported"
            )
        is_over = result.fault is not None or result.truncated
        record.good_left = None if is_over or not record.good_left else record.good_left - 1

    # ---- checks of results ------------------------------------------------------------------------------------------

    def find_wrong(self, record: RowRecord, result: Result) -> str | None:
        """Return a text that says what is wrong with a result; None if it is right."""
        wrong = self._find_wrong_in_result(record, result)
        return self._find_wrong_in_omitted(record, result) if wrong is None else wrong

    def _find_wrong_in_omitted(self, record: RowRecord, result: Result) -> str | None:
        """Check that an unreadable value is reported with the result of its step, and with no other."""
        is_of_step = result.fault is None and not record.is_ended and not record.is_exhausted
        is_wanted = self._kind.has_unreadable and is_of_step and record.action == UNREADABLE
        wanted = ((result.row // self._kind.rows_each, "info['page']"),) if is_wanted else ()
        return None if result.omitted == wanted else f"{result.omitted} were reported as not readable, not {wanted}"

    def _find_wrong_in_result(self, record: RowRecord, result: Result) -> str | None:
        if record.action is None:
            return "it had no command: a doubled result"
        if record.is_exhausted:
            is_empty = not (result.truncated or result.terminated or result.fault or result.at) and result.reward == 0.0
            is_empty &= np.array_equal(result.obs, record.obs)
            return None if is_empty else "not the empty row of an exhausted env"
        if result.fault is not None:
            return self._find_wrong_in_broken(record, result)
        if record.is_ended:
            return self._find_wrong_in_first(record, result)
        if self._kind.mode is AutoresetMode.SAME_STEP and result.truncated:
            return self._find_wrong_in_same_step_end(record, result)
        if result.final_obs is not None:
            return "a last observation, but the episode has not ended"
        return self._find_wrong_in_next(record, result, result.obs, result.at)

    def _find_wrong_in_broken(self, record: RowRecord, result: Result) -> str | None:
        if self._kind.is_replayed and not self._may_break(record, result):
            return "broken; it should have been replayed"
        if record.is_between:
            return "marked as broken between two episodes"
        if record.is_ended:
            return self._find_wrong_in_waiting(record, result)
        if not result.truncated or result.terminated or result.reward != 0.0:
            return "not marked as broken"
        # A worker may have died while it wrote the result of one more step.
        length = int(record.obs[CLOCK])
        if result.episode not in [_episode_of(length), _episode_of(length + 1)]:
            return "wrong return or length of a broken episode"
        if self._kind.mode is not AutoresetMode.SAME_STEP:
            is_last = np.array_equal(result.obs, record.obs) and result.at is None and result.final_obs is None
            return None if is_last else "not the last good observation"
        if result.final_obs is None or not np.array_equal(result.final_obs, record.obs):
            return "not the last good observation"
        return self._find_wrong_in_end(record, result)

    def _find_wrong_in_waiting(self, record: RowRecord, result: Result) -> str | None:
        """Check a row that had ended before its env failed: it waits again for its next episode, and does not end twice."""
        is_plain = not (result.truncated or result.terminated or result.episode or result.at) and result.reward == 0.0
        is_last = np.array_equal(result.obs, record.obs) and result.final_obs is None
        return None if is_plain and is_last else "marked as broken between two episodes"

    def _may_break(self, record: RowRecord, result: Result) -> bool:
        """Whether a replay may be impossible: the effects of calls on an env that is not in a process cannot be undone."""
        # A spare may have been reset long before it began to serve.
        since = 0 if self._kind.num_spares else record.calls_before
        is_called = self.memories[record.identity].num_calls > since
        return self._kind.backend != "process" and is_called and "not_replayable" in result.why

    def _find_wrong_in_same_step_end(self, record: RowRecord, result: Result) -> str | None:
        """Check the end of an episode with SAME_STEP: the next one begins, unless it was the last of a budget."""
        if result.final_obs is None:
            return "the episode has ended, but its last observation is missing"
        wrong = self._find_wrong_in_next(record, result, result.final_obs, result.final_at)
        return self._find_wrong_in_end(record, result) if wrong is None else wrong

    def _find_wrong_in_end(self, record: RowRecord, result: Result) -> str | None:
        """Check what follows the last observation with SAME_STEP: the next episode, or that observation if there is none."""
        if self._is_last(record):
            is_last = (
                result.final_obs is not None and np.array_equal(result.obs, result.final_obs) and result.at is None
            )
            return None if is_last else "an episode was begun that will not be played"
        return self._find_wrong_in_new(record, result)

    def _is_last(self, record: RowRecord) -> bool:
        return self._kind.budget is not None and record.num_ended + 1 == self._kind.budget

    def _find_wrong_in_next(
        self, record: RowRecord, result: Result, obs: NDArray[np.int64], at: Numbers | None
    ) -> str | None:
        clock = int(record.obs[CLOCK]) + 1
        expected = [record.identity, record.obs[TAG], clock, record.action]
        if obs[: ACTION + 1].tolist() != expected or result.reward != float(clock):
            return "not the next transition"
        if at != tuple(expected[: CLOCK + 1]):
            return f"its info is of {at}"
        length = length_of(record.identity, self._kind.rows_each, is_ragged=self._kind.is_ragged)
        if result.truncated != (clock >= length) or result.terminated:
            return "wrong flags"
        if result.episode != (_episode_of(clock) if result.truncated else None):
            return "wrong return or length"
        memory = record.memory
        if memory is not None and int(obs[LEVEL]) not in memory.levels:
            return f"its level must be one of {memory.levels}"
        if memory is not None and memory.bumps is not None and int(obs[BUMPS]) not in memory.bumps:
            return f"its bumps must be one of {memory.bumps}"
        return None

    def _find_wrong_in_first(self, record: RowRecord, result: Result) -> str | None:
        """Check the result of a reset: no flags, no reward."""
        is_plain = not (result.terminated or result.truncated or result.episode) and result.reward == 0.0
        if not is_plain or result.final_obs is not None:
            return "not the first of an episode"
        return self._find_wrong_in_new(record, result)

    def _find_wrong_in_new(self, record: RowRecord, result: Result) -> str | None:
        is_first = result.obs[CLOCK] == 0 and result.obs[ACTION] == -1 and result.obs[TAG] != record.obs[TAG]
        if not is_first:
            return "not the first of an episode"
        if result.at != tuple(result.obs[: CLOCK + 1].tolist()):
            return f"its info is of {result.at}"
        identity = int(result.obs[IDENTITY])
        if self._kind.num_spares == 0:
            return None if identity == result.row else "attributed to the wrong env"
        served = {other.identity for other in self.rows if other is not record and not other.is_ended}
        is_there = 0 <= identity < len(self.memories) and identity not in served
        return None if is_there else f"its object serves others, {served}"

    def _update_memory(self, record: RowRecord, result: Result) -> None:
        """Reduce the possible state of an object to what its observation shows, unless it was called since."""
        if not 0 <= result.obs[IDENTITY] < len(self.memories):
            return
        memory = self.memories[result.obs[IDENTITY]]
        is_known = record.memory is not None and record.memory.num_calls == memory.num_calls
        is_new = record.is_ended or (result.truncated and self._kind.mode is AutoresetMode.SAME_STEP)
        if is_new:
            record.calls_before = record.num_calls
        if result.fault is None and not record.is_ended and is_known:
            memory.levels = {int(result.obs[LEVEL])}
            memory.bumps = {int(result.obs[BUMPS])}
        # An object may have been rebuilt, and calls are not repeated; a death between episodes is not visible in results.
        is_over = result.truncated and not is_new
        if not self._kind.is_replayed and (result.fault is not None or record.is_ended or is_over):
            memory.bumps = None

    # ---- calls --------------------------------------------------------------------------------------------------

    def check_identity(self, env_id: int, identity: int) -> bool:
        """Whether a call of that env may be answered by this object."""
        record = self.rows[env_id]
        if not record.is_ended or self._kind.num_spares == 0:
            return identity == record.identity
        return 0 <= identity < len(self.memories)

    def record_bump(self, identity: int, bumps: int) -> str | None:
        """Record the result of a bump; return what is wrong with it, or None."""
        memory = self.memories[identity]
        known, memory.bumps = memory.bumps, {bumps}
        memory.num_calls += 1
        is_between = all(record.is_ended for record in self.rows if record.identity == identity)
        if is_between and not self._kind.is_replayed:
            memory.bumps = None  # a death between episodes is not visible in results
        if (bumps > 0) if known is None else (bumps - 1 in known):
            return None
        if self._kind.is_replayed or known is None or not 0 < bumps <= memory.num_calls:
            return f"object {identity} has {bumps} bumps, after one of {known}"
        for record in self.rows:
            if record.identity == identity and not record.is_ended and record.good_left is None:
                record.good_left = int(record.action is not None)
        return None

    def record_failed_bump(self, env_id: int) -> None:
        """Record that a bump failed: the object that serves the env may have counted it or not."""
        identities = range(len(self.memories)) if self.rows[env_id].is_ended else [self.rows[env_id].identity]
        for identity in identities:
            memory = self.memories[identity]
            memory.num_calls += 1
            memory.bumps = None if memory.bumps is None else memory.bumps | {bumps + 1 for bumps in memory.bumps}

    def record_level(self, level: int, *, is_certain: bool) -> None:
        """Record that all objects got a level, or, if not `is_certain`, may have got it."""
        for memory in self.memories:
            memory.num_calls += 1
            memory.levels = {level} if is_certain else memory.levels | {level}
