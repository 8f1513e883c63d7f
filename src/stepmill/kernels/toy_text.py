"""Gymnasium's toy text envs as kernels. Given the same state and action, each does what Gymnasium's env does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from stepmill.kernels.python import PythonKernel, kernel
from stepmill.spec.errors import UsageError

# ---- envs that are tables ----------------------------------------------------------------------------------------------


def tabular_arguments(id: str) -> dict[str, object]:  # noqa: A002  Gymnasium's name
    """Return the arguments of the constructor of Gymnasium's env, with their default values."""
    spec = gymnasium.spec(id)
    assert spec.entry_point is not None
    entry = spec.entry_point
    parameters = inspect.signature(load_env_creator(entry) if isinstance(entry, str) else entry).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "render_mode"}
    return {**defaults, **spec.kwargs}


def make_tabular(id: str, arguments: Mapping[str, object]) -> PythonKernel:  # noqa: A002
    """Return the kernel of an env whose transitions are a table `P`, as Gymnasium's env of this id has it.

    Raises:
        UsageError: Gymnasium's env refuses the arguments, or makes no table of them.
    """
    env = _make_env(id, arguments)
    chances, likely, following, rewards, ends = _read_table(env)
    num_states, num_actions, _ = chances.shape
    starts = np.flatnonzero(env.initial_state_distrib)
    begin, settle = _steady()
    state = [("place", "i8")]
    if arguments.get("fickle_passenger"):
        begin, settle = _fickle(float(env.fickle_probability))
        state.append(("is_fickle", "i8"))

    infos, inform = _mask_infos(env) if hasattr(env, "action_mask") else ([], _inform_nothing)

    def reset(state: Any, rng: Any, obs: Any, info: Any) -> None:
        state.place = starts[rng.integers(0, len(starts))]
        begin(state, rng)
        obs[0] = state.place
        info.prob = 1.0
        inform(state.place, info)

    def step(state: Any, action: Any, rng: Any, obs: Any, info: Any) -> tuple[float, bool, bool]:
        if not (0 <= action < num_actions and 0 <= state.place < num_states):
            raise KeyError("the action or the state is not in the table of transitions")
        drawn = rng.random()
        outcome = 0
        while likely[state.place, action, outcome] <= drawn:
            outcome += 1
        reward = rewards[state.place, action, outcome]
        is_end = ends[state.place, action, outcome]
        info.prob = chances[state.place, action, outcome]
        state.place = settle(state, following[state.place, action, outcome], rng)
        obs[0] = state.place
        inform(state.place, info)
        return reward, is_end, False

    functions = {"reset": reset, "step": step, "__module__": __name__, "__doc__": f"{id}."}
    return kernel(
        observation_space=spaces.Discrete(int(env.observation_space.n)),
        action_space=spaces.Discrete(int(env.action_space.n)),
        state=np.dtype(state),
        max_episode_steps=gymnasium.spec(id).max_episode_steps,
        infos=[("prob", "f8"), *infos],
    )(type(id.partition("-")[0], (), functions))


def _make_env(id: str, arguments: Mapping[str, object]) -> Any:  # noqa: A002
    if "map_name" in arguments and arguments["map_name"] is None and arguments.get("desc") is None:
        raise UsageError(
            f"map_name=None makes a random map in each env of {id}, but the envs of a kernel share one map; give "
            "desc=generate_random_map() of gymnasium.envs.toy_text.frozen_lake, or use another backend"
        )
    try:
        with np.errstate(invalid="ignore"):  # a map without a start is refused below
            env: Any = gymnasium.make(id, disable_env_checker=True, **arguments).unwrapped  # type: ignore[arg-type]
    except Exception as exc:  # the env's constructor may raise anything
        raise UsageError(f"Gymnasium's {id} cannot be made with {arguments}: {type(exc).__name__}: {exc}") from exc
    chances = [outcome[0] for of_state in env.P.values() for outcomes in of_state.values() for outcome in outcomes]
    if not np.isfinite(env.initial_state_distrib).all() or min(chances) < 0.0 or max(chances) > 1.0:
        raise UsageError(
            f"with {arguments}, {id} has no start, or probabilities that are not between 0 and 1; give others"
        )
    return env


def _read_table(env: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the probability of each outcome, the cumulative probability, next state, reward and end.

    Each array is [states, actions, outcomes].
    """
    num_states, num_actions = int(env.observation_space.n), int(env.action_space.n)
    num_outcomes = max(len(env.P[s][a]) for s in range(num_states) for a in range(num_actions))
    shape = num_states, num_actions, num_outcomes
    chances, likely, following = np.zeros(shape), np.ones(shape), np.zeros(shape, np.int64)
    rewards, ends = np.zeros(shape), np.zeros(shape, np.bool_)
    for s in range(num_states):
        for a in range(num_actions):
            for place, (chance, after, reward, is_end) in enumerate(env.P[s][a]):
                chances[s, a, place] = chance
                following[s, a, place], rewards[s, a, place], ends[s, a, place] = int(after), reward, is_end
            likely[s, a, : len(env.P[s][a])] = np.cumsum(chances[s, a, : len(env.P[s][a])])
            likely[s, a, len(env.P[s][a]) - 1 :] = 1.0
    return chances, likely, following, rewards, ends


def _mask_infos(env: Any) -> tuple[list[Any], Callable[..., None]]:
    """Return the field of the env's action masks, and the function that writes them."""
    num_states, num_actions = int(env.observation_space.n), int(env.action_space.n)
    masks = np.array([env.action_mask(s) for s in range(num_states)], np.int8)

    def inform(place: Any, info: Any) -> None:
        for action in range(num_actions):
            info.action_mask[action] = masks[place, action]

    return [("action_mask", "i1", (num_actions,))], inform


def _inform_nothing(place: Any, info: Any) -> None:
    pass


def _steady() -> tuple[Callable[..., None], Callable[..., int]]:
    """Return two functions that change nothing: one for the begin of an episode, and one for the place after a step."""

    def begin(state: Any, rng: Any) -> None:
        pass

    def settle(state: Any, after: Any, rng: Any) -> Any:
        return after

    return begin, settle


def _fickle(probability: float) -> tuple[Callable[..., None], Callable[..., int]]:
    """Return them for a taxi whose passenger may change the destination once, when the taxi first moves with them.

    A place is ((row * 5 + column) * 5 + passenger) * 4 + destination; passenger 4 is in the taxi.
    """

    def begin(state: Any, rng: Any) -> None:
        state.is_fickle = rng.random() < probability

    def settle(state: Any, after: Any, rng: Any) -> Any:
        is_moving = state.place // 20 != after // 20
        if state.is_fickle == 0 or state.place // 4 % 5 != 4 or not is_moving:
            return after
        state.is_fickle = 0
        destination = rng.integers(0, 3)
        if destination >= state.place % 4:
            destination += 1
        return after - after % 4 + destination

    return begin, settle


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


def _reset_blackjack(state: Any, rng: Any, obs: Any) -> None:
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


def _play_dealer(state: Any, rng: Any) -> int:
    """Draw the dealer's cards, and return how many."""
    num_drawn = 0
    while _best_sum(state.dealer, state.dealer_aces) < 17:
        card = _draw_card(rng)
        state.dealer += card
        state.dealer_aces += 1 if card == 1 else 0
        num_drawn += 1
    return num_drawn


def make_blackjack(*, natural: bool = False, sab: bool = True) -> PythonKernel:
    """Blackjack-v1, by default with the rules of Sutton and Barto, as Gymnasium registers it."""

    @kernel(
        observation_space=spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2))),
        action_space=spaces.Discrete(2),
        # Sums count aces as 1. `shown` is the dealer's first card.
        state=np.dtype(
            [(name, "i8") for name in ("player", "player_aces", "player_cards", "dealer", "dealer_aces", "shown")]
        ),
    )
    class blackjack:  # noqa: N801
        reset = _reset_blackjack

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            if not 0 <= action <= 1:
                raise AssertionError("the action must be 0 or 1")
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
                num_drawn = _play_dealer(state, rng)
                ours = _best_sum(state.player, state.player_aces)
                theirs = _best_sum(state.dealer, state.dealer_aces)
                ours = 0 if ours > 21 else ours
                theirs = 0 if theirs > 21 else theirs
                reward = 1.0 if ours > theirs else -1.0 if ours < theirs else 0.0
                has_natural = state.player_cards == 2 and ours == 21
                if sab and has_natural and not (num_drawn == 0 and theirs == 21):
                    reward = 1.0
                elif natural and not sab and has_natural and reward == 1.0:
                    reward = 1.5
            _write_blackjack(state, obs)
            return reward, terminated, False

    return cast("PythonKernel", blackjack)
