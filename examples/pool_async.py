"""Steps envs of uneven speed, first all together, then as they get ready.

    python examples/pool_async.py [thread|process] [--bars FILE.csv]

With `send` and `recv` a `Pool` need not wait for the slowest env: `recv` returns the first few that are ready, with their ids, and
`send` gives actions to those. The program ends with assertions: every env was stepped, every action went to the right env, and the
same number of env-steps took at most three quarters of the time.
"""

from __future__ import annotations

import argparse
import csv
import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import stepmill

NUM_ENVS = 16
BATCH_SIZE = 4
NUM_STEPS = 1600
IDEAL = NUM_ENVS / (0.010 / 8 + 0.001 * 7 / 8)  # env-steps/s if no env ever waits


class UnevenEnv(gymnasium.Env[NDArray[np.int64], np.int64]):
    """Counts its steps; one step in eight takes 10 ms, the others 1 ms. Observation: int64 [2] = (identity, t)."""

    def __init__(self, identity: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 2**40, (2,), np.int64)
        self.action_space = gymnasium.spaces.Discrete(1000)
        self.identity = identity
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: np.int64) -> Any:
        self.t += 1
        time.sleep(0.010 if self.np_random.random() < 1 / 8 else 0.001)
        return self.observe(), float(action), False, False, {}

    def observe(self) -> NDArray[np.int64]:
        return np.array([self.identity, self.t])


def run_in_lockstep(pool: stepmill.Pool) -> float:
    """Step all envs together; return env-steps/s."""
    pool.reset(seed=0)
    start_s = time.perf_counter()
    for _ in range(NUM_STEPS // NUM_ENVS):
        pool.step(np.arange(NUM_ENVS))
    return NUM_STEPS / (time.perf_counter() - start_s)


def run_as_ready(pool: stepmill.Pool) -> float:
    """Step the envs that are ready, BATCH_SIZE at a time; return env-steps/s."""
    num_steps = np.zeros(NUM_ENVS, np.int64)
    pool.reset_async(seed=0)
    start_s = time.perf_counter()
    while num_steps.sum() < NUM_STEPS:
        batch = pool.recv(BATCH_SIZE)
        # A learner would compute actions from batch.obs here. Each action is the env's id, to check that it gets there.
        assert (batch.obs[:, 0] == batch.env_id).all()
        assert (batch.reward == np.where(batch.obs[:, 1] > 0, batch.env_id, 0)).all()
        num_steps[batch.env_id] = batch.obs[:, 1]
        pool.send(actions=batch.env_id, env_ids=batch.env_id)
    rate = NUM_STEPS / (time.perf_counter() - start_s)
    assert num_steps.min() > 0, f"an env starved: {num_steps.tolist()}"
    return rate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", nargs="?", default="process", choices=("thread", "process"))
    parser.add_argument("--bars", help="write the share of the time in which envs run, in both ways, to this CSV file")
    args = parser.parse_args()
    env_fns = [lambda identity=identity: UnevenEnv(identity) for identity in range(NUM_ENVS)]
    # These envs sleep and do not compute, so each has a worker of its own. For most envs, one worker per core is best.
    with stepmill.Pool(env_fns, backend=args.backend, num_workers=NUM_ENVS) as pool:
        lockstep, as_ready = run_in_lockstep(pool), run_as_ready(pool)
    print(f"{args.backend}: {lockstep:,.0f} env-steps/s in lockstep, {as_ready:,.0f} as they get ready")
    if args.bars:
        bars = [("all together", lockstep), ("stepmill, those that are ready", as_ready)]
        with open(args.bars, "w", encoding="utf-8", newline="") as file:
            head = ("way of stepping", "share of the time in which an env runs, %")
            rows = [(name, f"{100 * rate / IDEAL:.0f}") for name, rate in bars]
            csv.writer(file, lineterminator="\n").writerows([head, *rows])


if __name__ == "__main__":
    main()
