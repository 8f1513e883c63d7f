"""SB3's evaluation says 9 %, and every seed played once says 31 %: the same policy in the same 16 tasks, counted in several ways.

    python examples/evaluate_counting.py [--bars FILE.csv]

The 9 % are those of `evaluate_policy` with its default of 10 episodes, which leaves out the first six of 16 envs. The env is a climb of
eight steps. In task t each step slips with a chance of (t + 1) / 40, which ends the episode without success, so that failures are shorter
than successes. It needs stable-baselines3.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

import stepmill

NUM_TASKS, NUM_SEEDS, NUM_SLOTS = 16, 10, 24
NUM_REPEATS = 50  # of what other seeds give other numbers for


class Climb(gymnasium.Env[Any, Any]):
    """Climbs a step at a time, and slips at random. The return is 1 at the top, and 0 after a slip."""

    observation_space = spaces.Discrete(9)  # the height
    action_space = spaces.Discrete(1)

    def __init__(self, task: int = 0) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Begin at the bottom."""
        super().reset(seed=seed)
        self.height = 0
        return self.height, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Climb one step."""
        slips = self.np_random.random() < (self.task + 1) / 40
        self.height += not slips
        is_top = self.height == 8
        return self.height, float(is_top), bool(slips or is_top), False, {"is_success": is_top}


class Climber:
    """The only policy there is, in the form of a model of Stable-Baselines3."""

    def predict(self, obs: Any, state: Any = None, **_: Any) -> tuple[Any, Any]:
        """Return the actions for observations [B]."""
        return np.zeros(len(obs), np.int64), state


def chance(task: int) -> float:
    """Return the chance of success."""
    return float((1 - (task + 1) / 40) ** 8)


def play(task: int, seed: int) -> float:
    """Return the return of one episode."""
    env = Climb(task)
    env.reset(seed=seed)
    while True:
        _, reward, is_over, _, _ = env.step(0)
        if is_over:
            return reward


def sb3(num_episodes: int) -> tuple[float, set[int]]:
    """Evaluate with an env for each task, as a suite of tasks does. Return the mean of all repeats, and which tasks were counted."""
    envs = DummyVecEnv([partial(Climb, task) for task in range(NUM_TASKS)])
    counted: set[int] = set()

    def count(found: dict[str, Any], _: Any) -> None:
        counted.add(found["i"])

    means = []
    for repeat in range(NUM_REPEATS):
        envs.seed(1000 * repeat)
        means.append(evaluate_policy(Climber(), envs, n_eval_episodes=num_episodes, callback=count)[0])  # type: ignore[arg-type]
    return float(np.mean(means)), counted


def static_batches(returns: list[float]) -> float:
    """Play batches of NUM_SLOTS pairs, the last one filled up with pairs from the start, and count all."""
    num_batches = -(-len(returns) // NUM_SLOTS)
    return float(np.mean([returns[number % len(returns)] for number in range(num_batches * NUM_SLOTS)]))


def first_to_end(num_episodes: int) -> float:
    """Step an env of each task, which begins again when its episode ends, until this many have ended. Return the mean of all repeats."""
    envs = gymnasium.vector.SyncVectorEnv(
        [partial(Climb, task) for task in range(NUM_TASKS)], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    means = []
    for repeat in range(NUM_REPEATS):
        envs.reset(seed=1000 * repeat)
        returns: list[float] = []
        while len(returns) < num_episodes:
            _, rewards, terminated, _, _ = envs.step(np.zeros(NUM_TASKS, np.int64))
            returns += rewards[terminated].tolist()
        means.append(np.mean(returns))
    return float(np.mean(means))


def main() -> None:
    """Print a line for each way of counting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bars", help="write the ways of counting and their means, in percent, to this CSV file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*is not wrapped with a ``Monitor`` wrapper")
    returns = [play(task, seed) for task in range(NUM_TASKS) for seed in range(NUM_SEEDS)]
    exact = float(np.mean(returns))
    tasks = {f"task {task}": partial(Climb, task) for task in range(NUM_TASKS)}
    ours = stepmill.evaluate(Climber(), tasks=tasks, seeds=range(NUM_SEEDS), num_envs=NUM_SLOTS, num_workers=2)
    assert [episode.episode_return for episode in ours.episodes] == returns
    (ten, counted), (more, _), (all_tasks, _) = map(sb3, (10, 24, 160))
    rows = {
        "the chance of success, by the definition of Climb": float(
            np.mean([chance(task) for task in range(NUM_TASKS)])
        ),
        "each task and seed once, one after the other": exact,
        "stepmill.evaluate, 24 envs": ours.summary.mean_return,
        "evaluate_policy, n_eval_episodes=10": ten,
        "evaluate_policy, n_eval_episodes=24": more,
        "evaluate_policy, n_eval_episodes=160": all_tasks,
        "batches of 24, the last filled up": static_batches(returns),
        "the first 160 episodes that end": first_to_end(NUM_TASKS * NUM_SEEDS),
    }
    for name, mean in rows.items():
        print(f"{name:50} {mean:.3f}")
    if args.bars:
        with open(args.bars, "w", encoding="utf-8", newline="") as file:
            percent = [(name, f"{100 * mean:.1f}") for name, mean in rows.items()]
            csv.writer(file, lineterminator="\n").writerows([("way of counting", "mean success, %"), *percent])
    print(f"n_eval_episodes=10 counts the tasks {sorted(counted)}")
    assert counted == {*range(6, 16)}


if __name__ == "__main__":
    main()
