"""A pytest plugin: replaces DummyVecEnv with stepmill's serial vector env, and SubprocVecEnv with its processes, in all of SB3."""

from __future__ import annotations

import sys
from typing import Any

from replace_sb3 import ForkedVecEnv
from stable_baselines3.common.vec_env import dummy_vec_env

from stepmill.frontends.sb3 import SB3VecEnv


class SerialVecEnv(SB3VecEnv):
    """Has DummyVecEnv's signature."""

    def __init__(self, env_fns: Any) -> None:
        super().__init__(env_fns, backend="serial")


_original = dummy_vec_env.DummyVecEnv
for _name, _home in list(sys.modules.items()):  # SB3's algorithms have the class under their own names
    if _name.startswith("stable_baselines3.") and getattr(_home, "DummyVecEnv", None) is _original:
        _home.DummyVecEnv = SerialVecEnv  # type: ignore[attr-defined]
assert ForkedVecEnv
