"""Gymnasium's toy text envs as kernels. Given the same state and action, each does what Gymnasium's env does."""

from __future__ import annotations

from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from stepmill.kernels.python import PythonKernel, kernel

# ---- envs that are tables ----------------------------------------------------------------------------------------------


@cache
def make_tabular(id: str) -> PythonKernel:  # noqa: A002  Gymnasium's name
    """Return the kernel of an env whose transitions are a table `P`, as Gymnasium's env of this id has it."""
    env: Any = gymnasium.make(id).unwrapped
    num_states, num_actions = int(env.observation_space.n), int(env.action_space.n)
    num_outcomes = max(len(env.P[s][a]) for s in range(num_states) for a in range(num_actions))
    shape = num_states, num_actions, num_outcomes
    likely, following = np.ones(shape), np.zeros(shape, np.int64)  # likely: the sum of probabilities up to this outcome
    rewards, ends = np.zeros(shape), np.zeros(shape, np.bool_)
    for s in range(num_states):
        for a in range(num_actions):
            for place, (_, after, reward, is_end) in enumerate(env.P[s][a]):
                following[s, a, place], rewards[s, a, place], ends[s, a, place] = int(after), reward, is_end
            likely[s, a, : len(env.P[s][a])] = np.cumsum([outcome[0] for outcome in env.P[s][a]])
            likely[s, a, len(env.P[s][a]) - 1 :] = 1.0
    starts = np.flatnonzero(env.initial_state_distrib)
    limit = gymnasium.spec(id).max_episode_steps

    def reset(state: Any, rng: Any, obs: Any) -> None:
        state.place = starts[rng.integers(0, len(starts))]
        obs[0] = state.place

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        drawn = rng.random()
        outcome = 0
        while likely[state.place, action, outcome] <= drawn:
            outcome += 1
        reward = rewards[state.place, action, outcome]
        is_end = ends[state.place, action, outcome]
        state.place = following[state.place, action, outcome]
        obs[0] = state.place
        return reward, is_end, False

    functions = {"reset": reset, "step": step, "__module__": __name__, "__doc__": f"{id}."}
    return kernel(
        observation_space=spaces.Discrete(num_states),
        action_space=spaces.Discrete(num_actions),
        state=np.dtype([("place", "i8")]),
        max_episode_steps=limit,
    )(type(id.partition("-")[0], (), functions))


# ---- Blackjack ---------------------------------------------------------------------------------------------------------


def _draw_card(rng: Any) -> int:
    return int(min(rng.integers(1, 14), 10))


def _best_sum(total: int, num_aces: int) -> int:
    """Sum of a hand, with one ace as 11 where that is not too much."""
    return total + 10 if num_aces > 0 and total + 10 <= 21 else total


def _write_blackjack(state: Any, obs: Any) -> None:
    obs.f0 = _best_sum(state.player, state.player_aces)
    obs.f1 = state.shown
    obs.f2 = 1 if state.player_aces > 0 and state.player + 10 <= 21 else 0


@kernel(
    observation_space=spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2))),
    action_space=spaces.Discrete(2),
    # Sums count aces as 1. `shown` is the dealer's first card.
    state=np.dtype(
        [(name, "i8") for name in ("player", "player_aces", "player_cards", "dealer", "dealer_aces", "shown")]
    ),
)
class blackjack:  # noqa: N801
    """Blackjack-v1, with the rules of Sutton and Barto (sab=True), as Gymnasium registers it."""

    def reset(state: Any, rng: Any, obs: Any) -> None:
        state.shown = _draw_card(rng)
        hidden = _draw_card(rng)
        state.dealer = state.shown + hidden
        state.dealer_aces = (1 if state.shown == 1 else 0) + (1 if hidden == 1 else 0)
        first = _draw_card(rng)
        second = _draw_card(rng)
        state.player = first + second
        state.player_aces = (1 if first == 1 else 0) + (1 if second == 1 else 0)
        state.player_cards = 2
        _write_blackjack(state, obs)

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        reward = 0.0
        terminated = True
        if action == 1:
            card = _draw_card(rng)
            state.player += card
            state.player_aces += 1 if card == 1 else 0
            state.player_cards += 1
            terminated = state.player > 21
            if terminated:
                reward = -1.0
        else:
            num_drawn = 0
            while _best_sum(state.dealer, state.dealer_aces) < 17:
                card = _draw_card(rng)
                state.dealer += card
                state.dealer_aces += 1 if card == 1 else 0
                num_drawn += 1
            ours = _best_sum(state.player, state.player_aces)
            theirs = _best_sum(state.dealer, state.dealer_aces)
            ours = 0 if ours > 21 else ours
            theirs = 0 if theirs > 21 else theirs
            reward = 1.0 if ours > theirs else -1.0 if ours < theirs else 0.0
            has_natural = state.player_cards == 2 and ours == 21
            if has_natural and not (num_drawn == 0 and theirs == 21):
                reward = 1.0
        _write_blackjack(state, obs)
        return reward, terminated, False
