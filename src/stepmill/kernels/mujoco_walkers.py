"""The functions of Gymnasium's MuJoCo tasks, version 5, that move: HalfCheetah, Hopper, Walker2d, Swimmer, Ant.

`given` has the arguments of the task under Gymnasium's names. They are constants of the compiled functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stepmill.kernels.mujoco_model import F32, Given, Model, clip, make_sum, sum_squares

# ---- where a body is, for infos, and before a step ---------------------------------------------------------------------


def measure_x(model: Model, given: Given) -> Callable[..., float]:
    def measure(sim: Any) -> Any:
        return sim.qpos[0]

    return measure


def measure_xy(model: Model, given: Given) -> Callable[..., tuple[float, float]]:
    def measure(sim: Any) -> Any:
        return sim.qpos[0], sim.qpos[1]

    return measure


def inform_nothing(model: Model) -> Callable[..., None]:
    def inform(sim: Any, info: Any) -> None:
        pass

    return inform


def inform_x(model: Model) -> Callable[..., None]:
    def inform(sim: Any, info: Any) -> None:
        info.x_position = sim.qpos[0]

    return inform


def inform_xz(model: Model) -> Callable[..., None]:
    origin = float(model.qpos[1])

    def inform(sim: Any, info: Any) -> None:
        info.x_position = sim.qpos[0]
        info.z_distance_from_origin = sim.qpos[1] - origin

    return inform


def inform_xy(model: Model) -> Callable[..., None]:
    def inform(sim: Any, info: Any) -> None:
        x, y = sim.qpos[0], sim.qpos[1]
        info.x_position = x
        info.y_position = y
        info.distance_from_origin = math.sqrt(x * x + y * y)

    return inform


# ---- tasks on a plane --------------------------------------------------------------------------------------------------


def noisy_reset(model: Model, given: Given, *, is_normal: bool = False) -> Callable[..., None]:
    """Return a reset to the model's positions and speeds with noise: normal for speeds if `is_normal`, else uniform."""
    qpos, qvel, scale = model.qpos, model.qvel, given["reset_noise_scale"]

    def reset(sim: Any, rng: Any) -> None:
        for place in range(len(sim.qpos)):
            sim.qpos[place] = qpos[place] + rng.uniform(-scale, scale)
        for place in range(len(sim.qvel)):
            noise = scale * rng.normal() if is_normal else rng.uniform(-scale, scale)
            sim.qvel[place] = qvel[place] + noise

    return reset


def plain_observation(
    model: Model, given: Given, *, num_excluded: int, speed_limit: float, make_inform: Callable[..., Any]
) -> Callable[..., None]:
    """Return the function that observes clipped qvel and qpos, without `num_excluded` positions if the task says so."""
    inform = make_inform(model)
    num_skipped = num_excluded if given.get("exclude_current_positions_from_observation") else 0

    def observe(sim: Any, obs: Any, info: Any) -> None:
        inform(sim, info)
        num_kept = len(sim.qpos) - num_skipped
        for place in range(num_kept):
            obs[place] = sim.qpos[num_skipped + place]
        for place in range(len(sim.qvel)):
            obs[num_kept + place] = clip(sim.qvel[place], -speed_limit, speed_limit)

    return observe


def half_cheetah(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    dt, speed_weight, effort_weight = model.dt, given["forward_reward_weight"], F32(given["ctrl_cost_weight"])

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        info.x_velocity = (sim.qpos[0] - before) / dt
        info.reward_forward = speed_weight * info.x_velocity
        effort = effort_weight * sum_squares(action)
        info.reward_ctrl = -effort
        return info.reward_forward - np.float64(effort), False

    return outcome


def swimmer(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    dt, run = model.dt, half_cheetah(model, given)

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        info.y_velocity = (sim.qpos[1] - before[1]) / dt
        return run(sim, action, before[0], info)

    return outcome


def hopper(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    (low, high), (low_z, high_z) = given["healthy_state_range"], given["healthy_z_range"]
    low_angle, high_angle = given["healthy_angle_range"]

    def is_healthy(sim: Any) -> Any:
        is_upright = low_z < sim.qpos[1] < high_z and low_angle < sim.qpos[2] < high_angle
        for place in range(2, len(sim.qpos)):
            is_upright = is_upright and low < sim.qpos[place] < high
        for place in range(len(sim.qvel)):
            is_upright = is_upright and low < sim.qvel[place] < high
        return is_upright

    return _walk(model, given, is_healthy)


def walker2d(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    (low_z, high_z), (low_angle, high_angle) = given["healthy_z_range"], given["healthy_angle_range"]

    def is_healthy(sim: Any) -> Any:
        return low_z < sim.qpos[1] < high_z and low_angle < sim.qpos[2] < high_angle

    return _walk(model, given, is_healthy)


def _walk(model: Model, given: Given, is_healthy: Callable[..., bool]) -> Callable[..., tuple[float, bool]]:
    """Return the outcome of Hopper and Walker2d: speed less effort, and a reward for each step on its feet."""
    dt, speed_weight, effort_weight = model.dt, given["forward_reward_weight"], F32(given["ctrl_cost_weight"])
    healthy_reward, may_fall = given["healthy_reward"], not given["terminate_when_unhealthy"]

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        is_upright = is_healthy(sim)
        info.x_velocity = (sim.qpos[0] - before) / dt
        info.reward_forward = speed_weight * info.x_velocity
        info.reward_survive = healthy_reward if is_upright else 0.0
        effort = effort_weight * sum_squares(action)
        info.reward_ctrl = -effort
        return info.reward_forward + info.reward_survive - np.float64(effort), not (is_upright or may_fall)

    return outcome


# ---- Ant, and what it shares with Humanoid -----------------------------------------------------------------------------


def write_state(sim: Any, obs: Any, num_skipped: int) -> int:
    """Write qpos, without the first so many, and qvel; return where they end."""
    end = 0
    for place in range(num_skipped, len(sim.qpos)):
        obs[end] = sim.qpos[place]
        end += 1
    for value in sim.qvel:
        obs[end] = value
        end += 1
    return end


def inform_gains(model: Model, given: Given, measure: Callable[[Any], tuple[float, float]]) -> Callable[..., None]:
    """Return the function that writes the speed of what `measure` returns, and the parts of the reward."""
    dt, speed_weight, healthy_reward = model.dt, given["forward_reward_weight"], given["healthy_reward"]

    def inform(sim: Any, before: Any, info: Any, is_healthy: bool, effort: float, contact_cost: float) -> None:
        x, y = measure(sim)
        info.x_velocity = (x - before[0]) / dt
        info.y_velocity = (y - before[1]) / dt
        info.reward_forward = speed_weight * info.x_velocity
        info.reward_survive = healthy_reward if is_healthy else 0.0
        info.reward_ctrl = -effort
        info.reward_contact = -contact_cost

    return inform


def ant_position(model: Model, given: Given) -> Callable[..., tuple[float, float]]:
    body = model.find_body(given["main_body"])

    def measure(sim: Any) -> Any:
        return sim.xpos[body, 0], sim.xpos[body, 1]

    return measure


def observe_ant(model: Model, given: Given) -> Callable[..., None]:
    num_skipped = 2 if given["exclude_current_positions_from_observation"] else 0
    has_forces = given["include_cfrc_ext_in_observation"]
    low, high = given["contact_force_range"]
    inform = inform_xy(model)

    def observe(sim: Any, obs: Any, info: Any) -> None:
        inform(sim, info)
        end = write_state(sim, obs, num_skipped)
        if has_forces:
            forces = sim.cfrc_ext.reshape(sim.cfrc_ext.size)
            for place in range(6, len(forces)):
                obs[end + place - 6] = clip(forces[place], low, high)

    return observe


def ant(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    effort_weight, may_fall = F32(given["ctrl_cost_weight"]), not given["terminate_when_unhealthy"]
    contact_weight, (low, high) = given["contact_cost_weight"], given["contact_force_range"]
    (low_z, high_z), inform = given["healthy_z_range"], inform_gains(model, given, ant_position(model, given))

    def clipped_square(force: Any) -> Any:
        return clip(force, low, high) ** 2

    sum_clipped_squares = make_sum(clipped_square)

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        is_healthy = low_z <= sim.qpos[2] <= high_z
        for value in sim.qpos:
            is_healthy = is_healthy and math.isfinite(value)
        for value in sim.qvel:
            is_healthy = is_healthy and math.isfinite(value)
        contact_cost = contact_weight * sum_clipped_squares(sim.cfrc_ext.reshape(sim.cfrc_ext.size))
        effort = effort_weight * sum_squares(action)
        inform(sim, before, info, is_healthy, effort, contact_cost)
        costs = np.float64(effort) + contact_cost
        return info.reward_forward + info.reward_survive - costs, not (is_healthy or may_fall)

    return outcome
