"""Stable-Baselines3's SubprocVecEnv: option `start_method` (fork by default: SB3's default, forkserver, only starts more slowly).

With the option `in_line` it is DummyVecEnv.
"""

from __future__ import annotations

from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from benchmarks.adapters.base import Adapter


class Engine(Adapter):
    """One process per env, results pickled over pipes; episodes restart within the step."""

    def start(self) -> None:
        fns, options = self.job.env_fns, self.job.options
        in_line, method = options.get("in_line", False), options.get("start_method", "fork")
        self.envs = DummyVecEnv(fns) if in_line else SubprocVecEnv(fns, start_method=method)
        self.envs.reset()

    def advance(self) -> int:
        self.envs.step_async(self.next_actions())
        obs, reward, _, _ = self.envs.step_wait()
        if self.job.is_timed:
            self.record_times(obs)
        else:
            obs.item(0)
        reward.item(-1)
        return self.num_envs

    def close(self) -> None:
        self.envs.close()
