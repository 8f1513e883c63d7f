"""Learns CartPole by the cross-entropy method, 64 candidate policies at a time, one per env.

    python examples/vector_env.py [serial|thread|process] [--curve FILE.csv]

`stepmill.make_vec` replaces `gymnasium.make_vec`; the rest is Gymnasium's vector API. The program ends with an
assertion: the mean policy of the last generation balances the pole for at least 400 steps.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import stepmill

NUM_ENVS = 64
NUM_GENERATIONS = 8
NUM_ELITES = 8
MAX_STEPS = 500
GOAL = 400.0

Floats = NDArray[np.float64]


def play(envs: gymnasium.vector.VectorEnv[Any, Any, Any], weights: Floats, seed: int) -> Floats:
    """Play one episode in every env; env i follows the linear policy weights[i].

    Args:
        weights: [num_envs, 4], the action is 1 where weights[i] @ obs[i] is above 0.
    Returns:
        The length of each env's episode, [num_envs].
    """
    obs, _ = envs.reset(seed=seed)
    is_playing = np.ones(envs.num_envs, np.bool_)
    lengths = np.zeros(envs.num_envs)
    for _ in range(MAX_STEPS):
        actions = ((obs * weights).sum(axis=1) > 0).astype(np.int64)
        obs, _, terminated, truncated, _ = envs.step(actions)
        lengths += is_playing
        # Envs that ended reset themselves; only the first episode counts here.
        is_playing &= ~(terminated | truncated)
        if not is_playing.any():
            break
    return lengths


def learn(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> tuple[Floats, list[tuple[float, float]]]:
    """Return the mean of the last generation, [4], and for each generation the env-steps so far and the mean length of an episode."""
    rng = np.random.default_rng(0)
    mean, spread = np.zeros(4), np.ones(4)
    num_steps, curve = 0.0, []
    for generation in range(NUM_GENERATIONS):
        candidates = mean + spread * rng.standard_normal((envs.num_envs, 4))
        lengths = play(envs, candidates, seed=1000 * generation)
        elites = candidates[np.argsort(lengths)[-NUM_ELITES:]]
        mean, spread = elites.mean(axis=0), elites.std(axis=0) + 0.05
        num_steps += lengths.sum()
        curve.append((num_steps, lengths.mean()))
        print(f"generation {generation}: mean length {lengths.mean():6.1f}, best {lengths.max():5.0f}")
    return mean, curve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", nargs="?", default="process", choices=("serial", "thread", "process"))
    parser.add_argument("--curve", help="write env-steps and the mean length of an episode to this CSV file")
    args = parser.parse_args()
    start_s = time.perf_counter()
    with closing(stepmill.make_vec("CartPole-v1", num_envs=NUM_ENVS, backend=args.backend)) as envs:
        policy, curve = learn(envs)
        lengths = play(envs, np.tile(policy, (NUM_ENVS, 1)), seed=99)
    print(f"{args.backend}: {lengths.mean():.0f} steps on average, learnt in {time.perf_counter() - start_s:.1f} s")
    if args.curve:
        np.savetxt(args.curve, curve, "%.6g", ",", header="env-steps,steps per episode", comments="")
    assert lengths.mean() >= GOAL, f"the policy should balance for {GOAL} steps, not {lengths.mean()}"


if __name__ == "__main__":
    main()
