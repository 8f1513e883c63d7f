"""A plain Python loop over the envs: no engine, no stacking, one core."""

from __future__ import annotations

from benchmarks.adapters.base import Adapter
from benchmarks.envs import TimedEnv


class Engine(Adapter):
    """Steps each env in turn and resets it when its episode ends."""

    def start(self) -> None:
        self.envs = [make() for make in self.job.env_fns]
        for index, env in enumerate(self.envs):
            env.reset(seed=index)

    def advance(self) -> int:
        for env, action in zip(self.envs, self.next_actions(), strict=True):
            obs, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                obs, _ = env.reset()
        if self.job.is_timed:
            self._note_all()
        else:
            obs.item(0)
        return self.num_envs

    def _note_all(self) -> None:
        for env in self.envs:
            if isinstance(env, TimedEnv):
                self._used_s[env.serial] = env.used_s

    def close(self) -> None:
        for env in self.envs:
            env.close()
