"""A pytest plugin: both of Gymnasium's vector envs are stepmill's, with their envs in forked workers."""

from __future__ import annotations

from typing import Any

import gymnasium.vector
from gymnasium.vector import async_vector_env, sync_vector_env

from stepmill import VectorEnv


class ForkedVectorEnv(VectorEnv):
    """Forks its workers: others import Gymnasium, which takes longer."""

    def __init__(self, env_fns: Any, **keywords: Any) -> None:
        super().__init__(env_fns, backend="process", **{"context": "fork", **keywords})


for _home in (gymnasium.vector, async_vector_env, sync_vector_env):
    _home.AsyncVectorEnv = _home.SyncVectorEnv = ForkedVectorEnv
