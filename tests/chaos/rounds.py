"""One pool that is driven for a while as random faults are injected.

```
 injector ── signals, traps, breaking actions, calls ──► workers
                                                            │
   model ── checks clock, episode, actions, state ◄──── results
```
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from contextlib import nullcontext
from functools import partial

from stepmill.pool.capsule import read_capsule
from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import AutoresetMode, BackendName, OnFault
from tests.chaos.envs import TrappedHistoryEnv, make_trapped
from tests.chaos.fault_injection import Interrupter
from tests.chaos.kinds import Kind
from tests.chaos.report import ChaosReport
from tests.chaos.storm import StormCalls, StormCommands
from tests.pool_model.envs import ONCE, RAISE
from tests.pool_model.records import EXHAUSTED, IDLE
from tests.pool_model.results import WrongError


def make_pool(kind: Kind, context: str, traps: str, crashes: str | None = None) -> Pool:
    """Make a pool of this kind; `traps` is the folder of its traps, `crashes` that of its capsules."""
    each, lengths = kind.rows_each, kind.lengths
    env_fns = [
        partial(
            make_trapped,
            TrappedHistoryEnv,
            traps,
            identity,
            lengths[identity * each : (identity + 1) * each],
            kind.hang_s,
            mode=kind.mode.value,
        )
        for identity in range(kind.num_envs + kind.num_spares)
    ]
    num_workers = None if kind.backend == "serial" else kind.num_workers
    options = kind.pool_options(context, crashes)
    return Pool(env_fns, backend=BackendName(kind.backend), num_workers=num_workers, options=options)


class Round:
    """One pool. `is_sync`: driven by step() of all envs; else by send() and recv() of some."""

    def __init__(self, report: ChaosReport, rng: random.Random, kind: Kind, *, is_sync: bool, context: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="stepmill-chaos-")
        self._report = report
        self._rng = rng
        self._kind = kind
        self._is_sync = is_sync
        traps, self._crashes = (os.path.join(self.folder.name, name) for name in ("traps", "crashes"))
        os.mkdir(traps)
        self._interrupter = Interrupter(rng)
        self.pool = make_pool(kind, context, traps, self._crashes)
        self._calls = StormCalls(kind, self.pool, report, rng, self._interrupter, traps)
        self._commands = StormCommands(self._calls, report, rng)
        self.model = self._calls.model
        self._envs = self.model.envs

    def run(self, seconds: float) -> None:
        """Drive the pool for this long, and close it."""
        with self.folder, self.pool as pool, self._interrupter if self._kind.is_interrupted else nullcontext():
            try:
                self.begin()
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    self.advance()
                self.end()
            except (StepmillError, WrongError) as error:
                last = "\n    ".join(self._calls.lines)
                self._report.complain(
                    f"{type(error).__name__}: {error}; states {pool.states}; the last calls:\n    {last}"
                )
            self._report.restarts += pool._recovery.workers.num_restarts
            self._read_capsules()

    def begin(self) -> None:
        """Reset all envs with a seed."""
        self._commands.reset(None, seed=self._rng.randrange(2**31))

    def end(self) -> None:
        """Check that everything pending comes, and that a reset brings every env back."""
        self._commands.bring_back()

    def advance(self) -> None:
        """Inject faults, and step some envs, or all."""
        injector = self._calls.injector
        injector.inject(self.pool)
        self._reset_some()
        actions = injector.actions(len(self._envs) * self._kind.rows_each)
        if self._is_sync:
            self._commands.step(actions, "step")
        else:
            idle = [env.env_id for env in self._envs if not env.is_pending]
            chosen = sorted(self._rng.sample(idle, self._rng.randint(0, len(idle))))
            if chosen:
                self._commands.send(chosen, actions, is_careless=False)
            if self._rng.random() < 0.3:
                injector.inject(self.pool)
            if self.model.num_pending:
                self._commands.recv(None, "count", self._rng.randint(1, self.model.num_pending))
        injector.call(self.pool)

    def _reset_some(self) -> None:
        """Reset the envs that need it, some exhausted ones, and sometimes one in the middle of an episode."""
        self._commands.reset_refused(self._envs)
        idle = [env.env_id for env in self._envs if env.status == IDLE]
        exhausted = [env.env_id for env in self._envs if env.status == EXHAUSTED]
        chosen = []
        if len(exhausted) == len(self._envs) or (exhausted and self._rng.random() < 0.2):
            chosen.append(self._rng.choice(exhausted))
        # Under the policy "raise", after a refused reset it is not known whether the episode continues.
        if self._kind.policy is not OnFault.RAISE and idle and self._rng.random() < 0.03:
            chosen.append(self._rng.choice(idle))
        if chosen and self._rng.random() < 0.5:
            self._commands.reset(sorted(chosen))
        elif chosen:
            self._commands.reset_async(sorted(chosen))

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
            if is_fatal and int(capsule.action(-1)[0]) % ONCE != RAISE:
                self._report.complain(f"capsule {entry.name} does not hold the action that failed")
