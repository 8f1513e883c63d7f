"""`stepmill.evaluate` beside LeRobot's `eval_policy` and Stable-Baselines3's `evaluate_policy`, in interleaved pairs.

    python -m benchmarks.evaluate [--pairs 10] [--json FILE]

It needs stable-baselines3 and lerobot 0.4.4 beside stepmill; a peer that cannot be imported is left out with a line. Both sides play
the same seeds with the same policy. The sleeping env shows scheduling: its episodes have lengths with a coefficient of variation of
0.7, each step sleeps 20 ms, and the best possible time is that of a list schedule of the known lengths on 16 slots. The share of it
is printed for the whole call, and without the start and the end of the 16 workers.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import stepmill

NUM_SLOTS = 16
NUM_TASKS, NUM_SEEDS = 64, 8
STEP_S = 0.020
MEAN_LENGTH, CV = 15, 0.7
CARTPOLE_SEEDS = 1000
WEIGHTS = np.array([0.02, 0.1, 1.0, 0.15])  # a policy that fails after some hundred steps


def lengths() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the length of each episode: log-normal, the same in each run."""
    sigma = np.sqrt(np.log1p(CV**2))
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN_LENGTH) - sigma**2 / 2, sigma, NUM_TASKS * NUM_SEEDS)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


class Sleeping(gymnasium.Env[Any, Any]):
    """Sleeps in each step; the seed and the task decide how many steps there are."""

    metadata = {"render_modes": [], "render_fps": 10}  # Gymnasium's form
    observation_space = spaces.Dict({"agent_pos": spaces.Box(-1, 1, (2,), np.float32)})
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    task = task_description = "sleep"
    _max_episode_steps = int(lengths().max())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of a number: the seed, after those of the tasks before."""
        super().reset(seed=seed)
        self._left = int(lengths()[(seed or 0) + NUM_SEEDS * (options or {}).get("task", 0)])
        return self._obs(), {"is_success": False}

    def step(self, _action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        time.sleep(STEP_S)
        self._left -= 1
        return self._obs(), 1.0, self._left <= 0, False, {"is_success": self._left <= 0}

    def _obs(self) -> dict[str, Any]:
        return {"agent_pos": np.zeros(2, np.float32)}


def best_schedule_s() -> float:
    """Return how long the episodes take if each slot that is free begins the next, and nothing else takes time."""
    ends = [0.0] * NUM_SLOTS
    for length in lengths():
        heapq.heappush(ends, heapq.heappop(ends) + float(length) * STEP_S)
    return max(ends)


def seconds(run: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def sleeping_ours(context: stepmill.Context, played_s: list[float]) -> None:
    """Evaluate 64 tasks with 8 seeds each. Append the seconds from the first observations to the end of the last step."""
    calls_s: list[float] = []

    def policy(obs: dict[str, Any]) -> np.ndarray[Any, Any]:
        calls_s.append(time.perf_counter())
        return np.zeros((len(obs["agent_pos"]), 2), np.float32)

    found = stepmill.evaluate(
        policy,
        Sleeping,
        tasks={f"{task}": {"task": task} for task in range(NUM_TASKS)},
        seeds=range(NUM_SEEDS),
        num_envs=NUM_SLOTS,
        num_workers=NUM_SLOTS,
        context=context,
        progress=False,
    )
    if [episode.length for episode in found.episodes] != lengths().tolist():
        raise AssertionError("an episode has another length")
    played_s.append(calls_s[-1] - calls_s[0] + STEP_S)


def sleeping_lerobot() -> Callable[[], None]:
    """Return the same with LeRobot's eval_policy: all episodes in batches of 16, which is its best case."""
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.pretrained import PreTrainedPolicy
    from lerobot.scripts.lerobot_eval import eval_policy

    class Zeros(PreTrainedPolicy):  # type: ignore[misc]
        config_class = PreTrainedConfig
        name = "zeros"

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def reset(self) -> None:
            """There is no state."""

        def select_action(self, batch: dict[str, Any], **_: Any) -> Any:
            return torch.zeros(len(batch["observation.state"]), 2)

        def get_optim_params(self) -> Any:
            return {}

        def predict_action_chunk(self, batch: Any, **_: Any) -> Any:
            return self.select_action(batch)

        def forward(self, batch: Any) -> Any:
            return self.select_action(batch), {}

    def run() -> None:
        envs = gymnasium.vector.AsyncVectorEnv(
            [Sleeping] * NUM_SLOTS, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
        )
        # eval_policy of 0.4.4 looks at the attributes of the first env, which AsyncVectorEnv does not have
        envs.envs = [Sleeping()]
        same = lambda value: value  # noqa: E731
        eval_policy(envs, Zeros(), same, same, same, same, n_episodes=NUM_TASKS * NUM_SEEDS, start_seed=0)
        envs.close()

    return run


def linear(obs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Push the cart towards the side to which the pole falls."""
    return (obs @ WEIGHTS > 0).astype(np.int64)


def cartpole_ours() -> None:
    """Evaluate 1,000 seeds of CartPole."""
    stepmill.evaluate(linear, "CartPole-v1", seeds=range(CARTPOLE_SEEDS), num_envs=NUM_SLOTS, progress=False)


def cartpole_sb3() -> Callable[[], None]:
    """Return the same number of episodes with Stable-Baselines3."""
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import SubprocVecEnv

    class Linear:
        def predict(self, obs: Any, state: Any = None, **_: Any) -> tuple[Any, Any]:
            return linear(obs), state

    def run() -> None:
        envs = SubprocVecEnv([partial(_monitored, Monitor)] * NUM_SLOTS)
        envs.seed(0)
        evaluate_policy(Linear(), envs, n_eval_episodes=CARTPOLE_SEEDS)  # type: ignore[arg-type]  # it has what is used
        envs.close()

    return run


def _monitored(monitor: Any) -> Any:
    return monitor(gymnasium.make("CartPole-v1"))


def compare(
    name: str, ours: Callable[[], None], make_peer: Callable[[], Callable[[], None]], pairs: int
) -> dict[str, Any]:
    """Run both in turn, and print the medians."""
    try:
        peer = make_peer()
    except ImportError as exc:
        print(f"{name}: left out, because {exc}")
        return {"name": name, "left_out": str(exc)}
    own_s: list[float] = []
    peer_s: list[float] = []
    for _ in range(pairs):
        own_s.append(seconds(ours))
        peer_s.append(seconds(peer))
    ratio = statistics.median(other / own for own, other in zip(own_s, peer_s, strict=True))
    print(
        f"{name}: stepmill {statistics.median(own_s):.2f} s, peer {statistics.median(peer_s):.2f} s, ratio {ratio:.2f}"
    )
    return {"name": name, "stepmill_s": own_s, "peer_s": peer_s, "median_ratio": ratio}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all, and print a line for each."""
    parser = argparse.ArgumentParser(description="stepmill.evaluate beside LeRobot and Stable-Baselines3")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--context", type=stepmill.Context, default=stepmill.Context.FORKSERVER)
    given = parser.parse_args(arguments)
    played_s: list[float] = []
    rows = [
        compare("sleeping, LeRobot", partial(sleeping_ours, given.context, played_s), sleeping_lerobot, given.pairs),
        compare("CartPole, Stable-Baselines3", cartpole_ours, cartpole_sb3, given.pairs),
    ]
    if "stepmill_s" in rows[0]:
        best_s, all_s = best_schedule_s(), statistics.median(rows[0]["stepmill_s"])
        share, share_played = best_s / all_s, best_s / statistics.median(played_s)
        print(
            f"sleeping: the best list schedule takes {best_s:.2f} s: {share:.1%}, and without start and end {share_played:.1%}"
        )
        rows[0] |= {"best_schedule_s": best_s, "played_s": played_s}
    if given.json is not None:
        given.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
