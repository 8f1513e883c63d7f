"""stepmill's vector env for Stable-Baselines3: option `num_workers`."""

from __future__ import annotations

from benchmarks.adapters.sb3 import Engine as Original
from stepmill.frontends.sb3 import SB3VecEnv


class Engine(Original):
    """Stepped like SB3's vector env."""

    def start(self) -> None:
        self.envs = SB3VecEnv(self.job.env_fns, "fork", num_workers=self.job.options["num_workers"])
        self.envs.reset()
