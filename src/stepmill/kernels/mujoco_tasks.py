"""Gymnasium's MuJoCo tasks, version 5, as kernels. The simulation, and what is computed from it, is the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium

from stepmill.kernels import mujoco_arms as arms
from stepmill.kernels import mujoco_walkers as walkers
from stepmill.kernels.mujoco_model import FREE, Model
from stepmill.kernels.mujoco_task import MujocoKernel, MujocoTask, import_mujoco
from stepmill.kernels.python import import_numba


def nothing(sim: Any) -> float:
    return 0.0


@dataclass(frozen=True)
class Recipe:
    """How the functions of a task are made, for its model.

    Attributes:
        xml: name of the model's file.
        frame_skip: calls of mj_step in a step.
        obs_size: numbers in an observation.
        reset, outcome: make the functions of a `MujocoTask`.
        observe: is that function, or makes it.
        measure: makes what `outcome` gets of the time before the step.
        max_episode_steps: after this many steps an episode is truncated.
    """

    xml: str
    frame_skip: int
    obs_size: int
    reset: Callable[[Model], Callable[..., None]]
    observe: Callable[[Model], Callable[..., None]]
    outcome: Callable[[Model], Callable[..., tuple[float, bool]]]
    measure: Callable[[Model], Callable[..., float]] = field(default=lambda model: nothing)
    max_episode_steps: int = 1000


# ---- making them -------------------------------------------------------------------------------------------------------


def _planar(xml: str, frame_skip: int, obs_size: int, scale: float, outcome: Any, **how: Any) -> Recipe:
    """Return the recipe of a task that observes positions, but for the first, and speeds."""
    return Recipe(
        xml=xml,
        frame_skip=frame_skip,
        obs_size=obs_size,
        reset=partial(walkers.noisy_reset, scale=scale, is_normal=how.get("is_normal", False)),
        observe=partial(
            walkers.plain_observation, num_skipped=how.get("num_skipped", 1), speed_limit=how.get("speed_limit", FREE)
        ),
        outcome=outcome,
        measure=lambda model: walkers.x_position,
    )


_RECIPES = {
    "HalfCheetah-v5": _planar("half_cheetah", 5, 17, 0.1, walkers.half_cheetah, is_normal=True),
    "Hopper-v5": _planar("hopper", 4, 11, 5e-3, walkers.hopper, speed_limit=10.0),
    "Walker2d-v5": _planar("walker2d_v5", 4, 17, 5e-3, walkers.walker2d, speed_limit=10.0),
    "Swimmer-v5": _planar("swimmer", 4, 8, 0.1, walkers.swimmer, num_skipped=2),
    "InvertedPendulum-v5": _planar("inverted_pendulum", 2, 4, 0.01, arms.inverted_pendulum, num_skipped=0),
    "InvertedDoublePendulum-v5": Recipe(
        xml="inverted_double_pendulum",
        frame_skip=5,
        obs_size=9,
        reset=partial(walkers.noisy_reset, scale=0.1, is_normal=True),
        observe=lambda model: arms.observe_double_pendulum,
        outcome=arms.double_pendulum,
    ),
    "Ant-v5": Recipe(
        xml="ant",
        frame_skip=5,
        obs_size=105,
        reset=partial(walkers.noisy_reset, scale=0.1, is_normal=True),
        observe=lambda model: walkers.observe_ant,
        outcome=walkers.ant,
        measure=lambda model: walkers.ant_position,
    ),
    "Reacher-v5": Recipe(
        "reacher", 2, 10, arms.reset_reacher, arms.observe_reacher, arms.reacher, max_episode_steps=50
    ),
    "Pusher-v5": Recipe("pusher_v5", 5, 23, arms.reset_pusher, arms.observe_pusher, arms.pusher, max_episode_steps=100),
    "Humanoid-v5": Recipe(
        xml="humanoid",
        frame_skip=5,
        obs_size=348,
        reset=partial(walkers.noisy_reset, scale=1e-2),
        observe=lambda model: walkers.observe_humanoid,
        outcome=walkers.humanoid,
        measure=walkers.mass_center,
    ),
    "HumanoidStandup-v5": Recipe(
        xml="humanoidstandup",
        frame_skip=5,
        obs_size=348,
        reset=partial(walkers.noisy_reset, scale=1e-2),
        observe=lambda model: walkers.observe_humanoid,
        outcome=walkers.humanoid_standup,
    ),
}
IDS = tuple(_RECIPES)


@cache
def make_mujoco(id: str) -> MujocoKernel:  # noqa: A002  Gymnasium's name
    """Return the kernel of a task.

    Raises:
        MissingExtraError: mujoco, or Numba, is not installed.
    """
    recipe = _RECIPES[id]
    xml = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / f"{recipe.xml}.xml"
    model = _read_model(xml, recipe.frame_skip)
    task = MujocoTask(
        name=id.partition("-")[0],
        xml=xml,
        frame_skip=recipe.frame_skip,
        obs_size=recipe.obs_size,
        reset=recipe.reset(model),
        observe=recipe.observe(model),
        measure=recipe.measure(model),
        outcome=recipe.outcome(model),
        max_episode_steps=recipe.max_episode_steps,
    )
    return MujocoKernel(task)


def _read_model(xml: Path, frame_skip: int) -> Model:
    mujoco = import_mujoco()
    import_numba()
    model = mujoco.MjModel.from_xml_path(str(xml))
    data = mujoco.MjData(model)
    return Model(
        qpos=data.qpos.copy(),
        qvel=data.qvel.copy(),
        timestep=float(model.opt.timestep),
        dt=float(model.opt.timestep * frame_skip),
        masses=model.body_mass.copy(),
        bodies={model.body(body).name: body for body in range(model.nbody)},
    )
