"""The functions of Gymnasium's MuJoCo tasks Humanoid and HumanoidStandup, version 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepmill.kernels.mujoco_model import Given, Model, clip, sum_squares
from stepmill.kernels.mujoco_walkers import inform_gains, inform_xy, write_state


def observe_humanoid(
    model: Model, given: Given, make_inform: Callable[..., Callable[..., None]] = inform_xy
) -> Callable[..., None]:
    inform, inform_tendons = make_inform(model), _inform_tendons if model.num_tendons else _inform_nothing
    num_skipped = 2 if given["exclude_current_positions_from_observation"] else 0
    has_inertia, has_speeds = given["include_cinert_in_observation"], given["include_cvel_in_observation"]
    has_actuators, has_forces = given["include_qfrc_actuator_in_observation"], given["include_cfrc_ext_in_observation"]

    def observe(sim: Any, obs: Any, info: Any) -> None:
        inform(sim, info)
        inform_tendons(sim, info)
        end = write_state(sim, obs, num_skipped)
        if has_inertia:
            end = _write_rows(sim.cinert, obs, end)
        if has_speeds:
            end = _write_rows(sim.cvel, obs, end)
        if has_actuators:
            for place in range(6, len(sim.qfrc_actuator)):
                obs[end] = sim.qfrc_actuator[place]
                end += 1
        if has_forces:
            _write_rows(sim.cfrc_ext, obs, end)

    return observe


def _inform_tendons(sim: Any, info: Any) -> None:
    for tendon in range(len(sim.ten_length)):
        info.tendon_length[tendon] = sim.ten_length[tendon]
        info.tendon_velocity[tendon] = sim.ten_velocity[tendon]


def _inform_nothing(sim: Any, info: Any) -> None:
    pass


def observe_standup(model: Model, given: Given) -> Callable[..., None]:
    return observe_humanoid(model, given, inform_xyz)


def inform_xyz(model: Model) -> Callable[..., None]:
    origin = float(model.qpos[2])

    def inform(sim: Any, info: Any) -> None:
        info.x_position = sim.qpos[0]
        info.y_position = sim.qpos[1]
        info.z_distance_from_origin = sim.qpos[2] - origin

    return inform


def _write_rows(rows: Any, obs: Any, start: int) -> int:
    """Write the rows of all bodies but the world, and return where they end."""
    end = start
    for body in range(1, len(rows)):
        for value in rows[body]:
            obs[end] = value
            end += 1
    return end


def mass_center(model: Model, given: Given) -> Callable[..., tuple[float, float]]:
    """Return the function that measures x and y of the center of mass, with sums in the order of NumPy's einsum."""
    masses, total = model.masses, float(model.masses.sum())

    def measure(sim: Any) -> tuple[float, float]:
        x = y = 0.0
        for body in range(len(masses)):
            x += masses[body] * sim.xipos[body, 0]
            y += masses[body] * sim.xipos[body, 1]
        return x / total, y / total

    return measure


def humanoid(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    inform, (low_z, high_z) = inform_gains(model, given, mass_center(model, given)), given["healthy_z_range"]
    effort_weight, may_fall = given["ctrl_cost_weight"], not given["terminate_when_unhealthy"]
    contact_weight, (low, high) = given["contact_cost_weight"], given["contact_cost_range"]

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        is_healthy = low_z < sim.qpos[2] < high_z
        contact_cost = clip(contact_weight * sum_squares(sim.cfrc_ext.reshape(sim.cfrc_ext.size)), low, high)
        effort = effort_weight * sum_squares(sim.ctrl)
        inform(sim, before, info, is_healthy, effort, contact_cost)
        return info.reward_forward + info.reward_survive - (effort + contact_cost), not (is_healthy or may_fall)

    return outcome


def humanoid_standup(model: Model, given: Given) -> Callable[..., tuple[float, bool]]:
    timestep, effort_weight = model.timestep, given["ctrl_cost_weight"]
    impact_weight, (low, high) = given["impact_cost_weight"], given["impact_cost_range"]

    def outcome(sim: Any, action: Any, before: Any, info: Any) -> tuple[float, bool]:
        impact_cost = clip(impact_weight * sum_squares(sim.cfrc_ext.reshape(sim.cfrc_ext.size)), low, high)
        effort = effort_weight * sum_squares(sim.ctrl)
        info.reward_linup = sim.qpos[2] / timestep
        info.reward_quadctrl = -effort
        info.reward_impact = -impact_cost
        return info.reward_linup - effort - impact_cost + 1.0, False

    return outcome
