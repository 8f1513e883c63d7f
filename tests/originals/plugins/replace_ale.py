"""A pytest plugin: `gymnasium.make_vec` makes stepmill's vector envs of ALE's envs, on the backend "envpool".

Rewards and infos get the form of ALE's: rewards of whole numbers, and infos without masks and with `env_id`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from stepmill import VectorEnv
from stepmill.envs.atari_vector import AtariVectorTask


class AtariVectorEnv(VectorEnv):
    """Runs `num_envs` envs of a registered id."""

    def __init__(self, env_id: str, num_envs: int, autoreset_mode: Any = "NextStep", **kwargs: Any) -> None:
        arguments = {**gymnasium.spec(env_id).kwargs, **kwargs}
        task = AtariVectorTask(arguments.pop("game"), arguments)
        super().__init__([task] * num_envs, backend="envpool", autoreset_mode=autoreset_mode)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset as ALE does: seeds may be an array."""
        seed = kwargs.pop("seed", None)
        obs, infos = super().reset(seed=seed.tolist() if isinstance(seed, np.ndarray) else seed, **kwargs)
        return obs, self._of_ale(infos)

    def step(self, actions: Any) -> Any:
        """Step all envs."""
        obs, rewards, terminated, truncated, infos = super().step(actions)
        return obs, rewards.astype(np.int32), terminated, truncated, self._of_ale(infos)

    def _of_ale(self, infos: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in infos.items() if not key.startswith("_") and key != "final_info"}
        return {**own, "env_id": np.arange(self.num_envs)}


gymnasium.make_vec = AtariVectorEnv
