"""Stable-Baselines3's SubprocVecEnv: option `start_method` (fork by default: SB3's default, forkserver, only starts more slowly)."""

from __future__ import annotations

from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.adapters.base import Adapter


class Engine(Adapter):
    """One process per env, results pickled over pipes; episodes restart within the step."""

    def start(self) -> None:
        self.envs = SubprocVecEnv(self.job.env_fns, start_method=self.job.options.get("start_method", "fork"))
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
