"""Breaks the workers of a pool at random, and checks every delivered transition against what a counting env must say.

```
 driver ── SIGKILL · SIGSTOP · actions that hang, raise, kill ──► workers
   ▲                                                                 │
   └── one Book per env: clock + 1, same episode, own action ◄── results
```
`python -m stepmill.testing.chaos --seconds 60` does it from the command line; its exit status is 1 if a transition was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from stepmill.pool.pool import Pool
from stepmill.spec.batch import Batch
from stepmill.spec.capsule import read_capsule
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import PoolOptions

KILL, RAISE, HANG = 10, 11, 12
"""Actions that break a `ChaosEnv`; those below 10 are harmless."""
NUM_ACTIONS = 13
HANG_S = 600.0
STEP_TIMEOUT_S = 0.5
MAX_COMPLAINTS = 20
NUM_ENVS, NUM_WORKERS, LENGTH = 8, 3, 12


class ChaosEnv(gymnasium.Env[NDArray[np.int64], np.int64]):
    """Counts its steps; obs [4] int64: identity, a number drawn at reset, clock, last action. The reward is the clock."""

    observation_space = gymnasium.spaces.Box(-1, 2**62, (4,), np.int64)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, identity: int = 0, length: int = LENGTH) -> None:
        self.identity = identity
        self._length = length
        self._tag = self._clock = self._action = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        super().reset(seed=seed)
        self._tag, self._clock, self._action = int(self.np_random.integers(2**62)), 0, -1
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, dict[str, Any]]:
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == RAISE:
            raise ValueError("this env was told to raise")
        if action == HANG:
            time.sleep(HANG_S)
        self._clock += 1
        self._action = int(action)
        return self._observe(), float(self._clock), False, self._clock >= self._length, {}

    def locate(self) -> int:
        """Return the identity, as a remote call."""
        return self.identity

    def _observe(self) -> NDArray[np.int64]:
        return np.array([self.identity, self._tag, self._clock, self._action], np.int64)


@dataclass
class ChaosReport:
    """What was inflicted and what came of it. `wrong` has the first complaints, in words; empty if all was well."""

    seed: int
    seconds: float = 0.0
    transitions: int = 0
    episodes: int = 0
    broken: int = 0
    calls: int = 0
    calls_failed: int = 0
    inflicted: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    capsules: int = 0
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list)

    def complain(self, text: str) -> None:
        """Count a wrong transition, and keep the words of the first."""
        self.num_wrong += 1
        if len(self.wrong) < MAX_COMPLAINTS:
            self.wrong.append(text)


@dataclass
class _Book:
    """What is known of one env: its last good observation, and the action under way (None: it waits for a command)."""

    obs: NDArray[np.int64]
    is_ended: bool = False
    action: int | None = None


@dataclass(frozen=True)
class _Result:
    env_id: int
    obs: NDArray[np.int64]
    reward: float
    terminated: bool
    truncated: bool
    fault: str | None


def check_result(book: _Book, result: _Result) -> str | None:
    """Return what is wrong with a result, if anything is. NEXT_STEP, policy truncate."""
    where = f"env {result.env_id}, action {book.action}, after {book.obs.tolist()}, gave {result}"
    if book.action is None:
        return f"{where}: it had no command; doubled"
    if result.obs[0] != result.env_id:
        return f"{where}: attributed to the wrong env"
    if book.is_ended:
        is_first = result.obs[2] == 0 and result.obs[1] != book.obs[1] and result.reward == 0.0
        is_plain = not (result.terminated or result.truncated or result.fault)
        return None if is_first and is_plain else f"{where}: not the first of an episode"
    if result.fault is not None:
        is_marked = result.truncated and not result.terminated and result.reward == 0.0
        return None if is_marked and np.array_equal(result.obs, book.obs) else f"{where}: not marked as broken"
    expected = [result.env_id, book.obs[1], book.obs[2] + 1, book.action]
    is_next = result.obs.tolist() == expected and result.reward == float(expected[2])
    is_flagged = result.truncated == bool(expected[2] >= LENGTH) and not result.terminated
    return None if is_next and is_flagged else f"{where}: not the next transition"


def _results(batch: Batch) -> list[_Result]:
    info: Mapping[str, Any] = batch.info
    count = len(batch.env_id)
    has_fault = info["_fault"] if "fault" in info else np.zeros(count, bool)
    return [
        _Result(
            int(batch.env_id[i]),
            np.array(batch.obs[i]),
            float(batch.reward[i]),
            bool(batch.terminated[i]),
            bool(batch.truncated[i]),
            str(info["fault"]["kind"][i]) if has_fault[i] else None,
        )
        for i in range(count)
    ]


class _Round:
    """One pool, driven until its time is over. `is_sync`: by step() of all envs; else by send() and recv() of some.

    `is_rich`: with overlapped resets, and a crash capsule of each fault.
    """

    def __init__(self, report: ChaosReport, rng: random.Random, *, is_sync: bool, is_rich: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stepmill-chaos-")
        self._report = report
        self._rng = rng
        self._is_sync = is_sync
        self._pool = Pool(
            [partial(ChaosEnv, env_id) for env_id in range(NUM_ENVS)],
            backend="process",
            num_workers=NUM_WORKERS,
            options=PoolOptions(
                on_fault="truncate",  # type: ignore[arg-type]
                seeding="per_episode",  # type: ignore[arg-type]
                step_timeout_s=STEP_TIMEOUT_S,
                reset_timeout_s=5.0,
                call_timeout_s=5.0,
                overlap_resets=is_rich,
                crash_dir=self._folder.name if is_rich else None,
                max_restarts=1_000_000,
                restart_window_s=0.02,
            ),
        )

    def run(self, until: float) -> None:
        """Drive the pool until that time of the monotonic clock; close it."""
        with self._folder, self._pool as pool:
            first = pool.reset(seed=self._rng.randrange(2**31))
            books = [_Book(np.array(obs)) for obs in first.obs]
            while time.monotonic() < until:
                self._strike()
                batch = self._step(books) if self._is_sync else self._exchange(books)
                self._check(books, batch)
                self._call()
            while (left := sum(book.action is not None for book in books)) > 0:
                self._check(books, pool.recv(left, timeout_s=30.0))
            self._read_capsules()

    def _read_capsules(self) -> None:
        for entry in os.scandir(self._folder.name):
            self._report.capsules += 1
            try:
                capsule = read_capsule(entry.path)
            except StepmillError as error:
                self._report.complain(f"capsule {entry.name}: {error.message}")
                continue
            if capsule.kind == "raised" and (capsule.command, int(capsule.action(-1)[0])) != ("step", RAISE):
                self._report.complain(f"capsule {entry.name} does not hold the action that failed")

    def _actions(self, books: Sequence[_Book], env_ids: Sequence[int]) -> NDArray[np.int64]:
        actions = np.array([self._rng.randrange(10) for _ in env_ids], np.int64)
        if self._rng.random() < 0.05:
            name, action = self._rng.choice([("killed itself", KILL), ("raised", RAISE), ("hung", HANG)])
            actions[self._rng.randrange(len(actions))] = action
            self._report.inflicted[name] += 1
        for env_id, action in zip(env_ids, actions.tolist(), strict=True):
            books[env_id].action = action
        return actions

    def _step(self, books: Sequence[_Book]) -> Batch:
        return self._pool.step(self._actions(books, range(NUM_ENVS)))

    def _exchange(self, books: Sequence[_Book]) -> Batch:
        idle = [env_id for env_id, book in enumerate(books) if book.action is None]
        chosen = sorted(self._rng.sample(idle, self._rng.randint(0, len(idle))))
        if chosen:
            self._pool.send(self._actions(books, chosen), chosen)
        if self._rng.random() < 0.3:
            self._strike()
        num_pending = sum(book.action is not None for book in books)
        if num_pending == 0:
            return self._exchange(books)
        return self._pool.recv(self._rng.randint(1, num_pending), timeout_s=30.0)

    def _strike(self) -> None:
        if self._rng.random() > 0.02:
            return
        name, number = self._rng.choice([("SIGKILL", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)])
        victims = self._rng.sample(self._pool.stats()["workers"], self._rng.choice([1, 1, 1, 2]))
        for victim in victims:
            try:
                os.kill(victim["pid"], number)
            except ProcessLookupError:
                continue  # it is dead already
            self._report.inflicted[name] += 1

    def _call(self) -> None:
        if self._rng.random() > 0.01:
            return
        env_id = self._rng.randrange(NUM_ENVS)
        self._report.calls += 1
        try:
            answers = self._pool.call("locate", env_ids=[env_id])
        except StepmillError:
            self._report.calls_failed += 1
            return
        if list(answers) != [env_id]:
            self._report.complain(f"a call of env {env_id} was answered by {answers}")

    def _check(self, books: Sequence[_Book], batch: Batch) -> None:
        for result in _results(batch):
            book = books[result.env_id]
            complaint = check_result(book, result)
            if complaint is not None:
                self._report.complain(complaint)
            if result.fault is not None:
                self._report.broken += 1
                self._report.kinds[result.fault] += 1
            self._report.transitions += 1
            self._report.episodes += result.truncated
            book.obs, book.is_ended, book.action = result.obs, result.truncated, None


def run_chaos(seconds: float, seed: int = 0, *, round_s: float = 10.0) -> ChaosReport:
    """Break workers of sync and async pools by turns, each pool for up to `round_s` seconds, and report.

    The process must be the only one to signal those workers; what it breaks is drawn from `seed`, when it strikes depends
    on the machine.
    """
    report = ChaosReport(seed)
    rng = random.Random(seed)
    begin = time.monotonic()
    rounds = itertools.count()
    while (now := time.monotonic()) < begin + seconds:
        number = next(rounds)
        chaos = _Round(report, rng, is_sync=number % 2 == 0, is_rich=number % 4 in (1, 2))
        chaos.run(min(now + min(round_s, seconds / 2), begin + seconds))
    report.seconds = time.monotonic() - begin
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stepmill.testing.chaos", description=run_chaos.__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    report = run_chaos(chosen.seconds, chosen.seed)
    sys.stdout.write(f"{report}\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
