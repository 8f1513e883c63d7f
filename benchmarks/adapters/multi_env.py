"""stepmill's MultiEnv over envs made together: option `num_workers`."""

from __future__ import annotations

import stepmill
from benchmarks.adapters.base import Adapter
from stepmill.frontends.multi_env import MultiEnv, create_subprocess_envs


class Engine(Adapter):
    """Takes and returns lists; the engine begins new episodes."""

    def start(self) -> None:
        envs = create_subprocess_envs(
            self.job.env_fns,
            num_workers=self.job.options.get("num_workers"),
            options=stepmill.PoolOptions(context="fork"),
        )
        self.envs = MultiEnv(envs)
        self.envs.reset()
        self.actions = [list(actions) for actions in self.actions]  # type: ignore[misc]  # one per env, as its users have

    def advance(self) -> int:
        observations, rewards, _, _ = self.envs.step(self.next_actions())
        observations[0].item(0)
        float(rewards[-1])
        return self.num_envs

    def close(self) -> None:
        self.envs.close()
