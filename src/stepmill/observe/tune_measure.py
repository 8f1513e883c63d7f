"""Measures for `stepmill tune`: one env alone (`profile_env`), and pools of configurations by turns (`Arena`)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from stepmill.observe.catalog import batch_actions
from stepmill.observe.process_usage import scheduled_seconds
from stepmill.observe.tune_choice import Configuration, EnvProfile
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort, StepTuple
from stepmill.spec.closing import close_on_error
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import BackendName, PoolOptions, Start
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import leaves

NUM_DRAWS = 64
WARM_UP_S = 0.1
MIN_STEPS = 3
MAX_OPEN = 8  # pools at a time

EnvFn = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        make: the function that builds the env.
        kernel: the same env as a kernel; None if there is none.
        num_envs: N.
        learner_s: seconds in which the learner computes between two batches.
        time_limit_s: the limit of a step and of a reset, after which the env counts as hung.
        can_pickle: whether worker processes can get `make`.
    """

    make: EnvFn
    kernel: EnvFn | None
    num_envs: int
    learner_s: float
    time_limit_s: float
    can_pickle: bool


class PoolRunner:
    """A pool of one configuration, which is driven with random actions that were drawn before."""

    def __init__(self, subject: Subject, configuration: Configuration, num_envs: int) -> None:
        make = subject.kernel if configuration.backend is BackendName.KERNEL else subject.make
        if make is None:
            raise ValueError("a kernel is to be measured, but the env has none")
        self._learner_s = subject.learner_s
        self._batch_size = configuration.batch_size
        self.pool = Pool([make] * (num_envs + configuration.spare_envs), options=_options(configuration, subject))
        self._port = PoolPort(self.pool)
        with close_on_error(self.pool.close):
            num_rows = (self._batch_size or num_envs) * self.pool.spec.batch_size
            space = batch_actions(self.pool.single_action_space, num_rows, 0)
            self._actions = [space.sample() for _ in range(NUM_DRAWS)]
            self._num_rows = num_rows
            self._next = 0
            self.pool.reset_async(seed=0)
            if self._batch_size is None:
                self.pool.recv()

    def run(self, seconds: float) -> float:
        """Step for about `seconds`, and return the rows per second."""
        if self._batch_size is not None:
            # All envs have finished since the last turn. Give them commands, so that the turn begins as it continues.
            for _ in range(self.pool.num_envs // self._batch_size):
                self._advance()
        begun_s, num_batches, elapsed_s = time.perf_counter(), 0, 0.0
        while elapsed_s < seconds or not num_batches:
            self._advance()
            num_batches += 1
            elapsed_s = time.perf_counter() - begun_s
        return num_batches * self._num_rows / elapsed_s

    def _advance(self) -> None:
        if self._batch_size is None:
            self.step()
            self._learn()
            return
        actions = self._draw()
        batch = self.pool.recv(self._batch_size)
        self._learn()
        self.pool.send(actions, batch.env_id)

    def step(self) -> StepTuple:
        """Step all envs."""
        return self._port.step_fast(self._draw())

    def _draw(self) -> object:
        self._next += 1
        return self._actions[self._next % NUM_DRAWS]

    def _learn(self) -> None:
        if not self._learner_s:
            return
        until_s = time.perf_counter() + self._learner_s
        while time.perf_counter() < until_s:
            pass

    def close(self) -> None:
        """End the pool."""
        self.pool.close()


def _options(configuration: Configuration, subject: Subject) -> PoolOptions:
    limit_s = subject.time_limit_s if configuration.backend in (BackendName.THREAD, BackendName.PROCESS) else None
    limits: dict[str, Any] = {"step_timeout_s": limit_s, "reset_timeout_s": limit_s}
    keywords: dict[str, Any] = configuration.keywords()
    return PoolOptions(**keywords, **limits, episode_stats=False, start=Start(show_progress=False))


class Arena:
    """The pools of the configurations that are compared. At most MAX_OPEN are open at a time; close it after use."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._open: dict[Configuration, PoolRunner] = {}

    def measure(self, configuration: Configuration, seconds: float) -> float:
        """Return the rows per second of one turn.

        Raises:
            StepmillError: the envs failed; the pool is closed.
        """
        try:
            return self._runner(configuration).run(seconds)
        except StepmillError:
            self._close(configuration)
            raise

    def keep_only(self, configurations: Iterable[Configuration]) -> None:
        """Close the pools of all other configurations."""
        kept = set(configurations)
        for configuration in [each for each in self._open if each not in kept]:
            self._close(configuration)

    def close(self) -> None:
        """End all pools."""
        self.keep_only(())

    def _runner(self, configuration: Configuration) -> PoolRunner:
        if configuration not in self._open:
            if len(self._open) >= MAX_OPEN:
                self._close(next(iter(self._open)))
            runner = PoolRunner(self._subject, configuration, self._subject.num_envs)
            self._open[configuration] = runner
            runner.run(WARM_UP_S)
        return self._open[configuration]

    def _close(self, configuration: Configuration) -> None:
        runner = self._open.pop(configuration, None)
        if runner is not None:
            runner.close()


def profile_env(subject: Subject, seconds: float) -> EnvProfile:
    """Run one env alone, in a worker process if possible, and measure its steps and resets.

    Raises:
        StepmillError: the env raised, hung or crashed.
    """
    backend = BackendName.PROCESS if subject.can_pickle else BackendName.THREAD
    begun_s = time.perf_counter()
    runner = PoolRunner(replace(subject, learner_s=0.0), Configuration(backend=backend, spin_us=0.0), 1)
    start_s = time.perf_counter() - begun_s
    try:
        runner.run(WARM_UP_S)
        stats, cpu_s, waited_s, lengths = _run_alone(runner, seconds)
        spec = runner.pool.spec
    finally:
        runner.close()
    busy_s = stats.workers[0].busy_s - waited_s
    return EnvProfile(
        step_s=stats.step.mean_s,
        step_p50_s=stats.step.percentile(50),
        step_p99_s=stats.step.percentile(99),
        reset_s=stats.reset.mean_s,
        episode_steps=sum(lengths) / len(lengths) if lengths else math.inf,
        obs_bytes=_bytes_of(spec),
        cpu_share=min(1.0, cpu_s / busy_s) if busy_s > 0 else 1.0,
        num_rows=spec.batch_size,
        start_s=start_s,
    )


def _bytes_of(spec: EnvSpec) -> int:
    sizes = [leaf.dtype.itemsize * math.prod(leaf.shape) for _, leaf in leaves(spec.observation)]
    return sum(sizes) * spec.batch_size


def _run_alone(runner: PoolRunner, seconds: float) -> tuple[PoolStats, float, float, list[int]]:
    """Return (statistics, seconds on a core, seconds waiting for one, lengths of episodes) of about `seconds`.

    There is at least one reset. If several episodes ended, the length of the first is left out. The first reset and the
    first steps, which may load files or compile code, are not counted.
    """
    before = runner.pool.stats()
    pid = before.workers[0].pid or os.getpid()
    used_before_s, waited_before_s = scheduled_seconds(pid)
    until_s = time.perf_counter() + seconds
    lengths, length, num_steps = [], 0, 0
    while num_steps < MIN_STEPS or time.perf_counter() < until_s:
        _, _, terminated, truncated, _ = runner.step()
        num_steps += 1
        length += 1
        if (terminated | truncated).any():
            lengths.append(length)
            length = -1  # the next row is a reset
    used_s, waited_s = scheduled_seconds(pid)
    stats = runner.pool.stats() - before
    if not stats.resets:
        runner.pool.reset()
        stats = replace(stats, reset=(runner.pool.stats() - before).reset)
    return stats, used_s - used_before_s, waited_s - waited_before_s, lengths[1:] or lengths
