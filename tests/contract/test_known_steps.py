"""`backend="auto"` runs few tiny envs of Gymnasium in line, also behind the functions in which programs make them."""

from __future__ import annotations

import functools
import logging
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import stepmill
from stepmill.pool import advice
from stepmill.pool.auto_backend import choose_backend

TINY = "CartPole-v1"


def make_tiny() -> gym.Env[Any, Any]:
    return gym.make(TINY)


def make() -> gym.Env[Any, Any]:
    return gym.make(TINY)  # this attribute is not the function


def cleanrl_function(env_id: str, idx: int, capture_video: bool, run_name: str) -> Callable[[], gym.Env[Any, Any]]:
    """Return a function as CleanRL's programs make it."""

    def thunk() -> gym.Env[Any, Any]:
        if capture_video and idx == 0:
            env = gym.make(env_id, render_mode="rgb_array")
            env = gym.wrappers.RecordVideo(env, f"videos/{run_name}")
        else:
            env = gym.make(env_id)
        return gym.wrappers.RecordEpisodeStatistics(env)

    return thunk


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """Takes two milliseconds for a step."""

    def step(self, action: Any) -> Any:
        time.sleep(2e-3)
        return super().step(action)


class Experiment:
    """Makes envs from a spec, as RL Zoo does."""

    def __init__(self) -> None:
        self.spec = gym.spec(TINY)

    def function(self) -> Callable[..., gym.Env[Any, Any]]:
        def make_env(**kwargs: Any) -> gym.Env[Any, Any]:
            return self.spec.make(**kwargs)

        return make_env


ARGS = Namespace(task=TINY, seed=1)


@dataclass
class Arguments:
    """Arguments of a program."""

    task: str = TINY
    learning_rate: float = 1e-3


def with_arguments(arguments: Arguments) -> Callable[[], gym.Env[Any, Any]]:
    return lambda: gym.make(arguments.task)


UNDERSTOOD = {
    "namespace": lambda: gym.make(ARGS.task),
    "dataclass": with_arguments(Arguments()),
    "lambda": lambda: gym.make("CartPole-v1"),
    "global": make_tiny,
    "name_of_attribute": make,
    "helper": lambda: make_tiny(),
    "partial": functools.partial(gym.make, TINY),
    "class": CartPoleEnv,
    "cleanrl": cleanrl_function(TINY, 1, capture_video=False, run_name="a"),
    "rl_zoo": Experiment().function(),
    "arguments": lambda: gym.make("Pendulum-v1", g=9.81),
}
UNKNOWN = {
    "argument": lambda: gym.make(ARGS.task, max_episode_steps=ARGS.missing),
    "wrapper": lambda: Slow(gym.make("CartPole-v1")),
    "rendered": lambda: gym.wrappers.AddRenderObservation(gym.make("CartPole-v1", render_mode="rgb_array")),
    "no_tiny_env": lambda: gym.make("Acrobot-v1"),
    "two_envs": lambda: gym.make("CartPole-v1" if time.time() else "Acrobot-v1"),
    "bound_method": Experiment().function,
}


@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_functions_that_make_a_tiny_env_run_in_line(kind: str) -> None:
    with stepmill.Pool([UNDERSTOOD[kind]] * 3, autoreset_mode="SameStep") as pool:
        assert pool.stats().backend == "serial"
        assert repr(pool) == "Pool(num_envs=3, backend='serial', num_workers=1)"


@pytest.mark.parametrize("kind", UNKNOWN)
def test_functions_that_are_not_understood_run_in_workers(kind: str) -> None:
    options = stepmill.PoolOptions()
    assert choose_backend([UNKNOWN[kind]] * 3, options) == "process"
    assert choose_backend([make_tiny, make_tiny, UNKNOWN[kind]], options) == "process"


@pytest.mark.parametrize(
    "option", [{"num_workers": 2}, {"on_fault": "truncate"}, {"step_timeout_s": 60.0}, {"context": "fork"}]
)
def test_an_option_about_workers_or_faults_gives_tiny_envs_workers(option: dict[str, Any]) -> None:
    assert choose_backend([make_tiny] * 3, stepmill.PoolOptions(**option)) == "process"


def test_a_vector_env_shows_its_backend() -> None:
    envs = stepmill.VectorEnv([make_tiny] * 3)
    assert repr(envs) == "VectorEnv(num_envs=3, backend='serial')"
    envs.close()
    assert repr(envs) == "VectorEnv(num_envs=3)"


def test_envs_in_line_that_turn_out_slow_give_advice_about_workers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "_given", set())
    monkeypatch.setattr(advice, "MIN_GAIN_S", 0.2)
    monkeypatch.setattr(CartPoleEnv, "step", slow_step(CartPoleEnv.step))
    for backend in ({}, {"backend": "serial"}):
        with caplog.at_level(logging.WARNING, "stepmill"), stepmill.VectorEnv([make_tiny] * 3, **backend) as envs:
            envs.reset(seed=0)
            for _ in range(150):
                envs.step(np.zeros(3, np.int64))
    assert [record.message.partition("; ")[2] for record in caplog.records] == [
        "with backend='process', workers divide that among the cores (backend='serial' ends this advice)"
    ]


def slow_step(step: Callable[..., Any]) -> Callable[..., Any]:
    def slow(self: Any, action: Any) -> Any:
        time.sleep(2e-3)
        return step(self, action)

    return slow
