"""The functions of Gymnasium's MuJoCo tasks, version 5, that balance or reach something: pendulums, Reacher, Pusher."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stepmill.kernels.mujoco_model import F32, Given, Model, clip, sum_squares


def inverted_pendulum(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        is_finite = math.isfinite(sim.qpos[0]) and math.isfinite(sim.qpos[1])
        is_finite = is_finite and math.isfinite(sim.qvel[0]) and math.isfinite(sim.qvel[1])
        terminated = not is_finite or abs(sim.qpos[1]) > 0.2
        info.reward_survive = 0 if terminated else 1
        return np.float64(info.reward_survive), terminated

    return outcome


# ---- InvertedDoublePendulum --------------------------------------------------------------------------------------------


def observe_double_pendulum(model: Model, given: Given) -> Callable[..., None]:
    def observe(sim: Any, obs: Any, info: Any) -> None:
        obs[0] = sim.qpos[0]
        for place in range(2):
            obs[1 + place] = math.sin(sim.qpos[1 + place])
            obs[3 + place] = math.cos(sim.qpos[1 + place])
        for place in range(3):
            obs[5 + place] = clip(sim.qvel[place], -10.0, 10.0)
        obs[8] = clip(sim.qfrc_constraint[0], -10.0, 10.0)

    return observe


def double_pendulum(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    healthy_reward = given["healthy_reward"]

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        x, y = sim.site_xpos[0, 0], sim.site_xpos[0, 2]
        terminated = y <= 1.0
        distance = 0.01 * (x * x) + (y - 2.0) * (y - 2.0)
        speed = 1e-3 * (sim.qvel[1] * sim.qvel[1]) + 5e-3 * (sim.qvel[2] * sim.qvel[2])
        info.reward_survive = 0.0 if terminated else healthy_reward
        info.distance_penalty = -distance
        info.velocity_penalty = -speed
        return info.reward_survive - distance - speed, terminated

    return outcome


# ---- Reacher and Pusher ------------------------------------------------------------------------------------------------


def distance(sim: Any, first: int, second: int) -> float:
    """Return the distance of two bodies. `np.linalg.norm`, which Gymnasium's tasks call, may round its last bits differently."""
    x = sim.xpos[first, 0] - sim.xpos[second, 0]
    y = sim.xpos[first, 1] - sim.xpos[second, 1]
    z = sim.xpos[first, 2] - sim.xpos[second, 2]
    return math.sqrt(x * x + y * y + z * z)


def reset_reacher(model: Model, given: Given) -> Callable[..., None]:
    qpos, qvel = model.qpos, model.qvel

    def reset(sim: Any, rng: Any) -> None:
        for place in range(len(sim.qpos)):
            sim.qpos[place] = rng.uniform(-0.1, 0.1) + qpos[place]
        x = rng.uniform(-0.2, 0.2)
        y = rng.uniform(-0.2, 0.2)
        while math.sqrt(x * x + y * y) >= 0.2:
            x = rng.uniform(-0.2, 0.2)
            y = rng.uniform(-0.2, 0.2)
        sim.qpos[2] = x
        sim.qpos[3] = y
        for place in range(2):
            sim.qvel[place] = qvel[place] + rng.uniform(-0.005, 0.005)
            sim.qvel[2 + place] = 0.0

    return reset


def observe_reacher(model: Model, given: Given) -> Callable[..., None]:
    fingertip, target = model.find_body("fingertip"), model.find_body("target")

    def observe(sim: Any, obs: Any, info: Any) -> None:
        for place in range(2):
            obs[place] = math.cos(sim.qpos[place])
            obs[2 + place] = math.sin(sim.qpos[place])
            obs[4 + place] = sim.qpos[2 + place]
            obs[6 + place] = sim.qvel[place]
            obs[8 + place] = sim.xpos[fingertip, place] - sim.xpos[target, place]

    return observe


def reacher(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    fingertip, target = model.find_body("fingertip"), model.find_body("target")
    distance_weight, effort_weight = given["reward_dist_weight"], F32(given["reward_control_weight"])

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        effort = effort_weight * sum_squares(action)
        info.reward_dist = -distance(sim, fingertip, target) * distance_weight
        info.reward_ctrl = -effort
        return info.reward_dist - np.float64(effort), False

    return outcome


def reset_pusher(model: Model, given: Given) -> Callable[..., None]:
    qpos, qvel = model.qpos, model.qvel

    def reset(sim: Any, rng: Any) -> None:
        num_qpos, num_qvel = len(sim.qpos), len(sim.qvel)
        for place in range(num_qpos):
            sim.qpos[place] = qpos[place]
        x = rng.uniform(-0.3, 0.0)
        y = rng.uniform(-0.2, 0.2)
        while math.sqrt(x * x + y * y) <= 0.17:
            x = rng.uniform(-0.3, 0.0)
            y = rng.uniform(-0.2, 0.2)
        sim.qpos[num_qpos - 4] = x
        sim.qpos[num_qpos - 3] = y
        sim.qpos[num_qpos - 2] = 0.0
        sim.qpos[num_qpos - 1] = 0.0
        for place in range(num_qvel):
            sim.qvel[place] = qvel[place] + rng.uniform(-0.005, 0.005) if place < num_qvel - 4 else 0.0

    return reset


def observe_pusher(model: Model, given: Given) -> Callable[..., None]:
    tip, thing, goal = model.find_body("tips_arm"), model.find_body("object"), model.find_body("goal")

    def observe(sim: Any, obs: Any, info: Any) -> None:
        for place in range(7):
            obs[place] = sim.qpos[place]
            obs[7 + place] = sim.qvel[place]
        for axis in range(3):
            obs[14 + axis] = sim.xpos[tip, axis]
            obs[17 + axis] = sim.xpos[thing, axis]
            obs[20 + axis] = sim.xpos[goal, axis]

    return observe


def pusher(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    tip, thing, goal = model.find_body("tips_arm"), model.find_body("object"), model.find_body("goal")
    distance_weight, effort_weight = given["reward_dist_weight"], F32(given["reward_control_weight"])
    near_weight = given["reward_near_weight"]

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        effort = effort_weight * sum_squares(action)
        info.reward_dist = -distance(sim, thing, goal) * distance_weight
        info.reward_near = -distance(sim, thing, tip) * near_weight
        info.reward_ctrl = -effort
        return info.reward_dist - np.float64(effort) + info.reward_near, False

    return outcome
