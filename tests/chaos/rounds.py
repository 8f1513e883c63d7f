"""One pool that is driven for a while as random faults are injected.

```
 injector ── signals, traps, breaking actions, calls ──► workers
                                                            │
   oracle ── checks clock, episode, action, state ◄──── results
```
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.capsule import read_capsule
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvError, EnvTimeout, RecvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import AutoresetMode, BackendName, EnvState, OnFault
from tests.chaos.envs import RAISE, make_env
from tests.chaos.fault_injection import FaultInjector, Interrupter
from tests.chaos.kinds import THREAD_HANG_S, Kind
from tests.chaos.oracle import Oracle
from tests.chaos.report import ChaosReport
from tests.chaos.results import named_in
from tests.harness.pools import has_command

T = TypeVar("T")
HANG_GUARD_S = 30.0
MAX_REPAIRS = 20
_FAULTS = (EnvError, EnvTimeout, WorkerDied)


def make_pool(kind: Kind, context: str, traps: str, crashes: str | None = None) -> Pool:
    """Make a pool of this kind; `traps` is the folder of its traps, `crashes` that of its capsules."""
    make = partial(
        make_env, mode=kind.mode.value, hang_s=kind.hang_s, is_ragged=kind.is_ragged, has_unreadable=kind.has_unreadable
    )
    num_objects = kind.num_envs + kind.num_spares
    env_fns = [partial(make, traps, identity, kind.rows_each) for identity in range(num_objects)]
    num_workers = None if kind.backend == "serial" else kind.num_workers
    options = kind.pool_options(context, crashes)
    return Pool(env_fns, backend=BackendName(kind.backend), num_workers=num_workers, options=options)


class Round:
    """One pool. `is_sync`: driven by step() of all envs; else by send() and recv() of some."""

    def __init__(self, report: ChaosReport, rng: random.Random, kind: Kind, *, is_sync: bool, context: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stepmill-chaos-")
        self._report = report
        self._named: set[int] = set()  # envs that an error has named since their last reset
        self._rng = rng
        self._kind = kind
        self._is_sync = is_sync
        self._oracle = Oracle(kind, report)
        self._traps, self._crashes = (os.path.join(self._folder.name, name) for name in ("traps", "crashes"))
        os.mkdir(self._traps)
        self._interrupter = Interrupter(rng)
        self._injector = FaultInjector(kind, self._oracle, report, rng, self._traps)
        self._pool = make_pool(kind, context, self._traps, self._crashes)

    def run(self, seconds: float) -> None:
        """Drive the pool for this long, and close it."""
        with self._folder, self._pool as pool, self._interrupter if self._kind.is_interrupted else nullcontext():
            self._oracle.begin(pool.reset(seed=self._rng.randrange(2**31)))
            until = time.monotonic() + seconds
            try:
                while time.monotonic() < until:
                    self._advance()
                while self._oracle.pending:
                    self._receive(len(self._oracle.pending))
                self._check_health()
            except StepmillError as error:
                self._report.complain(f"{type(error).__name__}: {error}; states {pool.states}")
            self._report.restarts += pool._recovery.workers.num_restarts
            self._read_capsules()

    # ---- driving ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._injector.inject(self._pool)
        self._reset_some()
        if self._is_sync:
            self._step()
        else:
            self._exchange()
        self._injector.call(self._pool)

    def _reset_some(self) -> None:
        """Reset the envs that need it, some exhausted ones, and sometimes one in the middle of an episode."""
        chosen = set(self._oracle.ended)
        exhausted = self._oracle.exhausted
        if len(exhausted) == self._kind.num_envs or (exhausted and self._rng.random() < 0.2):
            chosen.add(self._rng.choice(exhausted))
        # Under the policy "raise", after a refused reset it is not known whether the episode continues.
        if self._kind.policy is not OnFault.RAISE and self._oracle.idle and self._rng.random() < 0.03:
            chosen.add(self._rng.choice(self._oracle.idle))
        if not chosen:
            return
        ids = sorted(chosen)
        self._expect_resets(ids)
        try:
            if self._rng.random() < 0.5:
                self._oracle.check_batch(self._pool.reset(env_ids=ids))
            else:
                self._withdraw_unsent(ids, self._pool.reset_async(env_ids=ids))
                if self._is_sync:
                    self._receive(len(ids))
        except StepmillError as error:
            self._repair(error, unsent=ids)
        while self._is_sync and self._oracle.pending:
            self._receive(len(self._oracle.pending))

    def _draw(self, env_ids: Sequence[int]) -> NDArray[np.int64]:
        rows_each = self._kind.rows_each
        actions = self._injector.actions(len(env_ids) * rows_each)
        for place, env_id in enumerate(env_ids):
            self._oracle.record_command(env_id, actions[place * rows_each : (place + 1) * rows_each])
        return np.array(actions, np.int64)

    def _step(self) -> None:
        if self._oracle.ended:
            return  # the reset of an env has failed: it is reset again first
        actions = self._draw(range(self._kind.num_envs))
        try:
            with self._interrupted():
                batch = self._pool.step(actions)
        except KeyboardInterrupt:
            self._check_after_interrupt(range(self._kind.num_envs))
        except StepmillError as error:
            self._repair(error, unsent=range(self._kind.num_envs))
        else:
            self._oracle.check_batch(batch)
        while self._oracle.pending:
            self._receive(len(self._oracle.pending))

    def _exchange(self) -> None:
        idle = sorted({*self._oracle.idle} - {*self._oracle.ended, *self._oracle.exhausted})
        chosen = sorted(self._rng.sample(idle, self._rng.randint(0, len(idle))))
        if chosen:
            actions = self._draw(chosen)
            try:
                with self._interrupted():
                    sent = self._pool.send(actions, chosen)
                self._withdraw_unsent(chosen, sent)
            except KeyboardInterrupt:
                self._check_after_interrupt(chosen)
            except StepmillError as error:
                self._repair(error, unsent=chosen)
        if self._rng.random() < 0.3:
            self._injector.inject(self._pool)
        if self._oracle.pending:
            self._receive(self._rng.randint(1, len(self._oracle.pending)))

    def _receive(self, count: int) -> None:
        try:
            with self._interrupted():
                batch = self._pool.recv(count, timeout_s=HANG_GUARD_S)
        except KeyboardInterrupt:
            self._check_after_interrupt([])
        except StepmillError as error:
            self._repair(error)
        else:
            self._oracle.check_batch(batch)

    def _interrupted(self) -> AbstractContextManager[None]:
        """Sometimes interrupt the block, half of the times while workers are repaired."""
        if not self._kind.is_interrupted or self._rng.random() > 0.15:
            return nullcontext()
        if self._rng.random() < 0.5:
            self._injector.kill_one(self._pool)
        return self._interrupter.interrupt()

    def _check_after_interrupt(self, env_ids: Sequence[int]) -> None:
        """Check that an interrupted call has given a command to all of these envs or to none, and tell the oracle which."""
        self._report.inflicted["Ctrl-C"] += 1
        states = self._pool.states
        idle = [env_id for env_id in env_ids if states[env_id] in (EnvState.IDLE, EnvState.EXHAUSTED)]
        # An env that is FAULTED and not pending has an error that the next call raises, whether it got the command or not.
        lost = [env_id for env_id in env_ids if self._is_lost(env_id)]
        if idle and len(idle) + len(lost) != len(env_ids):
            self._report.complain(f"an interrupted call has left envs {idle} of {list(env_ids)} without a command")
        for env_id in (*idle, *lost):
            self._oracle.withdraw_command(env_id)

    def _is_lost(self, env_id: int) -> bool:
        """Whether an env is FAULTED and not pending: it has to be reset, and no wait will report it."""
        return self._pool.states[env_id] is EnvState.FAULTED and not has_command(self._pool, env_id)

    # ---- repairs by the user, under the policy "raise" --------------------------------------------------------------

    def _repair(self, error: StepmillError, *, unsent: Sequence[int] = ()) -> None:
        """Reset the envs that failed. Commands that were not sent (some of `unsent`) are withdrawn; others stay pending."""
        if self._kind.policy is not OnFault.RAISE or isinstance(error, RecvTimeout):
            raise error
        is_hung_thread = self._kind.backend == "thread" and "a thread that still runs" in error.message
        if isinstance(error, UsageError) and not (unsent or self._oracle.reported or is_hung_thread):
            raise error  # else a call has raised the errors of envs that are waited for here
        self._report.broken += 1
        self._report.kinds[type(error).__name__] += 1
        states = self._pool.states
        named = named_in(error) | self._oracle.reported
        self._named |= named
        self._find_unnamed()
        failed = named | set(self._oracle.idle)
        failed |= set(unsent) if self._pool._state.num_pending() < len(self._oracle.pending) else set()
        faulted = [env_id for env_id in sorted(failed) if states[env_id] is EnvState.FAULTED]
        self._oracle.reported.clear()
        for env_id in range(self._kind.num_envs):
            if states[env_id] is EnvState.IDLE and self._oracle.is_pending(env_id):
                self._oracle.withdraw_command(env_id)
        for _ in range(MAX_REPAIRS):
            try:
                self._retry_while_threads_hang(partial(self._reset, faulted))
            except _FAULTS as again:
                self._report.kinds[type(again).__name__] += 1
                states = self._pool.states  # the error may name envs that were still stepping
                named |= named_in(again)
                self._named |= named
                self._find_unnamed()
                more = {env_id for env_id in named_in(again) if states[env_id] is EnvState.FAULTED}
                faulted = sorted({*faulted, *more})
                continue
            return
        raise error

    def _find_unnamed(self) -> None:
        """Report envs that are lost and that no error has named since their reset. The next wait raises the faults of all others.

        An env whose result was ready when its worker died is named then, and FAULTED once the result is received.
        """
        known = self._named | self._pool._recovery.lost_envs()
        lost = [env_id for env_id in range(self._kind.num_envs) if self._is_lost(env_id) and env_id not in known]
        if lost:
            self._report.complain(f"envs {lost} are lost, and no error has named them")

    def _retry_while_threads_hang(self, reset: Callable[[], T]) -> T:
        """Return what a reset returns; repeat it while it is refused because a thread hangs."""
        until = time.monotonic() + HANG_GUARD_S
        while True:
            try:
                return reset()
            except UsageError:
                if self._kind.backend != "thread" or time.monotonic() > until:
                    raise
                time.sleep(THREAD_HANG_S / 10)

    def _reset(self, env_ids: Sequence[int]) -> None:
        """Reset these envs and wait, or revive them and let a later `recv` return the results of their resets."""
        if not env_ids:
            return
        if self._rng.random() < 0.5:
            batch = self._pool.reset(env_ids=env_ids)
            self._expect_resets(env_ids)
            self._oracle.check_batch(batch)
            return
        self._report.revivals += 1
        self._pool.revive(env_ids, wait=self._rng.random() < 0.5)
        self._expect_resets(self._pool.reset_async(env_ids=env_ids))

    def _withdraw_unsent(self, chosen: Sequence[int], sent: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Withdraw the commands of envs that the pool has found to be lost. The next `recv` raises their faults."""
        for env_id in {*chosen} - {*sent}:
            self._oracle.withdraw_command(env_id)

    def _expect_resets(self, env_ids: Sequence[int]) -> None:
        self._named.difference_update(env_ids)
        for env_id in env_ids:
            self._oracle.expect_reset(env_id)

    # ---- after the round --------------------------------------------------------------------------------------------

    def _check_health(self) -> None:
        """Check that a reset of all envs works."""
        for _ in range(MAX_REPAIRS):
            try:
                first = self._retry_while_threads_hang(self._pool.reset)
            except _FAULTS as error:
                if self._kind.policy is not OnFault.RAISE:
                    raise
                self._report.kinds[type(error).__name__] += 1
                continue
            break
        else:
            self._report.complain("a reset of all envs did not bring the pool back")
            return
        if self._kind.rows_each == 1 and first.obs[:, 0].tolist() != list(range(self._kind.num_envs)):
            self._report.complain(f"a reset of all envs gave {first.obs.tolist()}")

    def _read_capsules(self) -> None:
        if not self._kind.has_capsules:
            return
        for entry in os.scandir(self._crashes):
            self._report.capsules += 1
            try:
                capsule = read_capsule(entry.path)
            except StepmillError as error:
                self._report.complain(f"capsule {entry.name}: {error.message}")
                continue
            is_trapped = self._kind.steps or self._kind.mode is AutoresetMode.SAME_STEP
            is_fatal = not is_trapped and capsule.command == "step" and capsule.kind == "raised"
            if is_fatal and int(capsule.action(-1)[0]) != RAISE:
                self._report.complain(f"capsule {entry.name} does not hold the action that failed")
