"""A pytest plugin: `envpool.make_gym` and `make_gymnasium` run EnvPool's envs in a stepmill.Pool, through EnvPool's calls.

The translation is that of docs/switching/envpool.md. EnvPool resets envs that are stepped before their first reset. A Pool refuses
the step, so the class resets them.
"""

from __future__ import annotations

from typing import Any

import envpool
import envpool.registration
import gymnasium
import numpy as np

from stepmill import Pool
from stepmill.envs.envpool import EnvPoolTask
from stepmill.spec.batch import Batch


class PoolWithCallsOfEnvPool(gymnasium.vector.VectorEnv, gymnasium.Env):
    """Has the bases of EnvPool's class, and its attributes."""

    is_vector_env = True

    def __init__(self, task_id: str, num_envs: int = 1, **kwargs: Any) -> None:
        self._pool = Pool([EnvPoolTask(task_id, kwargs)] * num_envs, backend="envpool")
        self._is_reset = False
        self.num_envs = num_envs
        self.metadata, self.render_mode = dict(self._pool.spec.metadata), self._pool.spec.render_mode
        self.metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.NEXT_STEP
        self.observation_space = self.single_observation_space = self._pool.single_observation_space
        self.action_space = self.single_action_space = self._pool.single_action_space

    def reset(self, env_id: Any = None, **_: Any) -> tuple[Any, dict[str, Any]]:
        """Reset some envs or all; EnvPool ignores seeds."""
        batch = self._pool.reset(env_ids=env_id)
        self._is_reset = True
        return batch.obs, _infos(batch)

    def step(self, action: Any, env_id: Any = None) -> Any:
        """Step some envs or all."""
        if not self._is_reset:
            self._is_reset = True
            batch = self._pool.reset()
        else:
            self._pool.send(action, env_id)
            batch = self._pool.recv()
        return batch.obs, batch.reward, batch.terminated, batch.truncated, _infos(batch)

    def render(self) -> Any:
        """Return the image of the first env."""
        return self._pool.render([0])[0]

    def close(self, **_: Any) -> None:
        """Close the pool."""
        self._pool.close()


def _infos(batch: Batch) -> dict[str, Any]:
    return {**batch.info, "env_id": np.asarray(batch.env_id)}


for _home in (envpool, envpool.registration):
    _home.make_gym = _home.make_gymnasium = PoolWithCallsOfEnvPool
