"""A pytest plugin: replaces SubprocVecEnv with stepmill's vector env, before SB3's tests import it."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common import vec_env
from stable_baselines3.common.vec_env import subproc_vec_env

from stepmill.frontends.sb3 import SB3VecEnv


class ForkedVecEnv(SB3VecEnv):
    """Forks its workers unless told otherwise: those that begin afresh import torch, which takes seconds for each of them."""

    def __init__(self, env_fns: Any, start_method: str | None = None, **keywords: Any) -> None:
        super().__init__(env_fns, start_method or "fork", **keywords)


vec_env.SubprocVecEnv = subproc_vec_env.SubprocVecEnv = ForkedVecEnv
