"""DI-engine's subprocess env managers: option `wait_num` (async: step returns when this many envs are ready)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from ding.envs import AsyncSubprocessEnvManager, BaseEnvTimestep, SyncSubprocessEnvManager
from easydict import EasyDict

from benchmarks.adapters.base import Adapter
from benchmarks.envs import EnvFn


class _DingEnv:
    """A Gymnasium env with DI-engine's 4-field results."""

    def __init__(self, make: EnvFn) -> None:
        self._env = make()
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self.reward_space = None

    def reset(self) -> Any:
        return self._env.reset()[0]

    def step(self, action: Any) -> BaseEnvTimestep:
        obs, reward, terminated, truncated, info = self._env.step(action)
        return BaseEnvTimestep(obs, reward, terminated or truncated, info)

    def seed(self, seed: int, dynamic_seed: bool = False) -> None:
        self._env.reset(seed=seed)

    def close(self) -> None:
        self._env.close()


class Engine(Adapter):
    """One process per env, actions and results as dictionaries by env id, observations in shared memory."""

    def start(self) -> None:
        wait_num = self.job.options.get("wait_num")
        fns = [functools.partial(_DingEnv, make) for make in self.job.env_fns]
        # Resets in the worker and no second copy: its fastest configuration.
        config: dict[str, Any] = {"reset_inplace": True, "copy_on_get": False, "shared_memory": True}
        manager = SyncSubprocessEnvManager
        if wait_num:
            manager = AsyncSubprocessEnvManager
            config |= {"wait_num": wait_num, "step_wait_timeout": None}
        cfg = EasyDict(manager.default_config())
        cfg.update(config)
        self.envs = manager(fns, cfg=cfg)
        self.envs.launch()

    def advance(self) -> int:
        actions = self.next_actions()
        results = self.envs.step({env_id: actions[env_id] for env_id in self.envs.ready_obs})
        if self.job.is_timed:
            self.record_times(np.stack([result.obs for result in results.values()]))
        else:
            next(iter(results.values())).obs.item(0)
        return len(results)

    def close(self) -> None:
        self.envs.close()
