"""`PoolEnvManager`: EnvPool's envs with DI-engine's timesteps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.envs.di_engine import timestep_class
from stepmill.envs.envpool import EnvPoolTask
from stepmill.frontends.di_engine import config as settings
from stepmill.frontends.di_engine.errors import ManagerClosedError, ManagerUsageError
from stepmill.frontends.di_engine.manager import logger
from stepmill.pool.pool import Pool
from stepmill.spec.errors import UsageError

_TASK_SETTINGS = ("episodic_life", "reward_clip", "stack_num", "gray_scale", "frame_skip")  # of Atari tasks


class PoolEnvManager:
    """DI-engine's manager "env_pool", which runs `env_num` envs of one EnvPool task. A step returns `batch_size` of them.

    After the end of an episode, EnvPool ignores the next action, and that step returns the first observation of the next
    episode, with reward 0. There are differences from DI-engine. info["env_id"] is the env's id, and not its place in
    the batch. Settings that cfg does not have are left out. `close` closes the envs.

    Args:
        cfg: env_id, the task's name; env_num; batch_size; and settings of Atari tasks: episodic_life, reward_clip,
            stack_num, gray_scale, frame_skip.
        env_fn: ignored, because EnvPool makes the envs. DI-engine's factory passes it.
    Raises:
        UsageError: env_id is missing, or batch_size is more than env_num.
    """

    config: dict[str, Any] = {"type": "envpool", "env_num": 8, "batch_size": 8}

    @classmethod
    def default_config(cls) -> Any:
        """Return a copy of the class's settings, an EasyDict if that is installed."""
        made = settings.default_config(cls.config, cls.__name__)
        del made["cfg_type"]
        return made

    def __init__(self, cfg: Mapping[str, Any], env_fn: Sequence[Callable[[], Any]] = ()) -> None:
        self._cfg = settings.with_defaults(cfg, self.config)
        if "env_id" not in self._cfg:
            raise UsageError("cfg has no env_id; give the name of an EnvPool task, such as 'Pong-v5'")
        self._env_num: int = self._cfg.env_num
        self._batch_size: int = self._cfg.batch_size
        if self._batch_size > self._env_num:
            raise UsageError(f"batch_size={self._batch_size} is more than env_num={self._env_num}; lower it")
        self._seed = 0
        self._pool: Pool | None = None
        self._num_pending = 0
        self._ready_obs: dict[int, NDArray[np.float32]] = {}
        self._returns = np.zeros((self._env_num, 1), np.float32)

    def launch(self) -> None:
        """Make the envs and reset them.

        Raises:
            AssertionError: the manager was launched before.
            MissingExtraError: EnvPool is not installed.
            UsageError: EnvPool has no such task.
        """
        if self._pool is not None:
            raise ManagerUsageError("Please first close the env manager")
        own = {name: self._cfg[name] for name in _TASK_SETTINGS if name in self._cfg}
        task = EnvPoolTask(
            self._cfg.env_id, {"seed": self._seed, **own}, is_async=self._batch_size < self._env_num, has_infos=False
        )
        self._pool = Pool([task] * self._env_num, backend="envpool", autoreset_mode="NextStep", episode_stats=False)
        self.reset()

    def reset(self) -> None:
        """Reset all envs; `ready_obs` has their first observations."""
        batch = self._open_pool().reset()
        self._num_pending = 0
        self._returns[:] = 0.0
        self._ready_obs = dict(zip(batch.env_id.tolist(), batch.obs.astype(np.float32), strict=True))

    def step(self, action: Mapping[int, Any]) -> dict[int, Any]:
        """Step envs, and return timesteps of `batch_size` envs, which may be other envs; `ready_obs` has the same envs.

        Args:
            action: by env_id, a number or an array of shape (1,).
        Returns:
            By env_id: obs and reward float32, done, and info with env_id; at the end of an episode with
            eval_episode_return, float32 of shape (1,).
        Raises:
            AssertionError: the manager is closed.
            UsageError: an env does not exist, or has not replied to its last action.
        """
        pool = self._open_pool()
        actions = np.array(list(action.values()))
        pool.send(actions.squeeze(1) if actions.ndim == 2 else actions, list(action))
        self._num_pending += len(action)
        batch = pool.recv(min(self._batch_size, self._num_pending))
        self._num_pending -= len(batch.env_id)
        rewards = batch.reward.astype(np.float32).reshape(-1, 1)
        dones = batch.terminated | batch.truncated
        make = timestep_class()
        timesteps: dict[int, Any] = {}
        self._ready_obs = {}
        for row, env_id in enumerate(batch.env_id.tolist()):
            obs = batch.obs[row].astype(np.float32)
            self._returns[env_id] += rewards[row]
            info: dict[str, Any] = {"env_id": env_id}
            if dones[row]:
                info["eval_episode_return"] = self._returns[env_id].copy()
                self._returns[env_id] = 0.0
            timesteps[env_id] = make(obs, rewards[row], bool(dones[row]), info)
            self._ready_obs[env_id] = obs
        return timesteps

    def close(self) -> None:
        """Close the envs. Idempotent; the manager can be launched again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def seed(self, seed: int, dynamic_seed: bool = False) -> None:
        """Set the seed of the next launch: s gives env i the seed s + i. EnvPool has no dynamic seeds."""
        self._seed = int(seed)
        if dynamic_seed:
            logger.warning("EnvPool has no dynamic seeds; dynamic_seed is ignored")

    @property
    def env_num(self) -> int:
        """The number of envs."""
        return self._env_num

    @property
    def ready_obs(self) -> dict[int, NDArray[np.float32]]:
        """Observations of the envs of the last step or reset, by env_id."""
        return self._ready_obs

    def _open_pool(self) -> Pool:
        if self._pool is None:
            raise ManagerClosedError("env manager is closed, please use the alive env manager")
        return self._pool
