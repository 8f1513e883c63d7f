"""Kernels over MuJoCo: the threads call `mj_step` of the user's own `mujoco` package, and the compiled functions of a task.

    state    addresses: of the model, which all envs share, of the env's own mjData, of the arrays in it
    reset    mj_resetData · the task's `reset` writes qpos and qvel · mj_forward
    step     ctrl = action · mj_step, frame_skip times · mj_rnePostConstraint · the task's `outcome`

That is what Gymnasium's MujocoEnv does, in this order. A simulation that diverges is a fault of its env.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from stepmill.kernels.env import KernelEnv
from stepmill.kernels.python import PythonKernel
from stepmill.spec.errors import MissingExtraError

_FUNCTIONS = ("mj_resetData", "mj_forward", "mj_step", "mj_rnePostConstraint")
_ARRAYS = (
    *("qpos", "qvel", "ctrl", "xpos", "xipos", "site_xpos"),
    *("cfrc_ext", "cinert", "cvel", "qfrc_actuator", "qfrc_constraint"),
)
_FATAL = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")
_STATE = np.dtype([(name, "u8") for name in ("model", "data", "warnings", *_FUNCTIONS, *_ARRAYS)])


class Sim(NamedTuple):
    """The arrays of an env's mjData that tasks read, and of which they write qpos and qvel in `reset`."""

    qpos: Any
    qvel: Any
    ctrl: Any
    xpos: Any
    xipos: Any
    site_xpos: Any
    cfrc_ext: Any
    cinert: Any
    cvel: Any
    qfrc_actuator: Any
    qfrc_constraint: Any


@dataclass(frozen=True)
class MujocoTask:
    """What makes a simulation an env.

    Attributes:
        name: of the task.
        xml: path of the model.
        frame_skip: calls of mj_step in a step.
        obs_size: numbers in an observation.
        reset: `reset(sim, rng)` writes qpos and qvel, which are the model's own before.
        observe: `observe(sim, obs)` writes the observation.
        measure: `measure(sim)` returns a number from before the step, which `outcome` gets.
        outcome: `outcome(sim, action, measured)` returns (reward, terminated).
        max_episode_steps: after this many steps an episode is truncated.
    """

    name: str
    xml: Path
    frame_skip: int
    obs_size: int
    reset: Callable[..., None]
    observe: Callable[..., None]
    measure: Callable[..., float]
    outcome: Callable[..., tuple[float, bool]]
    max_episode_steps: int = 1000


class MujocoKernel(PythonKernel):
    """The kernel of a task.

    Attributes:
        task: the task.
    """

    def __init__(self, task: MujocoTask) -> None:
        self.task = task
        mujoco = import_mujoco()
        self._model = mujoco.MjModel.from_xml_path(str(task.xml))
        shapes = tuple(tuple(getattr(mujoco.MjData(self._model), name).shape) for name in _ARRAYS)
        fatal = tuple(int(getattr(mujoco.mjtWarning, name)) for name in _FATAL)
        num_warnings = int(mujoco.mjtWarning.mjNWARNING)
        functions = _functions(task, shapes, (fatal, num_warnings))
        super().__init__(
            type(task.name, (), {**functions, "__module__": __name__, "__doc__": f"{task.name}."}),
            (_box(task.obs_size), _action_space(self._model)),
            _STATE,
            task.max_episode_steps,
            is_debug=False,
        )

    def __reduce__(self) -> tuple[type[MujocoKernel], tuple[MujocoTask]]:
        return MujocoKernel, (self.task,)

    def __call__(self, *, compiled: bool = True) -> KernelEnv:
        """Return one env, for any backend but "kernel"; it is always compiled."""
        env = super().__call__(compiled=True)
        env.kept = self.prepare(env.memory.record)  # type: ignore[attr-defined]
        return env

    def prepare(self, state: Any) -> object:
        """Make the simulation of one env, and write its addresses; it lives as long as what is returned."""
        mujoco = import_mujoco()
        data = mujoco.MjData(self._model)
        state["model"], state["data"] = self._model._address, data._address
        state["warnings"] = data.warning.lastinfo.ctypes.data
        for name in _ARRAYS:
            state[name] = getattr(data, name).ctypes.data
        for name in _FUNCTIONS:
            state[name] = ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value
        return data, self._model

    @cached_property
    def _library(self) -> ctypes.CDLL:
        folder = Path(import_mujoco().__file__).parent
        return ctypes.CDLL(str(next(folder.glob("libmujoco.so*"))))


def import_mujoco() -> Any:
    """Return the mujoco package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module("mujoco")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(module="mujoco", extra="mujoco") from exc


def _box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float64)


def _action_space(model: Any) -> spaces.Box:
    low, high = model.actuator_ctrlrange.copy().astype(np.float32).T
    return spaces.Box(low, high, dtype=np.float32)


def _functions(task: MujocoTask, shapes: tuple[Any, ...], warnings: tuple[Any, int]) -> dict[str, Callable[..., Any]]:
    """Return `reset` and `step` of the kernel of a task."""
    memory = import_module("stepmill.kernels.numba_memory")
    call, view, numbers = memory.call, memory.view, memory.view_int32
    task_reset, observe, measure, outcome = task.reset, task.observe, task.measure, task.outcome
    frame_skip = task.frame_skip
    fatal, num_warnings = warnings

    def make_sim(state: Any) -> Sim:
        return Sim(
            view(state.qpos, shapes[0]),
            view(state.qvel, shapes[1]),
            view(state.ctrl, shapes[2]),
            view(state.xpos, shapes[3]),
            view(state.xipos, shapes[4]),
            view(state.site_xpos, shapes[5]),
            view(state.cfrc_ext, shapes[6]),
            view(state.cinert, shapes[7]),
            view(state.cvel, shapes[8]),
            view(state.qfrc_actuator, shapes[9]),
            view(state.qfrc_constraint, shapes[10]),
        )

    def reset(state: Any, rng: Any, obs: Any) -> None:
        sim = make_sim(state)
        call(state.mj_resetData, state.model, state.data)
        task_reset(sim, rng)
        call(state.mj_forward, state.model, state.data)
        observe(sim, obs)

    def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
        sim = make_sim(state)
        measured = measure(sim)
        for place in range(len(action)):
            sim.ctrl[place] = action[place]
        for _ in range(frame_skip):
            call(state.mj_step, state.model, state.data)
        call(state.mj_rnePostConstraint, state.model, state.data)
        found = numbers(state.warnings, (num_warnings, 2))
        if found[fatal[0], 1] + found[fatal[1], 1] + found[fatal[2], 1] > 0:
            raise ValueError("the simulation has diverged")
        reward, terminated = outcome(sim, action, measured)
        observe(sim, obs)
        return reward, terminated, False

    return {"reset": reset, "step": step}
