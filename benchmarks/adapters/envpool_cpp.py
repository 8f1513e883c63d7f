"""EnvPool's C++ envs (not the Python ones): options `num_threads`, `batch_size` (below `num_envs`: asynchronous)."""

from __future__ import annotations

import envpool
import numpy as np

from benchmarks.adapters.base import Adapter

IDS = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5", "pong": "Pong-v5"}


class Engine(Adapter):
    """`recv`, read, `send`; with all envs in a batch, this is `step`."""

    def start(self) -> None:
        options = self.job.options
        self.batch_size: int = options.get("batch_size", self.num_envs)
        self.envs = envpool.make_gymnasium(
            IDS[self.job.env],
            num_envs=self.num_envs,
            batch_size=self.batch_size,
            num_threads=options.get("num_threads", 2),
            seed=0,
        )
        dtype = np.float64 if self.job.env == "halfcheetah" else np.int32
        self.actions = [actions[: self.batch_size].astype(dtype) for actions in self.actions]
        self.envs.async_reset()

    def advance(self) -> int:
        obs, reward, terminated, truncated, info = self.envs.recv()
        self.ended = (terminated, truncated)
        obs.item(0)
        reward.item(-1)
        self.envs.send(self.next_actions(), info["env_id"])
        return self.batch_size

    def close(self) -> None:
        self.envs.close()
