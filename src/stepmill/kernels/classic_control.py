"""Gymnasium's classic control envs as kernels. Given the same state and action, each does what Gymnasium's env does.

The casts tell type checkers what `@kernel` returns, because they ignore the results of class decorators.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from stepmill.kernels.python import PythonKernel, kernel

# ---- CartPole ----------------------------------------------------------------------------------------------------------

_THETA_LIMIT = 12 * 2 * math.pi / 360
_X_LIMIT = 2.4
_CARTPOLE_HIGH = np.array([_X_LIMIT * 2, np.inf, _THETA_LIMIT * 2, np.inf], dtype=np.float32)


def make_cartpole(*, sutton_barto_reward: bool = False) -> PythonKernel:
    """CartPole-v1. Kernels are made in functions, whose arguments are constants of the compiled code."""
    reward, last_reward = (0.0, -1.0) if sutton_barto_reward else (1.0, 1.0)

    @kernel(
        observation_space=spaces.Box(-_CARTPOLE_HIGH, _CARTPOLE_HIGH, dtype=np.float32),
        action_space=spaces.Discrete(2),
        state=np.dtype([("x", "f8"), ("x_dot", "f8"), ("theta", "f8"), ("theta_dot", "f8")]),
        max_episode_steps=500,
    )
    class cartpole:  # noqa: N801  a kernel, not a class
        def reset(state: Any, rng: Any, obs: Any) -> None:
            state.x = rng.uniform(-0.05, 0.05)
            state.x_dot = rng.uniform(-0.05, 0.05)
            state.theta = rng.uniform(-0.05, 0.05)
            state.theta_dot = rng.uniform(-0.05, 0.05)
            obs[0] = state.x
            obs[1] = state.x_dot
            obs[2] = state.theta
            obs[3] = state.theta_dot

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            if not 0 <= action <= 1:
                raise AssertionError("the action must be 0 or 1")
            force = 10.0 if action == 1 else -10.0
            cos = math.cos(state.theta)
            sin = math.sin(state.theta)
            temp = (force + 0.05 * (state.theta_dot * state.theta_dot) * sin) / 1.1
            theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * (cos * cos) / 1.1))
            x_acc = temp - 0.05 * theta_acc * cos / 1.1
            state.x += 0.02 * state.x_dot
            state.x_dot += 0.02 * x_acc
            state.theta += 0.02 * state.theta_dot
            state.theta_dot += 0.02 * theta_acc
            obs[0] = state.x
            obs[1] = state.x_dot
            obs[2] = state.theta
            obs[3] = state.theta_dot
            is_out = (
                state.x < -_X_LIMIT or state.x > _X_LIMIT or state.theta < -_THETA_LIMIT or state.theta > _THETA_LIMIT
            )
            return (last_reward if is_out else reward), is_out, False

    return cast("PythonKernel", cartpole)


# ---- MountainCar -------------------------------------------------------------------------------------------------------

_CAR_LOW = np.array([-1.2, -0.07], dtype=np.float32)
_CAR_HIGH = np.array([0.6, 0.07], dtype=np.float32)


def _reset_car(state: Any, rng: Any, obs: Any) -> None:
    state.position = rng.uniform(-0.6, -0.4)
    state.velocity = 0.0
    obs[0] = state.position
    obs[1] = state.velocity


def make_mountain_car(*, goal_velocity: float = 0.0) -> PythonKernel:
    """MountainCar-v0."""

    @kernel(
        observation_space=spaces.Box(_CAR_LOW, _CAR_HIGH, dtype=np.float32),
        action_space=spaces.Discrete(3),
        state=np.dtype([("position", "f8"), ("velocity", "f8")]),
        max_episode_steps=200,
    )
    class mountain_car:  # noqa: N801
        reset = _reset_car

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            if not 0 <= action <= 2:
                raise AssertionError("the action must be 0, 1 or 2")
            velocity = state.velocity + ((action - 1) * 0.001 + math.cos(3 * state.position) * -0.0025)
            velocity = min(max(velocity, -0.07), 0.07)
            position = min(max(state.position + velocity, -1.2), 0.6)
            if position == -1.2 and velocity < 0:
                velocity = 0.0
            state.position = position
            state.velocity = velocity
            obs[0] = position
            obs[1] = velocity
            return -1.0, position >= 0.5 and velocity >= goal_velocity, False

    return cast("PythonKernel", mountain_car)


_F32 = np.float32


def make_mountain_car_continuous(*, goal_velocity: float = 0.0) -> PythonKernel:
    """MountainCarContinuous-v0. Gymnasium's env keeps its state in float32, and so does this one from the reset on."""
    goal_speed = _F32(goal_velocity)

    @kernel(
        observation_space=spaces.Box(_CAR_LOW, _CAR_HIGH, dtype=np.float32),
        action_space=spaces.Box(-1.0, 1.0, (1,), np.float32),
        state=np.dtype([("position", "f4"), ("velocity", "f4")]),
        max_episode_steps=999,
    )
    class mountain_car_continuous:  # noqa: N801
        reset = _reset_car

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            force = min(max(action[0], _F32(-1.0)), _F32(1.0))
            slope = 0.0025 * math.cos(np.float64(_F32(_F32(3) * state.position)))
            push = _F32(_F32(force * _F32(0.0015)) - _F32(slope))
            velocity = _F32(state.velocity + push)
            velocity = min(max(velocity, _F32(-0.07)), _F32(0.07))
            position = min(max(_F32(state.position + velocity), _F32(-1.2)), _F32(0.6))
            if position == _F32(-1.2) and velocity < 0:
                velocity = _F32(0.0)
            terminated = bool(position >= _F32(0.45) and velocity >= goal_speed)
            state.position = position
            state.velocity = velocity
            obs[0] = position
            obs[1] = velocity
            pushed = np.float64(action[0])
            return (100.0 if terminated else 0.0) - pushed * pushed * 0.1, terminated, False

    return cast("PythonKernel", mountain_car_continuous)


# ---- Pendulum ----------------------------------------------------------------------------------------------------------

_PENDULUM_HIGH = np.array([1.0, 1.0, 8.0], dtype=np.float32)


def make_pendulum(*, g: float = 10.0) -> PythonKernel:
    """Pendulum-v1."""
    pull = 3 * g / 2.0

    @kernel(
        observation_space=spaces.Box(-_PENDULUM_HIGH, _PENDULUM_HIGH, dtype=np.float32),
        action_space=spaces.Box(-2.0, 2.0, (1,), np.float32),
        state=np.dtype([("theta", "f8"), ("theta_dot", "f8")]),
        max_episode_steps=200,
    )
    class pendulum:  # noqa: N801
        def reset(state: Any, rng: Any, obs: Any) -> None:
            state.theta = rng.uniform(-math.pi, math.pi)
            state.theta_dot = rng.uniform(-1.0, 1.0)
            obs[0] = math.cos(state.theta)
            obs[1] = math.sin(state.theta)
            obs[2] = state.theta_dot

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            theta = state.theta
            theta_dot = state.theta_dot
            torque = min(max(action[0], _F32(-2.0)), _F32(2.0))
            angle = (theta + math.pi) % (2 * math.pi) - math.pi
            effort = np.float64(_F32(_F32(0.001) * _F32(torque * torque)))
            cost = angle * angle + 0.1 * (theta_dot * theta_dot) + effort
            theta_dot += (pull * math.sin(theta) + np.float64(_F32(_F32(3.0) * torque))) * 0.05
            theta_dot = min(max(theta_dot, -8.0), 8.0)
            theta += theta_dot * 0.05
            state.theta = theta
            state.theta_dot = theta_dot
            obs[0] = math.cos(theta)
            obs[1] = math.sin(theta)
            obs[2] = theta_dot
            return -cost, False, False

    return cast("PythonKernel", pendulum)


# ---- Acrobot -----------------------------------------------------------------------------------------------------------

_ACROBOT_HIGH = np.array([1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi], dtype=np.float32)


def _accelerations(theta1: float, theta2: float, dtheta1: float, dtheta2: float, torque: float) -> tuple[float, float]:
    d1 = 0.25 + (1.25 + 1.0 * math.cos(theta2)) + 1.0 + 1.0
    d2 = (0.25 + 0.5 * math.cos(theta2)) + 1.0
    phi2 = 0.5 * 9.8 * math.cos(theta1 + theta2 - math.pi / 2.0)
    phi1 = (
        -0.5 * (dtheta2 * dtheta2) * math.sin(theta2)
        - 1.0 * dtheta2 * dtheta1 * math.sin(theta2)
        + 1.5 * 9.8 * math.cos(theta1 - math.pi / 2)
        + phi2
    )
    ddtheta2 = (torque + d2 / d1 * phi1 - 0.5 * (dtheta1 * dtheta1) * math.sin(theta2) - phi2) / (
        0.25 + 1.0 - d2 * d2 / d1
    )
    return -(d2 * ddtheta2 + phi1) / d1, ddtheta2


def _wrap(angle: float) -> float:
    while angle > math.pi:
        angle = angle - 2 * math.pi
    while angle < -math.pi:
        angle = angle + 2 * math.pi
    return angle


def _write_acrobot(state: Any, obs: Any) -> None:
    obs[0] = math.cos(state.theta1)
    obs[1] = math.sin(state.theta1)
    obs[2] = math.cos(state.theta2)
    obs[3] = math.sin(state.theta2)
    obs[4] = state.dtheta1
    obs[5] = state.dtheta2


def make_acrobot() -> PythonKernel:
    """Acrobot-v1: one Runge-Kutta step of fourth order over 0.2 s."""

    @kernel(
        observation_space=spaces.Box(-_ACROBOT_HIGH, _ACROBOT_HIGH, dtype=np.float32),
        action_space=spaces.Discrete(3),
        state=np.dtype([("theta1", "f8"), ("theta2", "f8"), ("dtheta1", "f8"), ("dtheta2", "f8")]),
        max_episode_steps=500,
    )
    class acrobot:  # noqa: N801
        def reset(state: Any, rng: Any, obs: Any) -> None:
            state.theta1 = _F32(rng.uniform(-0.1, 0.1))
            state.theta2 = _F32(rng.uniform(-0.1, 0.1))
            state.dtheta1 = _F32(rng.uniform(-0.1, 0.1))
            state.dtheta2 = _F32(rng.uniform(-0.1, 0.1))
            _write_acrobot(state, obs)

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            if not 0 <= action <= 2:  # Gymnasium's env takes -3 ... -1, too: it indexes a list
                raise IndexError("the action must be 0, 1 or 2")
            torque = action - 1.0
            a, b, va, vb = state.theta1, state.theta2, state.dtheta1, state.dtheta2
            a1, b1 = _accelerations(a, b, va, vb, torque)
            va2, vb2 = va + 0.1 * a1, vb + 0.1 * b1
            a2, b2 = _accelerations(a + 0.1 * va, b + 0.1 * vb, va2, vb2, torque)
            va3, vb3 = va + 0.1 * a2, vb + 0.1 * b2
            a3, b3 = _accelerations(a + 0.1 * va2, b + 0.1 * vb2, va3, vb3, torque)
            va4, vb4 = va + 0.2 * a3, vb + 0.2 * b3
            a4, b4 = _accelerations(a + 0.2 * va3, b + 0.2 * vb3, va4, vb4, torque)
            sixth = 0.2 / 6.0
            state.theta1 = _wrap(a + sixth * (va + 2 * va2 + 2 * va3 + va4))
            state.theta2 = _wrap(b + sixth * (vb + 2 * vb2 + 2 * vb3 + vb4))
            state.dtheta1 = min(max(va + sixth * (a1 + 2 * a2 + 2 * a3 + a4), -4 * math.pi), 4 * math.pi)
            state.dtheta2 = min(max(vb + sixth * (b1 + 2 * b2 + 2 * b3 + b4), -9 * math.pi), 9 * math.pi)
            _write_acrobot(state, obs)
            is_up = -math.cos(state.theta1) - math.cos(state.theta2 + state.theta1) > 1.0
            return (0.0 if is_up else -1.0), is_up, False

    return cast("PythonKernel", acrobot)
