"""Gymnasium's AsyncVectorEnv: options `copy`, `context`, `max_concurrency`."""

from __future__ import annotations

from typing import Any

import gymnasium

from benchmarks.adapters.gym_sync import Engine as SyncEngine


class Engine(SyncEngine):
    """One process per env, shared memory for observations."""

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        options = self.job.options
        return gymnasium.vector.AsyncVectorEnv(
            self.job.env_fns,
            copy=options.get("copy", False),
            context=options.get("context"),
            max_concurrency=options.get("max_concurrency"),
        )
