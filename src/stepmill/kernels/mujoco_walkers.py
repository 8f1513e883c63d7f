"""The functions of Gymnasium's MuJoCo tasks, version 5, in which a body is to move: HalfCheetah, Hopper, Walker2d, Swimmer, Ant, Humanoid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stepmill.kernels.mujoco_model import F32, FREE, Model, clip, sum_squares


def x_position(sim: Any) -> Any:
    return sim.qpos[0]


# ---- tasks on a plane --------------------------------------------------------------------------------------------------


def noisy_reset(model: Model, *, scale: float, is_normal: bool = False) -> Callable[..., None]:
    """Return a reset to the model's positions and speeds with noise: uniform, but for speeds where `is_normal`."""
    qpos, qvel = model.qpos, model.qvel

    def reset(sim: Any, rng: Any) -> None:
        for place in range(len(sim.qpos)):
            sim.qpos[place] = qpos[place] + rng.uniform(-scale, scale)
        for place in range(len(sim.qvel)):
            noise = scale * rng.normal() if is_normal else rng.uniform(-scale, scale)
            sim.qvel[place] = qvel[place] + noise

    return reset


def plain_observation(model: Model, *, num_skipped: int, speed_limit: float = FREE) -> Callable[..., None]:
    """Return what observes qpos, without the first so many, and qvel, clipped."""

    def observe(sim: Any, obs: Any) -> None:
        num_kept = len(sim.qpos) - num_skipped
        for place in range(num_kept):
            obs[place] = sim.qpos[num_skipped + place]
        for place in range(len(sim.qvel)):
            obs[num_kept + place] = clip(sim.qvel[place], -speed_limit, speed_limit)

    return observe


def half_cheetah(model: Model) -> Callable[..., tuple[float, bool]]:
    dt = model.dt

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        return (sim.qpos[0] - before) / dt - np.float64(F32(0.1) * sum_squares(action)), False

    return outcome


def swimmer(model: Model) -> Callable[..., tuple[float, bool]]:
    dt = model.dt

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        return (sim.qpos[0] - before) / dt - np.float64(F32(1e-4) * sum_squares(action)), False

    return outcome


def hopper(model: Model) -> Callable[..., tuple[float, bool]]:
    dt = model.dt

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        is_healthy = sim.qpos[1] > 0.7 and -0.2 < sim.qpos[2] < 0.2
        for place in range(2, len(sim.qpos)):
            is_healthy = is_healthy and -100.0 < sim.qpos[place] < 100.0
        for place in range(len(sim.qvel)):
            is_healthy = is_healthy and -100.0 < sim.qvel[place] < 100.0
        reward = (sim.qpos[0] - before) / dt + (1.0 if is_healthy else 0.0)
        return reward - np.float64(F32(1e-3) * sum_squares(action)), not is_healthy

    return outcome


def walker2d(model: Model) -> Callable[..., tuple[float, bool]]:
    dt = model.dt

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        is_healthy = 0.8 < sim.qpos[1] < 2.0 and -1.0 < sim.qpos[2] < 1.0
        reward = (sim.qpos[0] - before) / dt + (1.0 if is_healthy else 0.0)
        return reward - np.float64(F32(1e-3) * sum_squares(action)), not is_healthy

    return outcome


# ---- Ant ---------------------------------------------------------------------------------------------------------------


def ant_position(sim: Any) -> Any:
    return sim.xpos[1, 0]


def observe_ant(sim: Any, obs: Any) -> None:
    end = len(sim.qpos) - 2
    for place in range(end):
        obs[place] = sim.qpos[2 + place]
    for place in range(len(sim.qvel)):
        obs[end + place] = sim.qvel[place]
    end += len(sim.qvel)
    forces = sim.cfrc_ext.reshape(sim.cfrc_ext.size)
    for place in range(6, len(forces)):
        obs[end + place - 6] = clip(forces[place], -1.0, 1.0)


def ant(model: Model) -> Callable[..., tuple[float, bool]]:
    dt = model.dt

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        is_healthy = 0.2 <= sim.qpos[2] <= 1.0
        for value in sim.qpos:
            is_healthy = is_healthy and math.isfinite(value)
        for value in sim.qvel:
            is_healthy = is_healthy and math.isfinite(value)
        forces = sim.cfrc_ext.reshape(sim.cfrc_ext.size)
        contact_cost = 5e-4 * _sum_clipped_squares(forces)
        reward = (sim.xpos[1, 0] - before) / dt + (1.0 if is_healthy else 0.0)
        return reward - (np.float64(F32(0.5) * sum_squares(action)) + contact_cost), not is_healthy

    return outcome


def _sum_clipped_squares(values: Any) -> float:
    """Return `np.sum(np.square(np.clip(values, -1, 1)))`: eight partial sums, as in sum_squares."""
    num = len(values)
    a = b = c = d = e = f = g = h = 0.0
    place = 0
    while place + 8 <= num:
        a += clip(values[place], -1.0, 1.0) ** 2
        b += clip(values[place + 1], -1.0, 1.0) ** 2
        c += clip(values[place + 2], -1.0, 1.0) ** 2
        d += clip(values[place + 3], -1.0, 1.0) ** 2
        e += clip(values[place + 4], -1.0, 1.0) ** 2
        f += clip(values[place + 5], -1.0, 1.0) ** 2
        g += clip(values[place + 6], -1.0, 1.0) ** 2
        h += clip(values[place + 7], -1.0, 1.0) ** 2
        place += 8
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    while place < num:
        total += clip(values[place], -1.0, 1.0) ** 2
        place += 1
    return total


# ---- Humanoid ----------------------------------------------------------------------------------------------------------


def observe_humanoid(sim: Any, obs: Any) -> None:
    end = 0
    for place in range(2, len(sim.qpos)):
        obs[end] = sim.qpos[place]
        end += 1
    for value in sim.qvel:
        obs[end] = value
        end += 1
    for body in range(1, len(sim.cinert)):
        for value in sim.cinert[body]:
            obs[end] = value
            end += 1
    for body in range(1, len(sim.cvel)):
        for value in sim.cvel[body]:
            obs[end] = value
            end += 1
    for place in range(6, len(sim.qfrc_actuator)):
        obs[end] = sim.qfrc_actuator[place]
        end += 1
    for body in range(1, len(sim.cfrc_ext)):
        for value in sim.cfrc_ext[body]:
            obs[end] = value
            end += 1


def mass_center(model: Model) -> Callable[..., float]:
    """Return what measures the x of the center of mass, added up as NumPy's einsum does."""
    masses, total = model.masses, float(model.masses.sum())

    def measure(sim: Any) -> float:
        moment = 0.0
        for body in range(len(masses)):
            moment += masses[body] * sim.xipos[body, 0]
        return moment / total

    return measure


def _contact_cost(sim: Any) -> Any:
    forces = sim.cfrc_ext.reshape(sim.cfrc_ext.size)
    return min(5e-7 * sum_squares(forces), 10.0)


def humanoid(model: Model) -> Callable[..., tuple[float, bool]]:
    dt, measure = model.dt, mass_center(model)

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        is_healthy = 1.0 < sim.qpos[2] < 2.0
        reward = 1.25 * ((measure(sim) - before) / dt) + (5.0 if is_healthy else 0.0)
        return reward - (0.1 * sum_squares(sim.ctrl) + _contact_cost(sim)), not is_healthy

    return outcome


def humanoid_standup(model: Model) -> Callable[..., tuple[float, bool]]:
    timestep = model.timestep

    def outcome(sim: Any, action: Any, before: float) -> tuple[float, bool]:
        return sim.qpos[2] / timestep - 0.1 * sum_squares(sim.ctrl) - _contact_cost(sim) + 1.0, False

    return outcome
