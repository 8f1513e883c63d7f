"""Gymnasium's batched CartPole, written in NumPy, which `make_vec` returns for envs that have such a version."""

from __future__ import annotations

from typing import Any

import gymnasium

from benchmarks.adapters.gym_sync import Engine as SyncEngine

IDS = {"cartpole": "CartPole-v1"}


class Engine(SyncEngine):
    """Steps all rows in one NumPy expression, without Python envs."""

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return gymnasium.make_vec(IDS[self.job.env], num_envs=self.num_envs, vectorization_mode="vector_entry_point")
