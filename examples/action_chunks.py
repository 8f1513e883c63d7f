"""A policy that returns four actions at once: an env of chunks takes them, ends with the episode, and keeps evaluations exact."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

import stepmill

CHUNK = 4


class ActionChunks(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps an env with each action [K, ...] of a chunk, until the episode ends.

    The reward is the sum, and `info["rewards"]` lists those of the steps that were made.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], num_actions: int) -> None:
        super().__init__(env)
        self.action_space = batch_space(env.action_space, num_actions)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step until the chunk or the episode ends. Later actions of the chunk are dropped."""
        rewards: list[float] = []
        for each in action:
            obs, reward, terminated, truncated, info = self.env.step(each)
            rewards.append(float(reward))
            if terminated or truncated:
                break
        return obs, sum(rewards), terminated, truncated, {**info, "rewards": rewards}


def make() -> ActionChunks:
    """Make an env; with `stepmill.foreign(...)()` in place of `gymnasium.make` the simulator has another Python."""
    return ActionChunks(gymnasium.make("CartPole-v1"), CHUNK)


def policy(obs: NDArray[Any]) -> NDArray[np.int64]:
    """Return a chunk of actions [B, 4] for observations [B, 4]."""
    actions = (obs @ np.array([0.1, 0.5, 1.0, 1.0]) > 0).astype(np.int64)
    return np.repeat(actions[:, None], CHUNK, axis=1)


if __name__ == "__main__":
    results = [stepmill.evaluate(policy, make, seeds=range(10), num_envs=num_envs) for num_envs in (1, 5)]
    returns = [[episode.episode_return for episode in result.episodes] for result in results]
    assert returns[0] == returns[1], returns
    print(f"mean return {np.mean(returns[0]):.1f}; the same with 1 and with 5 envs")
