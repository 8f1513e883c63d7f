"""stepmill's vector env for Tianshou: option `num_workers`."""

from __future__ import annotations

import numpy as np

from benchmarks.adapters.tianshou_venv import Engine as Original
from stepmill import PoolOptions
from stepmill.frontends.tianshou import StepmillVectorEnv


class Engine(Original):
    """Stepped like Tianshou's vector env."""

    def start(self) -> None:
        workers = self.job.options["num_workers"]
        self.envs = StepmillVectorEnv(self.job.env_fns, num_workers=workers, options=PoolOptions(context="fork"))
        self.envs.reset()
        self.advance = self._advance_all  # type: ignore[method-assign]
        self._ids = np.arange(self.num_envs)
