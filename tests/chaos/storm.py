"""The calls of a round, with the model of its pool: what `tests.pool_model` checks, and what a storm of faults adds to it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import EnvState, OnFault
from tests.chaos.fault_injection import FaultInjector, Interrupter
from tests.chaos.kinds import THREAD_HANG_S, Kind
from tests.chaos.report import ChaosReport
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import has_command
from tests.pool_model.calls import Calls, Recorders
from tests.pool_model.commands import Commands
from tests.pool_model.model import PoolModel
from tests.pool_model.records import FAULTED, Env
from tests.pool_model.results import Result, named_in, require

MAX_LINES = 20  # of calls that a complaint shows


class StormModel(PoolModel):
    """Counts what it checks, and knows which envs errors have named since their last reset."""

    report: ChaosReport
    named: set[int]

    @property
    def num_pending(self) -> int:
        return sum(env.is_pending for env in self.envs)

    def reset(self, env: Env, seeds: Sequence[int | None], bonus: int | None, verb: int) -> None:
        super().reset(env, seeds, bonus, verb)
        self.named.discard(env.env_id)

    def receive(self, env_id: int, results: Sequence[Result], num_ended: Sequence[int]) -> None:
        super().receive(env_id, results, num_ended)
        for result in results:
            self.report.transitions += 1
            self.report.replays += self.setup.hides_faults
            self.report.episodes += any(result.ends)
            if result.fault is not None:
                self.report.broken += 1
                self.report.kinds[str(result.fault["kind"])] += 1

    # ---- calls --------------------------------------------------------------------------------------------------

    def may_be(self, env: Env, identity: int) -> bool:
        """Whether a call of that env may be answered by this object."""
        (row,) = env.rows
        if not row.is_over or self.setup.num_spares == 0:
            return identity == row.object.identity
        return 0 <= identity < len(self.objects)

    def record_bump(self, identity: int, bumps: int) -> None:
        """Check and record the result of a bump."""
        own = self.objects[identity]
        served = [env for env in self.envs if env.rows[0].object is own]
        known, own.bumps = own.bumps, {bumps}
        own.num_calls += 1
        if all(env.rows[0].is_over for env in served) and not self.setup.hides_faults:
            own.bumps = None  # a death between episodes is not visible in results
        if (bumps > 0) if known is None else (bumps - 1 in known):
            return
        is_rebuilt = not self.setup.hides_faults and known is not None and 0 < bumps <= own.num_calls
        require(is_rebuilt, f"object {identity} has {bumps} bumps, after one of {known}")
        for env in served:
            (row,) = env.rows
            if not row.is_over and row.good_left is None:
                row.good_left = int(env.is_pending)

    def record_failed_bump(self, env: Env) -> None:
        """Record that a bump failed: the object that serves the env may have counted it or not."""
        (row,) = env.rows
        for each in self.objects if row.is_over and self.setup.num_spares else [row.object]:
            each.may_have_counted()

    def record_level(self, level: int, *, is_certain: bool) -> None:
        """Record that all objects got a level, or, if not `is_certain`, may have got it."""
        for each in self.objects:
            each.set_level(level, is_certain=is_certain)


class StormCalls(Calls):
    """Interrupts some calls, repeats those that a hanging thread refuses, and checks that errors name all lost envs."""

    def __init__(
        self, kind: Kind, pool: Pool, report: ChaosReport, rng: random.Random, interrupter: Interrupter, traps: str
    ) -> None:
        super().__init__(kind.setup, pool, [], StormModel)
        self.model.report, self.model.named = report, set()
        self._kind, self._report, self._rng, self._interrupter = kind, report, rng, interrupter
        self.injector = FaultInjector(kind, self, report, rng, traps)
        self._sent: Recorders = {}

    model: StormModel

    def make(
        self,
        text: str,
        function: Callable[[], Any],
        sent: Recorders | None = None,
        refusal: type[UsageError] | None = None,
    ) -> Any:
        self._sent = sent or {}
        del self.lines[:-MAX_LINES]
        outcome = super().make(text, function, sent, refusal)
        if isinstance(outcome, StepmillError):
            self._report.broken += 1
            self._report.kinds[type(outcome).__name__] += 1
            self.note_error(outcome)
        return outcome

    def run(self, function: Callable[[], Any]) -> Any:
        until = time.monotonic() + HANG_GUARD_S
        while True:
            try:
                return self._run_interrupted(function)
            except UsageError as error:
                if (
                    self._kind.backend != "thread"
                    or "a thread that still runs" not in error.message
                    or time.monotonic() > until
                ):
                    raise
                time.sleep(THREAD_HANG_S / 10)

    def _run_interrupted(self, function: Callable[[], Any]) -> Any:
        """Sometimes interrupt a call that sends or receives, half of the times while workers are repaired."""
        is_command = self.lines[-1].startswith(("pool.step", "pool.send", "pool.recv"))
        if not (self._kind.is_interrupted and is_command) or self._rng.random() > 0.15:
            return function()
        if self._rng.random() < 0.5:
            self.injector.kill_one(self.pool)
        try:
            with self._interrupter.interrupt():
                return function()
        except KeyboardInterrupt:
            self._report.inflicted["Ctrl-C"] += 1
            self._check_all_or_none()
            raise

    def _check_all_or_none(self) -> None:
        """Check that an interrupted call has given a command to all of its envs or to none."""
        states = self.pool.states
        idle = [env_id for env_id in self._sent if states[env_id] in (EnvState.IDLE, EnvState.EXHAUSTED)]
        # An env that is FAULTED and not pending has an error that the next call raises, whether it got the command or not.
        lost = [env_id for env_id in self._sent if self._is_lost(env_id)]
        is_whole = not idle or len(idle) + len(lost) == len(self._sent)
        require(is_whole, f"an interrupted call has left envs {idle} of {list(self._sent)} without a command")

    def _is_lost(self, env_id: int) -> bool:
        """Whether an env is FAULTED and not pending: it has to be reset, and no wait will report it."""
        return self.pool.states[env_id] is EnvState.FAULTED and not has_command(self.pool, env_id)

    def check_error(self, error: StepmillError, refusal: type[UsageError] | None) -> None:
        is_of_env = isinstance(error, (EnvError, EnvTimeout, WorkerDied))
        require(self._kind.policy is OnFault.RAISE and is_of_env, f"{type(error).__name__}: {error}")

    def note_error(self, error: StepmillError) -> None:
        """Check that no env is lost that no error has named since its reset. The next wait raises the faults of all others.

        An env whose result was ready when its worker died is named then, and FAULTED once the result is received.
        """
        self.model.named |= named_in(error)
        known = self.model.named | self.pool._recovery.news.lost_envs()
        lost = [env_id for env_id in range(self.setup.num_envs) if self._is_lost(env_id) and env_id not in known]
        require(not lost, f"envs {lost} are lost, and no error has named them")


class StormCommands(Commands):
    """Steps, resets and receives; some envs are revived before they are reset, and received later."""

    def __init__(self, calls: StormCalls, report: ChaosReport, rng: random.Random) -> None:
        super().__init__(calls)
        self._report, self._rng = report, rng

    def reset_refused(self, envs: Sequence[Env]) -> None:
        refused = self.refused(envs)
        if refused and self._rng.random() < 0.5:
            if any(self.model.envs[env_id].status == FAULTED for env_id in refused):
                self._report.revivals += 1
                wait = self._rng.random() < 0.5
                self.calls.make(f"pool.revive({refused}, wait={wait})", lambda: self.pool.revive(refused, wait=wait))
            self.reset_async(refused)
        elif refused:
            self.reset(refused)
