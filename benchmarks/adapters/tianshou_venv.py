"""Tianshou's ShmemVectorEnv: option `wait_num` (async: step returns when this many envs are ready)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tianshou.env import ShmemVectorEnv

from benchmarks.adapters.base import Adapter, flags_at_once


class Engine(Adapter):
    """One process per env. The caller resets the envs whose episode ended, and selects the envs to step."""

    def start(self) -> None:
        wait_num = self.job.options.get("wait_num")
        self.envs = ShmemVectorEnv(self.job.env_fns, wait_num=wait_num)
        self.envs.reset()
        self.advance = self._advance_some if wait_num else self._advance_all  # type: ignore[method-assign]
        self._ids = np.arange(self.num_envs)

    def advance(self) -> int:
        raise NotImplementedError("start() chooses between all and some")

    def _advance_all(self) -> int:
        obs, reward, terminated, truncated, _ = self.envs.step(self.next_actions())
        self._look(obs, reward)
        ended = flags_at_once(terminated, truncated)
        if ended is not None:
            self.envs.reset(ended)
        return self.num_envs

    def _advance_some(self) -> int:
        actions = self.next_actions()[: len(self._ids)]
        obs, reward, terminated, truncated, info = self.envs.step(actions, self._ids)
        self._look(obs, reward)
        self._ids = np.array([row["env_id"] for row in info])
        ended = flags_at_once(terminated, truncated)
        if ended is not None:
            self.envs.reset(self._ids[ended])
        return len(self._ids)

    def _look(self, obs: NDArray[Any], reward: NDArray[Any]) -> None:
        if self.job.is_timed:
            self.record_times(obs)
        else:
            obs.item(0)
        reward.item(-1)

    def close(self) -> None:
        self.envs.close()
