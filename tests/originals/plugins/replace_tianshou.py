"""A pytest plugin: replaces Tianshou's two vector envs of processes with stepmill's, before its tests import them."""

from __future__ import annotations

from typing import Any

from tianshou import env
from tianshou.env import venvs

from stepmill.frontends.tianshou import StepmillVectorEnv


class ForkedVectorEnv(StepmillVectorEnv):
    """Forks a worker for each env, as Tianshou does: envs that sleep at the same time need one each."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"context": "fork", "envs_per_worker": 1, **keywords})


for _home in (env, venvs):
    _home.SubprocVectorEnv = _home.ShmemVectorEnv = ForkedVectorEnv
