"""stepmill's VectorEnv: options `backend`, `num_workers`, `context`, `copy`."""

from __future__ import annotations

import stepmill
from benchmarks.adapters.gym_sync import Engine as SyncEngine


class Engine(SyncEngine):
    """The same calls as Gymnasium's vector envs, so the same adapter."""

    def make(self) -> stepmill.VectorEnv:
        options = self.job.options
        pool_options = stepmill.PoolOptions(**options["pool"]) if "pool" in options else None
        return stepmill.VectorEnv(
            self.job.env_fns,
            backend=options.get("backend", "auto"),
            num_workers=options.get("num_workers"),
            copy=options.get("copy", False),
            options=pool_options,
        )
