"""A pytest plugin: replaces Tianshou's vector envs of processes and of this process with stepmill's, before its tests import them."""

from __future__ import annotations

from typing import Any

from tianshou import env
from tianshou.env import venvs

from stepmill.frontends.tianshou import StepmillVectorEnv


class ForkedVectorEnv(StepmillVectorEnv):
    """Forks a worker for each env, as Tianshou does: envs that sleep at the same time need one each."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"context": "fork", "envs_per_worker": 1, **keywords})


class SerialVectorEnv(StepmillVectorEnv):
    """Runs its envs in this process."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"backend": "serial", **keywords})


for _home in (env, venvs):
    _home.DummyVectorEnv = SerialVectorEnv
    _home.SubprocVectorEnv = _home.ShmemVectorEnv = ForkedVectorEnv
