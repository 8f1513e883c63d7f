"""Twenty envs that people train on: every value of 5,000 steps of each is that of Gymnasium's SyncVectorEnv, infos included."""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.harness.pools import make_vector_env
from tests.harness.trace import assert_results_equal

NUM_ENVS = 4
NUM_STEPS = 5_000
MUJOCO = ("InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Swimmer", "Hopper", "HalfCheetah", "Walker2d")
ATARI = {"frameskip": 1, "max_episode_steps": 500}  # a frame takes a quarter of a step's time
ENVS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Acrobot-v1": {},
    "MountainCar-v0": {},
    "MountainCarContinuous-v0": {},
    "Pendulum-v1": {},
    "Blackjack-v1": {"natural": True},
    "CliffWalking-v1": {"is_slippery": True, "max_episode_steps": 100},
    "FrozenLake-v1": {},
    "FrozenLake8x8-v1": {},
    "Taxi-v4": {"is_rainy": True},
    **{f"{task}-v5": {} for task in MUJOCO},
    "ALE/Pong-v5": ATARI,
    "ALE/Breakout-v5": {**ATARI, "obs_type": "grayscale"},
    "ALE/Seaquest-v5": {**ATARI, "obs_type": "ram"},
}


def make(name: str) -> gymnasium.Env[Any, Any]:
    if name.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    return gymnasium.make(name, **ENVS[name])


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", ENVS)
def test_a_real_env_has_the_data_that_it_has_in_gymnasium(name: str, mode: AutoresetMode) -> None:
    if name.startswith("ALE/"):
        pytest.importorskip("ale_py")
    if name.startswith(MUJOCO):
        pytest.importorskip("mujoco")
    env_fns = [partial(make, name)] * NUM_ENVS
    seed = zlib.crc32(name.encode())
    ours: Any = make_vector_env("fork", env_fns, autoreset_mode=mode)
    theirs: Any = SyncVectorEnv(env_fns, autoreset_mode=mode)
    space = theirs.single_observation_space
    try:
        assert_results_equal(ours.reset(seed=seed), theirs.reset(seed=seed), space, "reset")
        theirs.action_space.seed(seed)
        num_ends = 0
        for step in range(NUM_STEPS // NUM_ENVS):
            actions = theirs.action_space.sample()
            expected = theirs.step(actions)
            assert_results_equal(ours.step(actions), expected, space, f"step {step}")
            is_over = expected[2] | expected[3]
            num_ends += int(is_over.sum())
            if mode is AutoresetMode.DISABLED and is_over.any():
                results = (envs.reset(options={"reset_mask": is_over}) for envs in (ours, theirs))
                assert_results_equal(*results, space, f"reset after step {step}")
        assert num_ends > 0
    finally:
        ours.close()
        theirs.close()
