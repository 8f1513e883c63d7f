"""Measures for `stepmill tune`: one env alone (`profile_env`), and pools of configurations by turns (`Arena`)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

from stepmill.observe.catalog import batch_actions
from stepmill.observe.process_usage import scheduled_seconds
from stepmill.observe.tune_choice import Configuration, EnvProfile, TuneRequest
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort, StepTuple
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import BackendName, PoolOptions, Start
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import leaves

NUM_DRAWS = 64
WARM_UP_S = 0.1
MIN_STEPS = 3
MAX_OPEN = 8  # pools at a time

EnvFn = Callable[[], object]


class PoolRunner:
    """A pool of one configuration, which is driven with random actions that were drawn before."""

    def __init__(self, request: TuneRequest, configuration: Configuration, num_envs: int) -> None:
        make = request.kernel if configuration.backend is BackendName.KERNEL else request.env.make
        has_limits = configuration.backend in (BackendName.THREAD, BackendName.PROCESS)
        limits = dict.fromkeys(("step_timeout_s", "reset_timeout_s"), request.step_timeout_s if has_limits else None)
        keywords: dict[str, Any] = {**configuration.keywords(), **limits}
        options = PoolOptions(**keywords, episode_stats=False, start=Start(show_progress=False))
        self._learner_s = request.learner_s
        self._batch_size = configuration.batch_size
        self.pool = Pool([cast("EnvFn", make)] * (num_envs + configuration.spare_envs), options=options)
        self._port = PoolPort(self.pool)
        with close_on_error(self.pool.close):
            self._num_rows = (self._batch_size or num_envs) * self.pool.spec.batch_size
            space = batch_actions(self.pool.single_action_space, self._num_rows, 0)
            self._actions = cycle([space.sample() for _ in range(NUM_DRAWS)])
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
        batch = self.pool.recv(self._batch_size)
        self._learn()
        self.pool.send(next(self._actions), batch.env_id)

    def step(self) -> StepTuple:
        """Step all envs."""
        return self._port.step_fast(next(self._actions))

    def _learn(self) -> None:
        until_s = time.perf_counter() + self._learner_s
        while self._learner_s and time.perf_counter() < until_s:
            pass

    def close(self) -> None:
        """End the pool."""
        self.pool.close()


class Arena:
    """The pools of the configurations that are compared. At most MAX_OPEN are open at a time; close it after use."""

    def __init__(self, request: TuneRequest) -> None:
        self._request = request
        self._open: dict[Configuration, PoolRunner] = {}

    def measure(self, configuration: Configuration, seconds: float) -> float:
        """Return the rows per second of one turn.

        Raises:
            StepmillError: the envs failed; the pool is closed.
        """
        try:
            if configuration not in self._open:
                if len(self._open) >= MAX_OPEN:  # not the oldest, which has the next turn
                    self._open.popitem()[1].close()
                self._open[configuration] = PoolRunner(self._request, configuration, self._request.num_envs)
                self._open[configuration].run(WARM_UP_S)
            return self._open[configuration].run(seconds)
        except StepmillError:
            self.keep_only({*self._open} - {configuration})
            raise

    def keep_only(self, configurations: Collection[Configuration]) -> None:
        """Close the pools of all other configurations."""
        for configuration in self._open.keys() - set(configurations):
            self._open.pop(configuration).close()

    def close(self) -> None:
        """End all pools."""
        self.keep_only(())


def profile_env(request: TuneRequest, seconds: float) -> EnvProfile:
    """Run one env alone, in a worker process if possible, and measure its steps and resets.

    Raises:
        StepmillError: the env raised, hung or crashed.
    """
    alone = Configuration(backend=BackendName.THREAD if request.unpicklable else BackendName.PROCESS, spin_us=0.0)
    begun_s = time.perf_counter()
    with closing(PoolRunner(replace(request, learner_s=0.0), alone, 1)) as runner:
        start_s = time.perf_counter() - begun_s
        runner.run(WARM_UP_S)
        stats, cpu_share, lengths = _run_alone(runner, seconds)
        spec = runner.pool.spec
    sizes = [leaf.dtype.itemsize * math.prod(leaf.shape) for _, leaf in leaves(spec.observation)]
    return EnvProfile(
        step_s=stats.step.mean_s,
        step_p50_s=stats.step.percentile(50),
        step_p99_s=stats.step.percentile(99),
        reset_s=stats.reset.mean_s,
        episode_steps=sum(lengths) / len(lengths) if lengths else math.inf,
        obs_bytes=sum(sizes) * spec.batch_size,
        cpu_share=cpu_share,
        num_rows=spec.batch_size,
        start_s=start_s,
    )


def _run_alone(runner: PoolRunner, seconds: float) -> tuple[PoolStats, float, list[int]]:
    """Return the statistics of about `seconds`, the share of that time on a core, and the lengths of episodes.

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
    busy_s = stats.workers[0].busy_s - (waited_s - waited_before_s)
    if not stats.resets:
        runner.pool.reset()
        stats = replace(stats, reset=(runner.pool.stats() - before).reset)
    return stats, min(1.0, (used_s - used_before_s) / busy_s) if busy_s > 0 else 1.0, lengths[1:] or lengths
