"""What an env costs that raises once in so many steps: a pool with such envs beside one without, by turns.

    python -m benchmarks.env_errors [--seconds 60] [--every 2000] [--env-us 100] [--num-envs 8] [--num-workers 2]

Under "truncate" and "replay". For each it prints the steps per second of both pools and their ratio, the longest step of
each, and the errors that reached the learner. The exit status is 1 if there was one: with the default options an env may
raise 100 times in a minute, which envs of much less than 100 us exceed.
"""

from __future__ import annotations

import argparse
import logging
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

ROUND_S = 0.5
LENGTH = 200
POLICIES = ("truncate", "replay")


class RareErrorEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Computes for `env_s`, and raises in one step of `every`; never if that is 0. Its episodes have 200 steps."""

    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, every: int, first: int, env_s: float) -> None:
        """`first`: steps that count as done when it is built, so that the envs of a pool do not raise together."""
        self._every = every
        self._env_s = env_s
        self._num_steps = first
        self._clock = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._clock = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> Any:
        self._num_steps += 1
        if self._every and self._num_steps % self._every == 0:
            raise ValueError("a rare error")
        self._clock += 1
        until = time.perf_counter() + self._env_s
        while time.perf_counter() < until:
            pass
        return self._observe(), 1.0, False, self._clock >= LENGTH, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.full(4, self._clock, np.float32)


@dataclass
class Course:
    """What one pool did.

    Attributes:
        rates: steps of all envs per second, by round.
        longest_s: the longest step.
        num_errors: how many reached the learner; `last_error` is the last one.
        num_faults: rows marked with a fault.
    """

    pool: stepmill.Pool
    actions: NDArray[np.int64]
    rates: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    num_errors: int = 0
    num_faults: int = 0
    last_error: str = ""

    def run(self, seconds: float) -> None:
        """Step for so long."""
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
            *_, info = self.pool.step_fast(self.actions)
        except stepmill.StepmillError as error:
            self.num_errors += 1
            self.last_error = error.message
            self.pool.reset()
            return 0
        return int(np.count_nonzero(info["_fault"])) if "fault" in info else 0


def compare(
    policy: str, seconds: float, make_env_fns: Callable[[int], list[Callable[[], Any]]], **arguments: Any
) -> int:
    """Run both pools by turns and print what came of it; return the number of errors that reached the learner."""
    num_workers, every = arguments["num_workers"], arguments["every"]
    options = stepmill.PoolOptions(on_fault=policy, seeding="per_episode")
    faulty, calm = (
        stepmill.Pool(make_env_fns(each), backend="process", num_workers=num_workers, options=options)
        for each in (every, 0)
    )
    with faulty, calm:
        courses = [Course(pool, np.zeros(pool.num_envs, np.int64)) for pool in (faulty, calm)]
        for course in courses:
            course.pool.reset(seed=0)
            course.run(ROUND_S)
            course.rates.clear()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for course in courses:
                course.run(ROUND_S)
    with_errors, without = courses
    ratio = statistics.median(with_errors.rates) / statistics.median(without.rates)
    num_errors = with_errors.num_errors + without.num_errors
    sys.stdout.write(
        f"{policy}: {statistics.median(with_errors.rates):,.0f} of {statistics.median(without.rates):,.0f} env steps/s, "
        f"ratio {ratio:.3f}; longest step {1e3 * with_errors.longest_s:.1f} ms, without errors "
        f"{1e3 * without.longest_s:.1f} ms; rows marked {with_errors.num_faults}, raised to the learner {num_errors}"
        f"{f' ({with_errors.last_error})' if with_errors.last_error else ''}\n"
    )
    return num_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.env_errors", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each policy")
    parser.add_argument("--every", type=int, default=2000, help="an env raises in one step of so many")
    parser.add_argument("--env-us", type=float, default=100.0, help="microseconds of a step of an env")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    logging.getLogger("stepmill").setLevel(logging.ERROR)  # one line per fault is the terminal's cost, not the pool's

    def make_env_fns(every: int) -> list[Callable[[], Any]]:
        firsts = [place * every // chosen.num_envs for place in range(chosen.num_envs)]
        return [partial(RareErrorEnv, every, first, 1e-6 * chosen.env_us) for first in firsts]

    num_errors = sum(
        compare(policy, chosen.seconds, make_env_fns, num_workers=chosen.num_workers, every=chosen.every)
        for policy in POLICIES
    )
    return 1 if num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
