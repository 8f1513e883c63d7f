"""Arguments of Gymnasium's envs mean the same to kernels: both do the same from the same state with the same action."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

import stepmill
from tests.kernels.tables import check_outcomes

pytest.importorskip("numba")

Arguments = Mapping[str, Any]

CLASSIC: list[tuple[str, Arguments, tuple[str, ...], list[float]]] = [
    ("CartPole-v1", {"sutton_barto_reward": True}, ("x", "x_dot", "theta", "theta_dot"), [2.5, 3.0, 0.22, 3.0]),
    ("MountainCar-v0", {"goal_velocity": 0.03}, ("position", "velocity"), [0.6, 0.07]),
    ("MountainCarContinuous-v0", {"goal_velocity": 0.03}, ("position", "velocity"), [0.6, 0.07]),
    ("Pendulum-v1", {"g": 9.81}, ("theta", "theta_dot"), [7.0, 8.0]),
]
TABULAR: list[tuple[str, Arguments]] = [
    ("FrozenLake-v1", {"map_name": "8x8", "is_slippery": False}),
    ("FrozenLake-v1", {"success_rate": 0.7, "reward_schedule": (10, -3, -1)}),
    ("FrozenLake-v1", {"desc": ["SFFH", "FFHG"]}),
    ("FrozenLake8x8-v1", {"is_slippery": False}),
    ("CliffWalking-v1", {"is_slippery": True}),
    ("Taxi-v4", {"is_rainy": True, "rainy_probability": 0.5}),
]
NUM_STATES = 200


@pytest.mark.parametrize(("env_id", "arguments", "fields", "high"), CLASSIC)
def test_a_step_from_a_given_state_is_gymnasiums(
    env_id: str, arguments: Arguments, fields: tuple[str, ...], high: list[float]
) -> None:
    ours, theirs = stepmill.kernels.find(env_id, **arguments)(), gymnasium.make(env_id, **arguments).unwrapped
    ours.reset(seed=0)
    theirs.reset(seed=0)
    theirs.action_space.seed(0)
    dtype = np.float32 if env_id == "MountainCarContinuous-v0" else np.float64
    rewards, num_ends = set(), 0
    for state in (np.random.default_rng(1).uniform(-1.0, 1.0, (NUM_STATES, len(high))) * high).astype(dtype):
        action = theirs.action_space.sample()
        for name, value in zip(fields, state, strict=True):
            setattr(ours.memory.record, name, value)
        theirs.state = state.copy() if env_id != "MountainCar-v0" else tuple(state.tolist())
        if env_id == "CartPole-v1":
            theirs.steps_beyond_terminated = None
        mine, yours = ours.step(action), theirs.step(action)
        np.testing.assert_allclose(mine[0], yours[0], rtol=3e-7, atol=3e-7)
        np.testing.assert_allclose(mine[1], float(yours[1]), rtol=1e-12, atol=1e-12)
        assert mine[2] == yours[2]
        rewards.add(mine[1])
        num_ends += mine[2]
    assert num_ends or env_id == "Pendulum-v1"
    assert env_id != "CartPole-v1" or rewards == {0.0, -1.0}


@pytest.mark.parametrize(("env_id", "arguments"), TABULAR)
def test_the_outcomes_of_a_table_are_gymnasiums(env_id: str, arguments: Arguments) -> None:
    ours, theirs = stepmill.kernels.find(env_id, **arguments)(), gymnasium.make(env_id, **arguments).unwrapped
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert int(ours.reset(seed=0)[0]) in np.flatnonzero(theirs.initial_state_distrib)
    check_outcomes(ours, theirs)


def test_a_fickle_passenger_chooses_another_destination_once() -> None:
    arguments = {"fickle_passenger": True, "fickle_probability": 0.4}
    ours, theirs = stepmill.kernels.find("Taxi-v4", **arguments)(), gymnasium.make("Taxi-v4", **arguments).unwrapped
    boarded = ((2 * 5 + 2) * 5 + 4) * 4 + 1  # in the middle, the passenger in the taxi, to destination 1
    seen: list[list[int]] = []
    for env in (ours, theirs):
        places = []
        for seed in range(3000):
            env.reset(seed=seed)
            if env is ours:
                ours.memory.record.place = boarded
            else:
                theirs.s = boarded
            first = int(env.step(1)[0])  # north: the taxi moves
            assert first // 4 == (1 * 5 + 2) * 5 + 4
            places.append(first % 4)
            assert int(env.step(0)[0]) % 4 == first % 4  # never a second time
        seen.append([places.count(destination) for destination in range(4)])
    assert np.abs(np.subtract(*seen)).max() < 250
    assert min(seen[0]) > 250


@pytest.mark.parametrize("arguments", [{"natural": True, "sab": False}, {"sab": False}, {"natural": True, "sab": True}])
def test_a_natural_of_blackjack_pays_what_gymnasiums_pays(arguments: Arguments) -> None:
    ours, theirs = (
        stepmill.kernels.find("Blackjack-v1", **arguments)(),
        gymnasium.make("Blackjack-v1", **arguments).unwrapped,
    )
    ours.reset(seed=0)
    theirs.reset(seed=0)
    for player in ([1, 10], [10, 5, 6], [9, 10], [10, 10]):
        for dealer in ([10, 1], [10, 9], [10, 7], [9, 8]):
            record = ours.memory.record
            record.player, record.player_aces = sum(player), player.count(1)
            record.dealer, record.dealer_aces = sum(dealer), dealer.count(1)
            record.player_cards, record.shown = len(player), dealer[0]
            theirs.player, theirs.dealer = list(player), list(dealer)
            assert ours.step(0)[1] == theirs.step(0)[1], (player, dealer)


@pytest.mark.parametrize("limit", [7, -1])
def test_the_time_limit_is_that_of_gymnasiums_make(limit: int) -> None:
    with stepmill.make_vec("Pendulum-v1", 2, backend="kernel", max_episode_steps=limit) as envs:
        envs.reset(seed=0)
        ended = [bool(envs.step(np.zeros((2, 1), np.float32))[3].all()) for _ in range(210)]
    assert ended.index(True) == 6 if limit == 7 else not any(ended)


def test_make_vec_passes_arguments_on() -> None:
    with stepmill.make_vec("FrozenLake-v1", 3, backend="kernel", map_name="8x8", is_slippery=False) as envs:
        assert envs.single_observation_space.n == 64
        obs, _ = envs.reset(seed=0)
        assert obs.tolist() == [0, 0, 0]
        assert envs.step(np.array([2, 1, 1]))[0].tolist() == [1, 8, 8]
    desc = generate_random_map(5, seed=3)
    with stepmill.make_vec("FrozenLake-v1", 2, backend="kernel", env_kwargs={"desc": desc}, render_mode=None) as envs:
        assert envs.single_observation_space.n == 25


def test_a_kernel_with_arguments_can_be_pickled() -> None:
    kernel = stepmill.kernels.find("Pendulum-v1", g=3.0, max_episode_steps=9)
    again = pickle.loads(pickle.dumps(kernel))
    assert again is kernel  # in this process
    assert (again.max_episode_steps, stepmill.kernels.find("Pendulum-v1").max_episode_steps) == (9, 200)


@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [
        (
            "CartPole-v1",
            {"gravity": 3.0},
            r"CartPole-v1 does not take gravity; it takes sutton_barto_reward=False, max_",
        ),
        (
            "Acrobot-v1",
            {"render_mode": "rgb_array"},
            "Acrobot-v1 does not take render_mode; it takes max_episode_steps",
        ),
        ("FrozenLake-v1", {"map_name": "9x9"}, "FrozenLake-v1 cannot be made with .*9x9.*KeyError"),
        ("FrozenLake-v1", {"map_name": None}, "random map in each env"),
        ("FrozenLake-v1", {"desc": ["FFG"]}, "has no start"),
        ("FrozenLake-v1", {"success_rate": 1.5}, "probabilities that are not between 0 and 1"),
        ("FrozenLake-v1", {"desc": [{}]}, "desc has a dict in it"),
        ("FrozenLake-v1", {"is_slippery": "no"}, "is_slippery='no' .* must be True or False"),
        ("Pendulum-v1", {"g": "ten"}, "g='ten' of the kernel Pendulum-v1 must be a number, as 10.0 is"),
        ("Pendulum-v1", {"g": None}, "g=None"),
        ("Pendulum-v1", {"max_episode_steps": 0}, "max_episode_steps=0 must be 1 or more, -1 for no limit"),
        ("Hopper-v5", {"healthy_z_range": 0.7}, "healthy_z_range=0.7 .* must be 2 numbers"),
        ("Hopper-v5", {"xml_file": "no_such.xml"}, "there is no model .*no_such.xml"),
        ("Hopper-v5", {"frame_skip": 0}, "frame_skip=0 of the kernel Hopper-v5 must be 1 or more"),
        ("Hopper-v5", {"camera_id": 1}, "does not take camera_id; it takes xml_file='hopper.xml', frame_skip=4"),
        ("Ant-v5", {"main_body": "tail"}, "the model has no body 'tail', which the task needs; it has world, torso"),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(env_id: str, arguments: Any, message: str) -> None:
    if env_id in ("Hopper-v5", "Ant-v5"):
        pytest.importorskip("mujoco")
    with pytest.raises(stepmill.UsageError, match=message):
        stepmill.make_vec(env_id, 2, backend="kernel", env_kwargs=arguments)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    (tmp_path / "bad.xml").write_text("<mujoco><nonsense/></mujoco>")
    with pytest.raises(stepmill.UsageError, match=r"MuJoCo cannot read the model .*bad\.xml"):
        stepmill.kernels.find("Hopper-v5", xml_file=tmp_path / "bad.xml")
