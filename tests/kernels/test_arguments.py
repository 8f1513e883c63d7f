"""Arguments of Gymnasium's envs reach kernels (test_gymnasium.py compares what they do), or are refused by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

import stepmill

pytest.importorskip("numba")


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


def test_envs_of_a_kernel_cannot_be_wrapped() -> None:
    with pytest.raises(stepmill.UsageError, match="of a kernel cannot be wrapped"):
        stepmill.make_vec("CartPole-v1", 2, backend="kernel", wrappers=[gymnasium.wrappers.TimeAwareObservation])


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    (tmp_path / "bad.xml").write_text("<mujoco><nonsense/></mujoco>")
    with pytest.raises(stepmill.UsageError, match=r"MuJoCo cannot read the model .*bad\.xml"):
        stepmill.kernels.find("Hopper-v5", xml_file=tmp_path / "bad.xml")
