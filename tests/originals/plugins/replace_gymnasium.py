"""A pytest plugin: replaces AsyncVectorEnv with stepmill's VectorEnv, before Gymnasium's tests import it."""

from __future__ import annotations

import gymnasium.vector
from gymnasium.envs import registration
from gymnasium.vector import async_vector_env

from stepmill import VectorEnv

for _home in (gymnasium.vector, async_vector_env):
    _home.AsyncVectorEnv = VectorEnv
assert registration
