"""An action outside its space is a fault of that env, of the type that Gymnasium's env raises; no memory is read beyond a table."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.harness.pools import begun

pytest.importorskip("numba")

HUGE = 2**40
CATCH = "stepmill/Catch84-v0"
DISCRETE = [
    *("CartPole-v1", "MountainCar-v0", "Acrobot-v1", "Blackjack-v1"),
    *("FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4", "CliffWalking-v1", "CliffWalkingSlippery-v1"),
    CATCH,
]


def _raised_by_gymnasium(env_id: str, action: int) -> str:
    """Return the type of what Gymnasium's env raises; Catch is not one of Gymnasium's."""
    if env_id == CATCH:
        return "IndexError"
    env = gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    with pytest.raises((AssertionError, KeyError, IndexError)) as raised:
        env.step(action)
    return raised.type.__name__


@pytest.mark.parametrize(
    "env_id", [pytest.param(each, marks=() if n % 2 else pytest.mark.slow) for n, each in enumerate(DISCRETE)]
)
def test_an_action_out_of_range_is_a_fault_of_its_env_alone(env_id: str) -> None:
    kernel = stepmill.kernels.find(env_id)
    count = int(kernel.action_space.n)
    with begun(stepmill.Pool([kernel] * 3, backend="kernel")) as pool:
        for action in (count, -count - 1, -1, HUGE, -HUGE, 2**63 - 1, -(2**63)):
            kind = _raised_by_gymnasium(env_id, action if action != -1 else -count - 1)
            pool.send(np.array([0, action, 0]))
            with pytest.raises(stepmill.EnvError, match=f"env 1 raised {kind} in step: the action") as raised:
                pool.recv(3)
            assert raised.value.env_id == 1
            pool.recv(2)
            pool.reset(seed=0)
        pool.step(np.full(3, count - 1))


@pytest.mark.parametrize("env_id", DISCRETE)
def test_a_kernel_in_python_refuses_the_same_actions(env_id: str) -> None:
    env = begun(stepmill.kernels.find(env_id)(compiled=False))
    for action in (int(env.action_space.n), -1, HUGE):
        with pytest.raises((AssertionError, KeyError, IndexError), match="the action"):
            env.step(action)


@pytest.mark.parametrize(
    ("env_id", "field", "value"),
    [("FrozenLake-v1", "place", 16), ("FrozenLake-v1", "place", -HUGE), ("Taxi-v4", "place", HUGE)]
    + [(CATCH, field, HUGE) for field in ("ball_x", "ball_y", "paddle_x")]
    + [(CATCH, field, -5) for field in ("ball_x", "ball_y", "paddle_x")],
)
def test_a_state_that_was_set_out_of_range_is_a_fault_too(env_id: str, field: str, value: int) -> None:
    value = value if env_id != CATCH else int(np.clip(value, -5, 2**30))
    with begun(stepmill.Pool([stepmill.kernels.find(env_id)] * 2, backend="kernel")) as pool:
        pool.set_attr(field, value, env_ids=[1])
        with pytest.raises(
            stepmill.EnvError, match=r"env 1 raised (KeyError|IndexError) in step: the action or the state"
        ):
            pool.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("env_id", ["MountainCarContinuous-v0", "Pendulum-v1"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_force_that_is_no_finite_number_does_what_it_does_in_gymnasium(env_id: str, value: float) -> None:
    ours: Any = stepmill.kernels.find(env_id)()
    theirs: Any = gymnasium.make(env_id).unwrapped
    ours.reset(seed=0)
    theirs.reset(seed=0)
    for name, number in zip(ours.memory.record.dtype.names, theirs.state, strict=True):
        setattr(ours.memory.record, name, number)
    for _ in range(3):
        action = np.array([value], np.float32)
        mine, yours = ours.step(action), theirs.step(action)
        np.testing.assert_allclose(mine[0], yours[0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(mine[1], yours[1], rtol=1e-6)
