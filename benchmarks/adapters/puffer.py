"""PufferLib's Multiprocessing backend (vector files of the 3.0.0 sdist): options `num_workers`, `batch_size`.

Its workers and its parent spin on shared memory; with a batch below `num_envs` it is asynchronous.
"""

from __future__ import annotations

import functools
import sys

from benchmarks.adapters.base import Adapter
from benchmarks.paths import PUFFER

sys.path.insert(0, str(PUFFER))

import pufferlib.emulation
import pufferlib.vector


class Engine(Adapter):
    """`recv`, read, `send`: PufferLib's zero-copy path if the batch allows it."""

    def start(self) -> None:
        options = self.job.options
        self.batch_size: int = options.get("batch_size", self.num_envs)
        creators = [
            functools.partial(pufferlib.emulation.GymnasiumPufferEnv, env_creator=make) for make in self.job.env_fns
        ]
        is_ordered = options.get("sync_traj", True)
        self.envs = pufferlib.vector.Multiprocessing(
            creators,
            [[] for _ in creators],
            [{} for _ in creators],
            self.num_envs,
            num_workers=options["num_workers"],
            batch_size=self.batch_size,
            zero_copy=is_ordered,
            sync_traj=is_ordered,
            overwork=True,
        )
        self.actions = [actions[: self.batch_size] for actions in self.actions]
        self.envs.async_reset(seed=0)
        for _ in range(self.num_envs // self.batch_size):
            self._look()
            self.envs.send(self.next_actions())

    def advance(self) -> int:
        self._look()
        self.envs.send(self.next_actions())
        return self.batch_size

    def _look(self) -> None:
        obs, reward, terminated, truncated, *_ = self.envs.recv()
        self.ended = (terminated, truncated)
        if self.job.is_timed:
            self.record_times(obs)
        else:
            obs.item(0)
        reward.item(-1)

    def close(self) -> None:
        self.envs.close()
