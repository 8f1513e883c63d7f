"""One pool, driven until its time is over, while its workers are broken at random.

```
 mischief ── signals · traps · actions that break · calls ──► workers
                                                                 │
   books ── clock + 1, same episode, own action, own memory ◄── results
```
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.pool import Pool
from stepmill.spec.capsule import read_capsule
from stepmill.spec.errors import EnvError, EnvTimeout, RecvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import AutoresetMode, BackendName, EnvState, OnFault
from stepmill.testing.chaos.books import Books
from stepmill.testing.chaos.envs import RAISE, make_env
from stepmill.testing.chaos.interrupts import Interrupter
from stepmill.testing.chaos.kinds import THREAD_HANG_S, Kind
from stepmill.testing.chaos.mischief import Mischief
from stepmill.testing.chaos.report import ChaosReport
from stepmill.testing.chaos.results import named_in

HANG_GUARD_S = 30.0
MAX_REPAIRS = 20
_FAULTS = (EnvError, EnvTimeout, WorkerDied)


class Round:
    """One pool. `is_sync`: driven by step() of all envs; else by send() and recv() of some."""

    def __init__(self, report: ChaosReport, rng: random.Random, kind: Kind, *, is_sync: bool, context: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stepmill-chaos-")
        self._report = report
        self._rng = rng
        self._kind = kind
        self._is_sync = is_sync
        self._books = Books(kind, report)
        self._traps, self._crashes = (os.path.join(self._folder.name, name) for name in ("traps", "crashes"))
        os.mkdir(self._traps)
        self._interrupter = Interrupter(rng)
        self._mischief = Mischief(kind, self._books, report, rng, self._traps)
        num_objects = kind.num_envs + kind.num_spares
        make = partial(
            make_env,
            mode=kind.mode.value,
            hang_s=kind.hang_s,
            is_ragged=kind.is_ragged,
            has_unreadable=kind.has_unreadable,
        )
        env_fns = [partial(make, self._traps, identity, kind.rows_each) for identity in range(num_objects)]
        options = kind.pool_options(context, self._crashes)
        num_workers = None if kind.backend == "serial" else kind.num_workers
        self._pool = Pool(env_fns, backend=BackendName(kind.backend), num_workers=num_workers, options=options)

    def run(self, seconds: float) -> None:
        """Drive the pool for so long; close it."""
        with self._folder, self._pool as pool, self._interrupter if self._kind.is_interrupted else nullcontext():
            self._books.begin(pool.reset(seed=self._rng.randrange(2**31)))
            until = time.monotonic() + seconds
            try:
                while time.monotonic() < until:
                    self._advance()
                while self._books.pending:
                    self._receive(len(self._books.pending))
                self._check_health()
            except StepmillError as error:
                self._report.complain(f"{type(error).__name__}: {error}; states {pool.states}")
            self._report.restarts += pool._running.faults.workers.num_restarts
            self._read_capsules()

    # ---- driving ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._mischief.strike(self._pool)
        self._reset_some()
        if self._is_sync:
            self._step()
        else:
            self._exchange()
        self._mischief.call(self._pool)

    def _reset_some(self) -> None:
        """Reset what the user must, some of what is exhausted, and now and then somebody in mid-episode."""
        chosen = set(self._books.ended)
        exhausted = self._books.exhausted
        if len(exhausted) == self._kind.num_envs or (exhausted and self._rng.random() < 0.2):
            chosen.add(self._rng.choice(exhausted))
        # Under the policy "raise" a reset that was refused leaves an episode of which nobody knows whether it goes on.
        if self._kind.policy is not OnFault.RAISE and self._books.idle and self._rng.random() < 0.03:
            chosen.add(self._rng.choice(self._books.idle))
        if not chosen:
            return
        ids = sorted(chosen)
        self._expect_resets(ids)
        try:
            if self._rng.random() < 0.5:
                self._books.take(self._pool.reset(env_ids=ids))
            else:
                self._pool.reset_async(env_ids=ids)
                if self._is_sync:
                    self._receive(len(ids))
        except StepmillError as error:
            self._mend(error, unsent=ids)
        while self._is_sync and self._books.pending:
            self._receive(len(self._books.pending))

    def _draw(self, env_ids: Sequence[int]) -> NDArray[np.int64]:
        rows_each = self._kind.rows_each
        actions = self._mischief.actions(len(env_ids) * rows_each)
        for place, env_id in enumerate(env_ids):
            self._books.command(env_id, actions[place * rows_each : (place + 1) * rows_each])
        return np.array(actions, np.int64)

    def _step(self) -> None:
        if self._books.ended:
            return  # somebody's reset has failed, or was broken: it is reset again first
        actions = self._draw(range(self._kind.num_envs))
        try:
            with self._interrupted():
                batch = self._pool.step(actions)
        except KeyboardInterrupt:
            self._note_interrupt(range(self._kind.num_envs))
        except StepmillError as error:
            self._mend(error, unsent=range(self._kind.num_envs))
        else:
            self._books.take(batch)
        while self._books.pending:
            self._receive(len(self._books.pending))

    def _exchange(self) -> None:
        idle = sorted({*self._books.idle} - {*self._books.ended, *self._books.exhausted})
        chosen = sorted(self._rng.sample(idle, self._rng.randint(0, len(idle))))
        if chosen:
            actions = self._draw(chosen)
            try:
                with self._interrupted():
                    self._pool.send(actions, chosen)
            except KeyboardInterrupt:
                self._note_interrupt(chosen)
            except StepmillError as error:
                self._mend(error, unsent=chosen)
        if self._rng.random() < 0.3:
            self._mischief.strike(self._pool)
        if self._books.pending:
            self._receive(self._rng.randint(1, len(self._books.pending)))

    def _receive(self, count: int) -> None:
        try:
            with self._interrupted():
                batch = self._pool.recv(count, timeout_s=HANG_GUARD_S)
        except KeyboardInterrupt:
            self._note_interrupt([])
        except StepmillError as error:
            self._mend(error)
        else:
            self._books.take(batch)

    def _interrupted(self) -> AbstractContextManager[None]:
        """Now and then, interrupt what the block does; half of the times while workers are repaired."""
        if not self._kind.is_interrupted or self._rng.random() > 0.15:
            return nullcontext()
        if self._rng.random() < 0.5:
            self._mischief.kill_one(self._pool)
        return self._interrupter.strike()

    def _note_interrupt(self, env_ids: Sequence[int]) -> None:
        """Find out whether a call that was interrupted has commanded these envs: all of them, or none."""
        self._report.inflicted["Ctrl-C"] += 1
        states = self._pool.states
        idle = [env_id for env_id in env_ids if states[env_id] in (EnvState.IDLE, EnvState.EXHAUSTED)]
        # What is FAULTED and not pending has an error that the next call raises, whether it was commanded or not.
        lost = [env_id for env_id in env_ids if self._is_lost(env_id)]
        if idle and len(idle) + len(lost) != len(env_ids):
            self._report.complain(f"an interrupted call has left envs {idle} of {list(env_ids)} without a command")
        for env_id in (*idle, *lost):
            self._books.withdraw(env_id)

    def _is_lost(self, env_id: int) -> bool:
        """Whether an env has to be reset: it is FAULTED, and no call that waits for it will say so."""
        return self._pool.states[env_id] is EnvState.FAULTED and not self._pool._state.is_pending(env_id)

    # ---- under the policy "raise" the user mends ------------------------------------------------------------------

    def _mend(self, error: StepmillError, *, unsent: Sequence[int] = ()) -> None:
        """Reset what failed. What was not sent (some of `unsent`) is withdrawn, what is pending stays so."""
        if self._kind.policy is not OnFault.RAISE or isinstance(error, RecvTimeout):
            raise error
        is_hung_thread = self._kind.backend == "thread" and "a thread that still runs" in error.message
        if isinstance(error, UsageError) and not (unsent or self._books.told or is_hung_thread):
            raise error  # else a call has told of envs that are waited for here
        self._report.broken += 1
        self._report.kinds[type(error).__name__] += 1
        states = self._pool.states
        told = named_in(error) | self._books.told | set(self._books.idle)
        told |= set(unsent) if self._pool._state.num_pending() < len(self._books.pending) else set()
        # Others have a fault that is yet to be told: by the next call that waits for them. A worker that could not be
        # rebuilt costs all of its envs, though its error names the one whose constructor failed.
        lost = {env_id for env_id in range(self._kind.num_envs) if self._is_lost(env_id)}
        faulted = [env_id for env_id in sorted(told | lost) if states[env_id] is EnvState.FAULTED]
        self._books.told.clear()
        for env_id in range(self._kind.num_envs):
            if states[env_id] is EnvState.IDLE and self._books.is_pending(env_id):
                self._books.withdraw(env_id)
        for _ in range(MAX_REPAIRS):
            try:
                self._reset(faulted)
            except _FAULTS as again:
                self._report.kinds[type(again).__name__] += 1
                states = self._pool.states  # it may tell of envs that were still at work
                more = {env_id for env_id in named_in(again) if states[env_id] is EnvState.FAULTED}
                more |= {env_id for env_id in range(self._kind.num_envs) if self._is_lost(env_id)}
                faulted = sorted({*faulted, *more})
                continue
            except UsageError:
                if self._kind.backend != "thread":
                    raise
                time.sleep(THREAD_HANG_S / 10)  # it hangs, and cannot be ended
                continue
            return
        raise error

    def _reset(self, env_ids: Sequence[int]) -> None:
        """Reset these envs; or revive them first, and leave the results of their resets to be received with the others'."""
        if not env_ids:
            return
        if self._rng.random() < 0.5:
            batch = self._pool.reset(env_ids=env_ids)
            self._expect_resets(env_ids)
            self._books.take(batch)
            return
        self._report.revivals += 1
        self._pool.revive(env_ids, wait=self._rng.random() < 0.5)
        self._pool.reset_async(env_ids=env_ids)
        self._expect_resets(env_ids)

    def _expect_resets(self, env_ids: Sequence[int]) -> None:
        for env_id in env_ids:
            self._books.expect_reset(env_id)

    # ---- afterwards -----------------------------------------------------------------------------------------------

    def _check_health(self) -> None:
        """After all that the pool is whole: a reset of all, and a few steps."""
        for _ in range(MAX_REPAIRS):
            try:
                first = self._pool.reset()
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
