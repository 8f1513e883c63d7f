"""Kernels over MuJoCo: the threads call `mj_step` of the user's own `mujoco` package, and the compiled functions of a task.

    state    addresses of the model, which all envs share, of the env's own mjData, and of its arrays
    reset    mj_resetData · the task's `reset` writes qpos and qvel · mj_forward
    step     ctrl = action · mj_step, frame_skip times · mj_rnePostConstraint · the task's `outcome`

Gymnasium's MujocoEnv does the same in the same order. A simulation that diverges is a fault of its env.

A snapshot contains MuJoCo's own state of the simulation, and the arrays that tasks read. These have their values from
before the last integration, so they cannot be computed from the state. A snapshot contains no addresses.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from stepmill.kernels.env import KernelEnv
from stepmill.kernels.python import PythonKernel
from stepmill.kernels.row_layouts import check_infos
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.kernel import OutsideMemory

_FUNCTIONS = ("mj_resetData", "mj_forward", "mj_step", "mj_rnePostConstraint")
_FORGETFUL = ("mjENBL_SLEEP", "mjENBL_IPC")
_FATAL = ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")


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
    ten_length: Any
    ten_velocity: Any


_ARRAYS = Sim._fields
_DERIVED = _ARRAYS[3:]  # mj_step computes these; the others are MuJoCo's state
_STATE = np.dtype([(name, "u8") for name in ("model", "data", "warnings", *_FUNCTIONS, *_ARRAYS)])


@dataclass(frozen=True)
class MujocoTask:
    """The functions and numbers that make an env of a simulation.

    Attributes:
        name: the name of the task.
        xml: the path of the model.
        frame_skip: the number of calls of mj_step in a step.
        obs_size: the number of values in an observation.
        reset: `reset(sim, rng)` writes qpos and qvel, which have the model's own values before.
        observe: `observe(sim, obs)` writes the observation.
        measure: `measure(sim)` returns a number from before the step, which `outcome` gets.
        outcome: `outcome(sim, action, measured)` returns (reward, terminated).
        max_episode_steps: after this many steps an episode is truncated.
        infos: a structured dtype of numbers and arrays of numbers, as for `stepmill.kernel`. `observe` and `outcome` then get
            one argument more, `info`: a record with these fields, all zero before a reset or step.
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
    infos: Any = None


class Simulation(NamedTuple):
    """The mjData of one env, and its model. `library` has MuJoCo's functions."""

    data: Any
    model: Any
    library: ctypes.CDLL

    def describe(self) -> OutsideMemory:
        """Return everything that the next step depends on: MuJoCo's state, with warm starts of solvers, and other arrays."""
        mujoco = import_mujoco()
        kind, last = mujoco.mjtState.mjSTATE_INTEGRATION, self.data.warning.lastinfo
        arrays = [getattr(self.data, name) for name in _DERIVED]
        spans = [(array.ctypes.data, array.nbytes) for array in arrays if array.nbytes]
        spans.append((last.ctypes.data, last.strides[0] * len(last)))  # whether the simulation has diverged
        size_bytes = 8 * mujoco.mj_stateSize(self.model, kind) + sum(size for _, size in spans)
        functions = _address(self.library.mj_getState), _address(self.library.mj_setState)
        return *functions, self.model._address, self.data._address, int(kind), size_bytes, spans

    def check(self) -> None:
        """Check that MuJoCo's state is all that the model remembers.

        Raises:
            UsageError: the model has a mode in which MuJoCo has memory that its state does not include.
        """
        if self.model.opt.enableflags & _forgetful_bits():
            raise UsageError(
                "models that enable sleep or ipc have no snapshots, because MuJoCo's states leave out some of their "
                "memory; disable these options in the XML"
            )


class MujocoKernel(PythonKernel):
    """The kernel of a task.

    Attributes:
        task: the task.
    """

    def __init__(self, task: MujocoTask) -> None:
        self.task = task
        mujoco = import_mujoco()
        self._model = load_model(task.xml)
        shapes = tuple(tuple(getattr(mujoco.MjData(self._model), name).shape) for name in _ARRAYS)
        fatal = tuple(int(getattr(mujoco.mjtWarning, name)) for name in _FATAL)
        num_warnings = int(mujoco.mjtWarning.mjNWARNING)
        functions = _functions(task, shapes, (fatal, num_warnings))
        super().__init__(
            type(task.name, (), {**functions, "__module__": __name__, "__doc__": f"{task.name}."}),
            (_box(task.obs_size), _action_space(self._model)),
            _STATE,
            task.max_episode_steps,
            infos=check_infos(task.infos, task.name),
            is_debug=False,
        )
        self.saved_bytes = 0  # the state consists of addresses
        self.identity = _digest(self._model)

    def __reduce__(self) -> tuple[Callable[..., PythonKernel], tuple[Any, ...]]:
        return super().__reduce__() if self.find_again is not None else (MujocoKernel, (self.task,))

    def __call__(self, *, compiled: bool = True) -> KernelEnv:
        """Return one env, for any backend except "kernel". It is always compiled."""
        env = super().__call__(compiled=True)
        env.kept = self.prepare(env.memory.record)  # type: ignore[attr-defined]
        return env

    def prepare(self, state: Any) -> Simulation:
        """Make the simulation of one env, and write its addresses to `state`. It lives as long as the result."""
        mujoco = import_mujoco()
        data = mujoco.MjData(self._model)
        state["model"], state["data"] = self._model._address, data._address
        state["warnings"] = data.warning.lastinfo.ctypes.data
        for name in _ARRAYS:
            state[name] = getattr(data, name).ctypes.data
        for name in _FUNCTIONS:
            state[name] = _address(getattr(self._library, name))
        return Simulation(data, self._model, self._library)

    @cached_property
    def _library(self) -> ctypes.CDLL:
        folder = Path(import_mujoco().__file__).parent
        return ctypes.CDLL(str(next(folder.glob("libmujoco.so*"))))


def import_mujoco() -> Any:
    """Return the mujoco package.

    Raises:
        MissingExtraError: it is not installed.
    """
    with needs_extra("mujoco", "mujoco"):
        return import_module("mujoco")


@cache
def _forgetful_bits() -> int:
    bits = [int(getattr(import_mujoco().mjtEnableBit, name, 0)) for name in _FORGETFUL]
    return bits[0] | bits[1]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def load_model(xml: Path) -> Any:
    """Return a model that is not shared.

    A file that refers to no others is compiled once in a process, because MuJoCo prints its deprecations each time.

    Raises:
        UsageError: the file cannot be read, or is not a model.
    """
    try:
        content = Path(xml).read_bytes()
    except OSError as exc:
        raise UsageError(f"the model {xml} cannot be read: {exc}") from exc
    if re.search(rb"file\s*=", content):
        return _compile_model(str(xml))
    return copy.copy(_compile_once(str(xml), content))


def _compile_model(xml: str) -> Any:
    try:
        return import_mujoco().MjModel.from_xml_path(xml)
    except ValueError as exc:
        raise UsageError(f"MuJoCo cannot read the model {xml}: {exc}") from exc


@cache
def _compile_once(xml: str, content: bytes) -> Any:
    return _compile_model(xml)


def _digest(model: Any) -> str:
    """Return a digest of a model as MuJoCo saves it."""
    mujoco = import_mujoco()
    content = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, content)
    return hashlib.sha256(content.tobytes()).hexdigest()


def _box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float64)


def _action_space(model: Any) -> spaces.Box:
    low, high = model.actuator_ctrlrange.copy().astype(np.float32).T
    return spaces.Box(low, high, dtype=np.float32)


def _functions(task: MujocoTask, shapes: tuple[Any, ...], warnings: tuple[Any, int]) -> dict[str, Callable[..., Any]]:
    """Return `reset` and `step` of the kernel of a task."""
    memory = import_module("stepmill.kernels.numba_memory")
    call, view, numbers = memory.call, memory.view, memory.view_int32
    task_reset, measure, (observe, outcome) = task.reset, task.measure, _with_info(task)
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
            view(state.ten_length, shapes[11]),
            view(state.ten_velocity, shapes[12]),
        )

    def reset(state: Any, rng: Any, obs: Any, info: Any) -> None:
        sim = make_sim(state)
        call(state.mj_resetData, state.model, state.data)
        task_reset(sim, rng)
        call(state.mj_forward, state.model, state.data)
        observe(sim, obs, info)

    def step(state: Any, action: Any, rng: Any, obs: Any, info: Any) -> tuple[float, bool, bool]:
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
        reward, terminated = outcome(sim, action, measured, info)
        observe(sim, obs, info)
        return reward, terminated, False

    return {"reset": reset, "step": step} if task.infos is not None else _without_info(reset, step)


def _with_info(task: MujocoTask) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `observe` and `outcome` of a task as functions that take an info, which is ignored if the task has none."""
    plain_observe, plain_outcome = task.observe, task.outcome

    def observe(sim: Any, obs: Any, info: Any) -> None:
        plain_observe(sim, obs)

    def outcome(sim: Any, action: Any, measured: Any, info: Any) -> tuple[float, bool]:
        return plain_outcome(sim, action, measured)

    return (observe, outcome) if task.infos is None else (plain_observe, plain_outcome)


def _without_info(inner_reset: Callable[..., Any], inner_step: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    def reset(state: Any, rng: Any, obs: Any) -> None:
        inner_reset(state, rng, obs, None)

    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return inner_step(state, action, rng, obs, None)

    return {"reset": reset, "step": step}
