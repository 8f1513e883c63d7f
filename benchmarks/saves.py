"""What a save and a restore cost: `python -m benchmarks.saves [--envs 64] [--steps 500]`.

Prints, for CartPole in the middle of its episodes: the time of a save to a file and in memory, the size of the file, and the time of a
restore beside that of the steps which it replays. Then the time to give the state of one kernel env to 1,023 others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np

import stepmill


class Endless(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose pole never falls, so that all episodes have the same length."""

    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = self.env.step(action)
        self.unwrapped.state = np.clip(self.unwrapped.state, -0.1, 0.1)  # type: ignore[attr-defined]
        self.unwrapped.steps_beyond_terminated = None  # type: ignore[attr-defined]
        return obs, reward, False, False, info


def make() -> Any:
    return Endless(gymnasium.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True))


def best_of(num: int, function: Callable[[], object]) -> float:
    """Return the shortest time of several calls, in seconds."""
    times = []
    for _ in range(num):
        begun_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun_s)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    path = os.path.join(tempfile.mkdtemp(), "envs")
    options: dict[str, Any] = {"on_fault": "replay", "seeding": "per_episode", "num_workers": 2}
    actions = np.random.default_rng(0).integers(0, 2, (args.steps, args.envs))
    with stepmill.Pool([make] * args.envs, **options) as pool:
        pool.reset(seed=0)
        begun_s = time.perf_counter()
        for row in actions:
            pool.step(row)
        steps_s = time.perf_counter() - begun_s
        memory_s = best_of(20, partial(stepmill.save, pool, None))
        file_s = best_of(20, partial(stepmill.save, pool, path))
    with stepmill.Pool([make] * args.envs, **options) as pool:
        restore_s = best_of(1, partial(stepmill.restore, pool, path))
    print(
        f"{args.envs} envs after {args.steps} steps: save in memory {1e3 * memory_s:.1f} ms, to a file {1e3 * file_s:.1f} ms"
    )
    print(f"the file has {os.path.getsize(path):,} bytes")
    print(
        f"restore {1e3 * restore_s:.0f} ms, the steps took {1e3 * steps_s:.0f} ms: {steps_s / restore_s:.2f} of the speed of stepping"
    )
    with stepmill.Pool([stepmill.kernels.find("CartPole-v1")] * 1024, backend="kernel") as pool:
        pool.reset(seed=0)
        saved = stepmill.save(pool, None, env_ids=[0])
        others = list(range(1, 1024))
        print(
            f"one kernel env into 1,023 others: {1e3 * best_of(20, partial(stepmill.restore, pool, saved, env_ids=others)):.2f} ms"
        )


if __name__ == "__main__":
    main()
