"""Gymnasium's CartPole with a planted bug, under an id of its own."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class BuggyCartPole(CartPoleEnv):
    """Divides by zero once the cart has gone a little to the right: only some episodes get there."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return result if result[0][0] < 0.1 else 1 / 0


gymnasium.register("BuggyCartPole-v0", entry_point=BuggyCartPole, max_episode_steps=500)
