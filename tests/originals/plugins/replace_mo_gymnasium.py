"""A pytest plugin: replaces MO-Gymnasium's two vector envs with stepmill's VectorEnv, on the serial and the process backend."""

from __future__ import annotations

from typing import Any

from mo_gymnasium.wrappers import vector

from stepmill import VectorEnv


class SerialVectorEnv(VectorEnv):
    """Runs envs as MOSyncVectorEnv does."""

    def __init__(self, env_fns: Any, **keywords: Any) -> None:
        super().__init__(env_fns, backend="serial", **keywords)


class ForkedVectorEnv(VectorEnv):
    """Forks its workers: others import MO-Gymnasium, which takes seconds for each."""

    def __init__(self, env_fns: Any, **keywords: Any) -> None:
        super().__init__(env_fns, backend="process", **{"context": "fork", **keywords})


vector.MOSyncVectorEnv = SerialVectorEnv
vector.MOAsyncVectorEnv = ForkedVectorEnv
