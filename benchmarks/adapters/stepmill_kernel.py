"""stepmill's kernels: envs of Gymnasium as compiled Python. Option `num_workers`."""

from __future__ import annotations

import stepmill
from benchmarks.adapters.gym_sync import Engine as SyncEngine

IDS = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}


class Engine(SyncEngine):
    """The same calls as Gymnasium's vector envs, so the same adapter."""

    def make(self) -> stepmill.VectorEnv:
        num_threads = self.job.options["num_workers"]
        return stepmill.make_vec(IDS[self.job.env], self.num_envs, backend="kernel", num_workers=num_threads)
