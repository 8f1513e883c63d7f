"""What envs cost that raise in one of N steps: a pool of such envs and a pool without errors take turns.

    python -m benchmarks.env_errors [--seconds 60] [--every 2000] [--env-us 100] [--num-envs 8] [--num-workers 2]

For the policies "truncate" and "replay" it prints the steps per second of both pools, their ratio and the largest possible
ratio, the longest step of each, and the number of errors that reached the learner. If there was one, the exit status is 1:
with the default options an env may raise 100 times in a minute, which envs that are much faster than 100 us exceed.

The largest possible ratio is that of an engine without any cost: a replayed step takes as long as a step, and a step of all
envs takes as long as that of the slowest worker.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import stepmill
from stepmill.pool.port import PoolPort

ROUND_S = 0.5
LENGTH = 200
POLICIES = ("truncate", "replay")


class RareErrorEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Computes for `env_s` per step, and raises at random in one of `every` steps; never if that is 0. Episodes have 200 steps."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, every: int, number: int, env_s: float) -> None:
        """`number`: seed of the random errors."""
        self._every = every
        self._env_s = env_s
        self._chance = random.Random(number)
        self._clock = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._clock = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> Any:
        if self._every and self._chance.random() * self._every < 1:
            raise ValueError("a rare error")
        self._clock += 1
        until = time.perf_counter() + self._env_s
        while time.perf_counter() < until:
            pass
        return self._observe(), 1.0, False, self._clock >= LENGTH, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.full(4, self._clock, np.float32)


@dataclass
class PoolRun:
    """One pool, and the measurements of it.

    Attributes:
        rates: steps of all envs per second, by round.
        longest_s: the longest step.
        num_errors: how many errors reached the learner; `last_error` is the text of the last one.
        num_faults: number of rows that were marked with a fault.
    """

    pool: stepmill.Pool
    actions: NDArray[np.int64]
    rates: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    num_errors: int = 0
    num_faults: int = 0
    last_error: str = ""

    def run(self, seconds: float) -> None:
        """Step for this long, and append the rate."""
        begin = now = time.perf_counter()
        num_steps = 0
        while now - begin < seconds:
            is_marked = self._step()
            before, now = now, time.perf_counter()
            self.longest_s = max(self.longest_s, now - before)
            self.num_faults += is_marked
            num_steps += 1
        self.rates.append(num_steps * len(self.actions) / (now - begin))

    def _step(self) -> int:
        try:
            *_, info = PoolPort(self.pool).step_fast(self.actions)
        except stepmill.StepmillError as error:
            self.num_errors += 1
            self.last_error = error.message
            self.pool.reset()
            return 0
        return int(np.count_nonzero(info["_fault"])) if "fault" in info else 0


def largest_ratio(policy: str, num_envs: int, num_workers: int, every: int) -> float:
    """Return the ratio of an engine without any cost: simulate 50,000 steps, and count what each worker does."""
    chance = random.Random(0)
    clocks = [0] * num_envs
    num_played = num_needed = 0
    for _ in range(50_000):
        played = [0] * num_workers
        needed = [0] * num_workers
        for env_id, clock in enumerate(clocks):
            worker = env_id * num_workers // num_envs
            is_reset = clock == LENGTH
            needed[worker] += not is_reset
            is_raised = not is_reset and chance.random() * every < 1
            if is_raised and policy == "truncate":
                clocks[env_id] = LENGTH
                continue
            played[worker] += (not is_reset) + (num_replayed(clock, every, chance) if is_raised else 0)
            clocks[env_id] = 0 if is_reset else clock + 1
        num_played += max(played)
        num_needed += max(needed)
    return num_needed / num_played


def num_replayed(length: int, every: int, chance: random.Random) -> int:
    """Return how many steps the replay of an episode takes, in which the env may raise again at random."""
    num_steps = place = 0
    while place < length:
        is_raised = chance.random() * every < 1
        num_steps += not is_raised
        place = 0 if is_raised else place + 1
    return num_steps


def compare(
    policy: str, seconds: float, make_env_fns: Callable[[int], list[Callable[[], Any]]], **arguments: Any
) -> int:
    """Measure both pools in turn and print the result; return the number of errors that reached the learner."""
    num_workers, every = arguments["num_workers"], arguments["every"]
    options = stepmill.PoolOptions(on_fault=policy, seeding="per_episode")
    faulty, calm = (
        stepmill.Pool(make_env_fns(each), backend="process", num_workers=num_workers, options=options)
        for each in (every, 0)
    )
    with faulty, calm:
        runs = [PoolRun(pool, np.zeros(pool.num_envs, np.int64)) for pool in (faulty, calm)]
        for run in runs:
            run.pool.reset(seed=0)
            run.run(ROUND_S)
            run.rates.clear()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for run in runs:
                run.run(ROUND_S)
    with_errors, without = runs
    ratio = statistics.median(with_errors.rates) / statistics.median(without.rates)
    num_errors = with_errors.num_errors + without.num_errors
    sys.stdout.write(
        f"{policy}: {statistics.median(with_errors.rates):,.0f} of {statistics.median(without.rates):,.0f} env steps/s, "
        f"ratio {ratio:.3f} of at most {largest_ratio(policy, len(make_env_fns(0)), num_workers, every):.3f}; longest step {1e3 * with_errors.longest_s:.1f} ms, without errors "
        f"{1e3 * without.longest_s:.1f} ms; rows marked {with_errors.num_faults}, raised to the learner {num_errors}"
        f"{f' ({with_errors.last_error})' if with_errors.last_error else ''}\n"
    )
    return num_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.env_errors", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each policy")
    parser.add_argument("--every", type=int, default=2000, help="an env raises in one of N steps")
    parser.add_argument("--env-us", type=float, default=100.0, help="microseconds of a step of an env")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    logging.getLogger("stepmill").setLevel(
        logging.ERROR
    )  # else the terminal's cost of one line per fault would be measured, too

    def make_env_fns(every: int) -> list[Callable[[], Any]]:
        return [partial(RareErrorEnv, every, number, 1e-6 * chosen.env_us) for number in range(chosen.num_envs)]

    num_errors = sum(
        compare(policy, chosen.seconds, make_env_fns, num_workers=chosen.num_workers, every=chosen.every)
        for policy in POLICIES
    )
    return 1 if num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
