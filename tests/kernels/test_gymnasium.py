"""Each kernel that stepmill brings does what Gymnasium's env does from the same state with the same action.

Both are put into the same states. Floats may differ by a rounding or two: NumPy computes sin, cos and squares by its own
code, which need not round like the C library's. Differences do not accumulate, because the states are set before each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill

pytest.importorskip("numba")

Arguments = Mapping[str, Any]

NUM_STATES = 300
NUM_TRIES = 60  # of an action with several outcomes
TOLERANCE = {"rtol": 3e-7, "atol": 3e-7}  # of observations, which are float32: two units in the last place
REWARD_TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}

# The fields of a state, and how far from zero they are tried.
STATES: dict[str, tuple[tuple[str, ...], list[float]]] = {
    "CartPole-v1": (("x", "x_dot", "theta", "theta_dot"), [2.5, 3.0, 0.22, 3.0]),
    "MountainCar-v0": (("position", "velocity"), [0.9, 0.07]),
    "MountainCarContinuous-v0": (("position", "velocity"), [0.9, 0.07]),
    "Pendulum-v1": (("theta", "theta_dot"), [7.0, 8.0]),
    "Acrobot-v1": (("theta1", "theta2", "dtheta1", "dtheta2"), [3.1, 3.1, 12.0, 28.0]),
}
CONTINUOUS: list[tuple[str, Arguments]] = [
    *((env_id, {}) for env_id in STATES),
    ("CartPole-v1", {"sutton_barto_reward": True}),
    ("MountainCar-v0", {"goal_velocity": 0.03}),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.03}),
    ("Pendulum-v1", {"g": 9.81}),
]
TABULAR: list[tuple[str, Arguments]] = [
    *((env_id, {}) for env_id in ("FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4", "CliffWalking-v1")),
    ("CliffWalkingSlippery-v1", {}),
    ("FrozenLake-v1", {"map_name": "8x8", "is_slippery": False}),
    ("FrozenLake-v1", {"success_rate": 0.7, "reward_schedule": (10, -3, -1)}),
    ("FrozenLake-v1", {"desc": ["SFFH", "FFHG"]}),
    ("FrozenLake8x8-v1", {"is_slippery": False}),
    ("CliffWalking-v1", {"is_slippery": True}),
    ("Taxi-v4", {"is_rainy": True, "rainy_probability": 0.5}),
]


def _states(env_id: str, rng: np.random.Generator) -> Any:
    """Return states that are spread over the space, and some of its borders."""
    _, high = STATES[env_id]
    states = rng.uniform(-1.0, 1.0, (NUM_STATES, len(high))) * high
    if env_id.startswith("MountainCar"):
        states[:, 0] -= 0.3
        states[:20] = [-1.2, -0.01]
        states[20:40] = [0.4499, 0.03]
    return states


def _pair(env_id: str, arguments: Arguments | None = None) -> tuple[Any, Any]:
    """Return our env and Gymnasium's, with the same spaces and time limit."""
    kernel = stepmill.kernels.find(env_id, **(arguments or {}))
    ours, theirs = kernel(), gymnasium.make(env_id, **(arguments or {})).unwrapped
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert (kernel.max_episode_steps or None) == gymnasium.spec(env_id).max_episode_steps
    ours.reset(seed=0)
    theirs.reset(seed=0)
    return ours, theirs


@pytest.mark.parametrize(("env_id", "arguments"), CONTINUOUS)
def test_a_step_from_a_given_state_is_gymnasiums(env_id: str, arguments: Arguments) -> None:
    ours, theirs = _pair(env_id, arguments)
    theirs.action_space.seed(0)
    dtype = np.float32 if env_id == "MountainCarContinuous-v0" else np.float64
    rewards, num_ends = set(), 0
    for state in _states(env_id, np.random.default_rng(1)).astype(dtype):
        action = theirs.action_space.sample()
        for name, value in zip(STATES[env_id][0], state, strict=True):
            setattr(ours.memory.record, name, value)
        theirs.state = state.copy() if env_id != "MountainCar-v0" else tuple(state.tolist())
        if env_id == "CartPole-v1":
            theirs.steps_beyond_terminated = None
        mine, yours = ours.step(action), theirs.step(action)
        np.testing.assert_allclose(mine[0], yours[0], **TOLERANCE)
        np.testing.assert_allclose(mine[1], float(yours[1]), **REWARD_TOLERANCE)
        assert mine[2] == yours[2]
        rewards.add(mine[1])
        num_ends += mine[2]
    assert num_ends or env_id == "Pendulum-v1"
    assert "sutton_barto_reward" not in arguments or rewards == {0.0, -1.0}


@pytest.mark.parametrize(("env_id", "arguments"), TABULAR)
def test_the_outcomes_of_a_table_are_gymnasiums(env_id: str, arguments: Arguments) -> None:
    ours, theirs = _pair(env_id, arguments)
    starts = {int(ours.reset(seed=seed)[0]) for seed in range(200)}
    assert starts <= set(np.flatnonzero(theirs.initial_state_distrib).tolist())
    # In every seventh state each action has exactly the outcomes of Gymnasium's table that can happen.
    for place in range(0, int(theirs.observation_space.n), 7):
        for action in range(int(theirs.action_space.n)):
            allowed = {(int(s), float(r), bool(t)) for p, s, r, t in theirs.P[place][action] if p > 0.0}
            found = set()
            for _ in range(NUM_TRIES if len(allowed) > 1 else 2):
                ours.memory.record.place = place
                obs, reward, terminated, _, _ = ours.step(action)
                found.add((int(obs), reward, terminated))
            assert found == allowed


def _deal(ours: Any, theirs: Any, player: list[int], dealer: list[int]) -> None:
    """Put both envs of Blackjack into the same game."""
    record = ours.memory.record
    record.player, record.player_aces = sum(player), player.count(1)
    record.dealer, record.dealer_aces = sum(dealer), dealer.count(1)
    record.player_cards, record.shown = len(player), dealer[0]
    theirs.player, theirs.dealer = list(player), list(dealer)


def test_a_hand_of_blackjack_ends_as_gymnasiums_does() -> None:
    ours, theirs = _pair("Blackjack-v1")
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(2000):
        # The dealer has 17 or more: it draws no card, and nothing is left to chance.
        player = [min(int(card), 10) for card in rng.integers(1, 14, rng.integers(2, 4))]
        dealer = [min(int(card), 10) for card in rng.integers(1, 14, 2)]
        has_ace = 1 in dealer and sum(dealer) + 10 <= 21
        if sum(player) > 21 or sum(dealer) + 10 * has_ace < 17:
            continue
        _deal(ours, theirs, player, dealer)
        mine, yours = ours.step(0), theirs.step(0)
        assert [int(part) for part in mine[0]] == [int(part) for part in yours[0]]
        assert mine[1:4] == yours[1:4]
        seen.add(mine[1])
    assert seen == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("arguments", [{"natural": True, "sab": False}, {"sab": False}, {"natural": True, "sab": True}])
def test_a_natural_of_blackjack_pays_what_gymnasiums_pays(arguments: Arguments) -> None:
    ours, theirs = _pair("Blackjack-v1", arguments)
    for player in ([1, 10], [10, 5, 6], [9, 10], [10, 10]):
        for dealer in ([10, 1], [10, 9], [10, 7], [9, 8]):
            _deal(ours, theirs, player, dealer)
            assert ours.step(0)[1] == theirs.step(0)[1], (player, dealer)


def test_games_of_blackjack_pay_what_gymnasiums_pay() -> None:
    means = []
    for env in _pair("Blackjack-v1"):
        env.reset(seed=1)
        total = 0.0
        for _ in range(6000):
            (player, _, _), _ = env.reset()
            is_over = False
            while not is_over:
                (player, _, _), reward, is_over, _, _ = env.step(int(player < 15))
            total += reward
        means.append(total / 6000)
    assert abs(means[0] - means[1]) < 0.06


def test_the_image_game_pays_for_what_is_seen() -> None:
    env = stepmill.kernels.find("stepmill/Catch84-v0")()
    obs, _ = env.reset(seed=3)
    rewards = []
    for _ in range(400):
        ball = np.argwhere(obs[..., 3] == 255)[:, 1].mean()
        paddle = np.argwhere(obs[83, :, 3] == 128).mean()
        obs, reward, terminated, _, _ = env.step(1 + int(np.sign(round((ball - paddle) / 3))))
        if terminated:
            rewards.append(reward)
            obs, _ = env.reset()
    assert len(rewards) > 10
    assert np.mean(rewards) > 0.5


def test_an_id_without_a_kernel_names_those_that_there_are() -> None:
    with pytest.raises(stepmill.UsageError, match="no kernel for 'LunarLander-v3'; there are CartPole-v1"):
        stepmill.make_vec("LunarLander-v3", 2, backend="kernel")
