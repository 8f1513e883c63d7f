"""Gymnasium's SyncVectorEnv: options `copy`."""

from __future__ import annotations

from typing import Any

import gymnasium

from benchmarks.adapters.base import Adapter


class Engine(Adapter):
    """Steps through any Gymnasium vector env; the next two adapters only build another one."""

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return gymnasium.vector.SyncVectorEnv(self.job.env_fns, copy=self.job.options.get("copy", False))

    def start(self) -> None:
        self.envs = self.make()
        self.envs.reset(seed=0)

    def advance(self) -> int:
        obs, reward, terminated, truncated, _ = self.envs.step(self.next_actions())
        self.ended = (terminated, truncated)
        if self.job.is_timed:
            self.record_times(obs)
        else:
            obs.item(0)
        reward.item(-1)
        return self.num_envs

    def close(self) -> None:
        self.envs.close()
