"""A pytest plugin: replaces both of Gymnasium's vector envs with stepmill's VectorEnv, for libraries that make them by name."""

from __future__ import annotations

import gymnasium.vector

from stepmill import VectorEnv

gymnasium.vector.AsyncVectorEnv = gymnasium.vector.SyncVectorEnv = VectorEnv
