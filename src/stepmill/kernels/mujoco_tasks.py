"""Gymnasium's MuJoCo tasks, version 5, as kernels. The simulation, and all that is computed from it, is the same to the
last bit, except the distances of Reacher and Pusher, which Gymnasium computes with BLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from stepmill.kernels import mujoco_arms as arms
from stepmill.kernels import mujoco_humanoids as humanoids
from stepmill.kernels import mujoco_walkers as walkers
from stepmill.kernels.mujoco_model import FREE, Given, Model
from stepmill.kernels.mujoco_task import MujocoKernel, MujocoTask, import_mujoco, load_model
from stepmill.kernels.python import import_numba
from stepmill.spec.errors import UsageError

Maker: TypeAlias = "Callable[[Model, Given], Callable[..., Any]]"


def measure_nothing(model: Model, given: Given) -> Callable[..., float]:
    def measure(sim: Any) -> float:
        return 0.0

    return measure


@dataclass(frozen=True)
class Recipe:
    """How the functions of a task are made, for its model and its arguments.

    Attributes:
        arguments: the arguments of Gymnasium's env, with their default values.
        reset, observe, outcome, measure: functions that make the functions of a `MujocoTask`.
        obs_size: a function that returns how many numbers an observation has.
        infos: the names of the infos.
        max_episode_steps: after this many steps an episode is truncated.
    """

    arguments: Mapping[str, object]
    reset: Maker
    observe: Maker
    outcome: Maker
    obs_size: Callable[[Model, Given], int]
    infos: tuple[str, ...]
    measure: Maker = measure_nothing
    max_episode_steps: int = 1000


# ---- sizes of observations ---------------------------------------------------------------------------------------------


def _num_positions(model: Model, given: Given, num_excluded: int) -> int:
    """Return how many positions and speeds are observed, without `num_excluded` positions if the task says so."""
    is_excluded = bool(given.get("exclude_current_positions_from_observation"))
    return len(model.qpos) + len(model.qvel) - num_excluded * is_excluded


def _ant_size(model: Model, given: Given) -> int:
    num_forces = 6 * (len(model.masses) - 1)
    return _num_positions(model, given, 2) + num_forces * bool(given["include_cfrc_ext_in_observation"])


def _humanoid_size(model: Model, given: Given) -> int:
    num_bodies = len(model.masses) - 1
    size = _num_positions(model, given, 2) + 10 * num_bodies * bool(given["include_cinert_in_observation"])
    size += 6 * num_bodies * bool(given["include_cvel_in_observation"])
    size += (len(model.qvel) - 6) * bool(given["include_qfrc_actuator_in_observation"])
    return size + 6 * num_bodies * bool(given["include_cfrc_ext_in_observation"])


# ---- the tasks ---------------------------------------------------------------------------------------------------------


def _arguments(xml: str, frame_skip: int, **others: object) -> Mapping[str, object]:
    return MappingProxyType({"xml_file": f"{xml}.xml", "frame_skip": frame_skip, **others})


def _planar(
    arguments: Mapping[str, object],
    outcome: Maker,
    *,
    infos: tuple[str, ...],
    make_inform: Callable[[Model], Callable[..., None]] = walkers.inform_x,
    num_excluded: int = 1,
    speed_limit: float = FREE,
    is_normal: bool = False,
) -> Recipe:
    """Return the recipe of a task that observes speeds, and positions except the first."""
    return Recipe(
        arguments=arguments,
        reset=partial(walkers.noisy_reset, is_normal=is_normal),
        observe=partial(
            walkers.plain_observation, num_excluded=num_excluded, speed_limit=speed_limit, make_inform=make_inform
        ),
        outcome=outcome,
        obs_size=partial(_num_positions, num_excluded=num_excluded),
        infos=infos,
        measure=walkers.measure_xy if num_excluded == 2 else walkers.measure_x,
    )


_RUN_INFOS = ("x_position", "x_velocity", "reward_forward", "reward_ctrl")
_WALK_INFOS = (*_RUN_INFOS, "z_distance_from_origin", "reward_survive")
_SWIM_INFOS = (*_RUN_INFOS, "y_position", "y_velocity", "distance_from_origin")
_HEALTH_INFOS = (*_SWIM_INFOS, "reward_contact", "reward_survive")
_TENDON_INFOS = ("tendon_length", "tendon_velocity")
_STANDUP_INFOS = (
    "x_position",
    "y_position",
    "z_distance_from_origin",
    "reward_linup",
    "reward_quadctrl",
    "reward_impact",
)

_SPEED = {"forward_reward_weight": 1.0, "exclude_current_positions_from_observation": True}
_HEALTH = {"healthy_reward": 1.0, "terminate_when_unhealthy": True}
_FALLING = {**_SPEED, **_HEALTH, "ctrl_cost_weight": 1e-3, "reset_noise_scale": 5e-3}
_INCLUDED = {
    "exclude_current_positions_from_observation": True,
    "include_cinert_in_observation": True,
    "include_cvel_in_observation": True,
    "include_qfrc_actuator_in_observation": True,
    "include_cfrc_ext_in_observation": True,
}

_RECIPES = {
    "HalfCheetah-v5": _planar(
        _arguments("half_cheetah", 5, **_SPEED, ctrl_cost_weight=0.1, reset_noise_scale=0.1),
        walkers.half_cheetah,
        infos=_RUN_INFOS,
        is_normal=True,
    ),
    "Hopper-v5": _planar(
        _arguments(
            "hopper",
            4,
            **_FALLING,
            healthy_state_range=(-100.0, 100.0),
            healthy_z_range=(0.7, FREE),
            healthy_angle_range=(-0.2, 0.2),
        ),
        walkers.hopper,
        infos=_WALK_INFOS,
        make_inform=walkers.inform_xz,
        speed_limit=10.0,
    ),
    "Walker2d-v5": _planar(
        _arguments("walker2d_v5", 4, **_FALLING, healthy_z_range=(0.8, 2.0), healthy_angle_range=(-1.0, 1.0)),
        walkers.walker2d,
        infos=_WALK_INFOS,
        make_inform=walkers.inform_xz,
        speed_limit=10.0,
    ),
    "Swimmer-v5": _planar(
        _arguments("swimmer", 4, **_SPEED, ctrl_cost_weight=1e-4, reset_noise_scale=0.1),
        walkers.swimmer,
        infos=_SWIM_INFOS,
        make_inform=walkers.inform_xy,
        num_excluded=2,
    ),
    "InvertedPendulum-v5": _planar(
        _arguments("inverted_pendulum", 2, reset_noise_scale=0.01),
        arms.inverted_pendulum,
        infos=("reward_survive",),
        make_inform=walkers.inform_nothing,
        num_excluded=0,
    ),
    "InvertedDoublePendulum-v5": Recipe(
        arguments=_arguments("inverted_double_pendulum", 5, healthy_reward=10.0, reset_noise_scale=0.1),
        reset=partial(walkers.noisy_reset, is_normal=True),
        observe=arms.observe_double_pendulum,
        outcome=arms.double_pendulum,
        obs_size=lambda model, given: 9,
        infos=("reward_survive", "distance_penalty", "velocity_penalty"),
    ),
    "Ant-v5": Recipe(
        arguments=_arguments(
            "ant",
            5,
            **_SPEED,
            **_HEALTH,
            ctrl_cost_weight=0.5,
            contact_cost_weight=5e-4,
            main_body=1,
            healthy_z_range=(0.2, 1.0),
            contact_force_range=(-1.0, 1.0),
            reset_noise_scale=0.1,
            include_cfrc_ext_in_observation=True,
        ),
        reset=partial(walkers.noisy_reset, is_normal=True),
        observe=walkers.observe_ant,
        outcome=walkers.ant,
        obs_size=_ant_size,
        infos=_HEALTH_INFOS,
        measure=walkers.ant_position,
    ),
    "Reacher-v5": Recipe(
        arguments=_arguments("reacher", 2, reward_dist_weight=1.0, reward_control_weight=1.0),
        reset=arms.reset_reacher,
        observe=arms.observe_reacher,
        outcome=arms.reacher,
        obs_size=lambda model, given: 10,
        infos=("reward_dist", "reward_ctrl"),
        max_episode_steps=50,
    ),
    "Pusher-v5": Recipe(
        arguments=_arguments("pusher_v5", 5, reward_near_weight=0.5, reward_dist_weight=1.0, reward_control_weight=0.1),
        reset=arms.reset_pusher,
        observe=arms.observe_pusher,
        outcome=arms.pusher,
        obs_size=lambda model, given: 23,
        infos=("reward_dist", "reward_ctrl", "reward_near"),
        max_episode_steps=100,
    ),
    "Humanoid-v5": Recipe(
        arguments=_arguments(
            "humanoid",
            5,
            **_INCLUDED,
            forward_reward_weight=1.25,
            ctrl_cost_weight=0.1,
            contact_cost_weight=5e-7,
            contact_cost_range=(-FREE, 10.0),
            healthy_reward=5.0,
            terminate_when_unhealthy=True,
            healthy_z_range=(1.0, 2.0),
            reset_noise_scale=1e-2,
        ),
        reset=walkers.noisy_reset,
        observe=humanoids.observe_humanoid,
        outcome=humanoids.humanoid,
        obs_size=_humanoid_size,
        infos=(*_HEALTH_INFOS, *_TENDON_INFOS),
        measure=humanoids.mass_center,
    ),
    "HumanoidStandup-v5": Recipe(
        arguments=_arguments(
            "humanoidstandup",
            5,
            **_INCLUDED,
            uph_cost_weight=1.0,  # it has no effect in Gymnasium's env either
            ctrl_cost_weight=0.1,
            impact_cost_weight=0.5e-6,
            impact_cost_range=(-FREE, 10.0),
            reset_noise_scale=1e-2,
        ),
        reset=walkers.noisy_reset,
        observe=humanoids.observe_standup,
        outcome=humanoids.humanoid_standup,
        obs_size=_humanoid_size,
        infos=(*_STANDUP_INFOS, *_TENDON_INFOS),
    ),
}
IDS = tuple(_RECIPES)


# ---- making them -------------------------------------------------------------------------------------------------------


def mujoco_arguments(id: str) -> Mapping[str, object]:  # noqa: A002  Gymnasium's name
    """Return the arguments of a task, with their default values."""
    return _RECIPES[id].arguments


def make_mujoco(id: str, arguments: Mapping[str, object]) -> MujocoKernel:  # noqa: A002
    """Return the kernel of a task.

    Raises:
        MissingExtraError: mujoco, or Numba, is not installed.
        UsageError: the model cannot be read, or does not fit the task.
    """
    recipe = _RECIPES[id]
    given: Given = {**recipe.arguments, **arguments}
    if given["frame_skip"] < 1:
        raise UsageError(f"frame_skip={given['frame_skip']} of the kernel {id} must be 1 or more")
    xml = _find_xml(given["xml_file"])
    model = _read_model(xml, given["frame_skip"])
    task = MujocoTask(
        name=id.partition("-")[0],
        xml=xml,
        frame_skip=given["frame_skip"],
        obs_size=recipe.obs_size(model, given),
        reset=recipe.reset(model, given),
        observe=recipe.observe(model, given),
        measure=recipe.measure(model, given),
        outcome=recipe.outcome(model, given),
        max_episode_steps=recipe.max_episode_steps,
        infos=_infos(id, recipe.infos, model.num_tendons),
    )
    return MujocoKernel(task)


def _infos(id: str, names: Sequence[str], num_tendons: int) -> np.dtype[Any]:  # noqa: A002
    """Return the dtype of the infos, with Gymnasium's types."""
    fields: list[Any] = []
    for name in names:
        is_float32 = name == "reward_ctrl" and not id.startswith("Humanoid")
        is_int = id == "InvertedPendulum-v5"
        if name not in _TENDON_INFOS:
            fields.append((name, "f4" if is_float32 else "i8" if is_int else "f8"))
        elif num_tendons > 0:
            fields.append((name, "f8", (num_tendons,)))
    return np.dtype(fields)


def _find_xml(name: str) -> Path:
    """Return the path of a model, which Gymnasium's tasks look for in Gymnasium's folder unless the name says where it is."""
    folder = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
    xml = Path(name).expanduser() if name.startswith((".", "/", "~")) else folder / name
    if not xml.is_file():
        raise UsageError(f"there is no model {xml}; give xml_file as a path that begins with '/', '~' or '.'")
    return xml


def _read_model(xml: Path, frame_skip: int) -> Model:
    mujoco = import_mujoco()
    import_numba()
    model = load_model(xml)
    data = mujoco.MjData(model)
    return Model(
        qpos=data.qpos.copy(),
        qvel=data.qvel.copy(),
        timestep=float(model.opt.timestep),
        dt=float(model.opt.timestep * frame_skip),
        masses=model.body_mass.copy(),
        bodies=tuple(model.body(body).name for body in range(model.nbody)),
        num_tendons=int(model.ntendon),
    )
