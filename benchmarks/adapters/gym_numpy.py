"""Gymnasium's own batched CartPole, written in NumPy: what `make_vec` gives for envs that have one."""

from __future__ import annotations

from typing import Any

import gymnasium

from benchmarks.adapters.gym_sync import Engine as SyncEngine

IDS = {"cartpole": "CartPole-v1"}


class Engine(SyncEngine):
    """No Python env is stepped here; the rows are one NumPy expression."""

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return gymnasium.make_vec(IDS[self.job.env], num_envs=self.num_envs, vectorization_mode="vector_entry_point")
