"""The envs of `make test-envs` that Gymnasium does not make by an id alone. The libraries are imported by name, because .venv lacks them."""

from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np


def _dm_control(domain: str, task: str) -> Any:
    return import_module("dm_control.suite").load(domain, task)


def _parallel(module: str, **kwargs: Any) -> Any:
    return import_module(module).parallel_env(**kwargs)


def _game(name: str) -> Any:
    return import_module("textarena").make(name)


class SeededNetHack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """NLE and MiniHack ignore the seed of `reset`. Their own method `seed` holds for one episode."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._seeds = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        nethack: Any = self.unwrapped
        nethack.seed(*self._seeds.integers(2**31, size=2).tolist(), reseed=False)
        return self.env.reset(options=options)


def _nethack(module: str, env_id: str) -> Any:
    import_module(module)  # registers the id
    return SeededNetHack(gymnasium.make(env_id, disable_env_checker=True))


def crafter() -> Any:
    """Return a Crafter world; crafter.Env takes its seed in the constructor, and ends after 100 steps here."""
    return import_module("crafter").Env(seed=1, length=100)


cartpole_swingup = partial(_dm_control, "cartpole", "swingup")
cheetah_run = partial(_dm_control, "cheetah", "run")
guess_the_number = partial(_game, "GuessTheNumber-v0")
game_2048 = partial(_game, "2048-v0")
simple_spread = partial(_parallel, "mpe2.simple_spread_v3")
simple_tag = partial(_parallel, "mpe2.simple_tag_v3", continuous_actions=True)
knights_archers_zombies = partial(_parallel, "pettingzoo.butterfly.knights_archers_zombies_v11")
cooperative_pong = partial(_parallel, "pettingzoo.butterfly.cooperative_pong_v6")
pursuit = partial(_parallel, "pettingzoo.sisl.pursuit_v5")
multiwalker = partial(_parallel, "pettingzoo.sisl.multiwalker_v9")
nethack_score = partial(_nethack, "nle", "NetHackScore-v0")
nethack_staircase = partial(_nethack, "nle", "NetHackStaircase-v0")
minihack_room = partial(_nethack, "minihack", "MiniHack-Room-5x5-v0")
minihack_river = partial(_nethack, "minihack", "MiniHack-River-v0")
