"""Races vector envs against each other: all alive at once, in short rounds in turn, so that what disturbs one disturbs all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

NUM_DRAWS = 64
WARM_UP_S = 0.1


@dataclass(frozen=True)
class Racer:
    """A vector env to race: its name, how it is opened, how it is closed without waiting for a step under way."""

    name: str
    open: Callable[[], VectorEnv]
    close: Callable[[VectorEnv], None]


@dataclass(frozen=True)
class Rounds:
    """How long a race is: the first round of each racer warms it up, and is not counted."""

    num_rounds: int = 4
    round_s: float = 0.6


def race(racers: Sequence[Racer], rounds: Rounds) -> dict[str, float]:
    """Return each racer's median rate over the rounds, in env-steps/s.

    All rows that `step` returns are counted, automatic resets too, as the vector envs do not tell them apart.
    """
    rates: dict[str, list[float]] = {racer.name: [] for racer in racers}
    with ExitStack() as opened:
        running = {}
        for racer in racers:
            envs = racer.open()
            opened.callback(racer.close, envs)
            running[racer.name] = (envs, _draw_actions(envs))
            envs.reset(seed=0)
        for envs, actions in running.values():
            _run_round(envs, actions, WARM_UP_S)
        for _ in range(rounds.num_rounds):
            for name, (envs, actions) in running.items():
                rates[name].append(_run_round(envs, actions, rounds.round_s))
    return {name: median(each) for name, each in rates.items()}


def _draw_actions(envs: VectorEnv) -> list[object]:
    """Draw the actions beforehand: what is raced is the engines, not the sampling."""
    envs.action_space.seed(0)
    return [envs.action_space.sample() for _ in range(NUM_DRAWS)]


def _run_round(envs: VectorEnv, actions: list[object], round_s: float) -> float:
    """Step for about `round_s` seconds, read a few elements of each result, return env-steps/s."""
    num_batches = 0
    begun_s = perf_counter()
    elapsed_s = 0.0
    while elapsed_s < round_s:
        obs, reward, *_ = envs.step(actions[num_batches % NUM_DRAWS])
        _ = obs[0].flat[0], reward[0]
        num_batches += 1
        elapsed_s = perf_counter() - begun_s
    return num_batches * envs.num_envs / elapsed_s
