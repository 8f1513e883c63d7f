"""What the engine cuts short is a fault and not an episode; a death at any moment costs only repetitions."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.testing import Gate
from stepmill.testing.gates import wait_at
from tests.harness.kills import kill_process


class TwentySteps(gymnasium.Env):
    """Every episode has 20 steps of reward 1. The first reset with seed 1 raises, while the other env is at its tenth step."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def __init__(self, folder: Path, tenth_step: Path) -> None:
        self.mark, self.tenth_step = folder / "raised", tenth_step

    def reset(self, *, seed=None, options=None):
        self.num_steps = 0
        if seed == 1 and not self.mark.exists():
            self.mark.touch()
            wait_at(self.tenth_step)
            raise OSError("the server is busy")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.zeros(1, np.float32), 1.0, self.num_steps == 20, False, {"fault": "a lamp"}


def hold(obs):
    return np.zeros(len(obs), np.int64)


def test_an_episode_that_the_reset_of_a_neighbour_cuts_short_is_played_again(tmp_path):
    num_calls = 0

    def policy(obs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 10:
            gate.open()
        return hold(obs)

    with Gate() as gate, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stepmill.evaluate(
            policy, partial(TwentySteps, tmp_path, gate.path), seeds=range(4), num_envs=2, num_workers=1, progress=False,
            workers={"threads_per_worker": 2}, resets={"retries": 3, "retry_in": "new"},
        )  # fmt: skip
    assert [(each.seed, each.episode_return, each.length, each.attempts, each.fault) for each in found.episodes] == [
        (seed, 20.0, 20, 1, None) for seed in range(4)
    ]
    assert num_calls > 80 / 2


def test_an_info_of_the_env_that_is_named_fault_does_not_end_its_episode(tmp_path):
    (tmp_path / "raised").touch()
    make = partial(TwentySteps, tmp_path, tmp_path)
    found = stepmill.evaluate(hold, make, seeds=range(4), backend="serial", infos=["fault"], progress=False)
    assert [(each.length, each.fault, each.infos) for each in found.episodes] == [(20, None, {"fault": "a lamp"})] * 4


class Reporting(gymnasium.Env):
    """Tells its process; episodes with an odd seed are long."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.pid, self.num_steps, self.length = os.getpid(), 0, 60 if seed % 2 else 3
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.zeros(1, np.float32), 1.0, self.num_steps == self.length, False, {"pid": self.pid}


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_dies_between_two_calls_of_the_pool_ends_no_evaluation(at, num_workers):
    num_ended = 0

    def success(info):  # called after results were received, and before the envs are reset
        nonlocal num_ended
        num_ended += 1
        if num_ended == at:
            kill_process(info["pid"])
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stepmill.evaluate(
            hold, Reporting, seeds=range(12), num_envs=4, num_workers=num_workers, success=success, progress=False
        )
    assert [(each.episode_return, each.fault) for each in found.episodes] == [(3.0, None), (60.0, None)] * 6
