"""The Arcade Learning Environment's own C++ vector env: options `num_threads`, `batch_size`."""

from __future__ import annotations

import ale_py
from ale_py.vector_env import AtariVectorEnv

from benchmarks.adapters.base import Adapter


class Engine(Adapter):
    """Pong with the same preprocessing as the Python row: frame skip 4, gray 84x84, stack 4."""

    def start(self) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        options = self.job.options
        self.batch_size: int = options.get("batch_size", self.num_envs)
        self.envs = AtariVectorEnv(
            "pong",
            self.num_envs,
            batch_size=self.batch_size,
            num_threads=options.get("num_threads", 2),
            repeat_action_probability=0.0,
            noop_max=30,
            use_fire_reset=False,
            reward_clipping=False,
        )
        self.actions = [actions[: self.batch_size] for actions in self.actions]
        # In async mode, actions are sent for each batch of first observations, until all envs are stepping.
        self.envs.reset(seed=0)
        self.envs.send(self.next_actions())

    def advance(self) -> int:
        obs, reward, terminated, truncated, _ = self.envs.recv()
        self.ended = (terminated, truncated)
        obs.item(0)
        reward.item(-1)
        self.envs.send(self.next_actions())
        return self.batch_size

    def close(self) -> None:
        self.envs.close()
