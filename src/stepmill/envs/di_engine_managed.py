"""The worker's side of a DI-engine manager: each env is wrapped in a `ManagedEnv`, which adapts its steps to the hot loop.

The manager rebuilds each timestep exactly. Observations are arrays as their space says, or opaque. Actions are opaque,
so the env gets the object that the user passed. Rewards lie in the slab as float64; their class, dtype and shape are
part of the `TimestepFormat`, which is sent with the first step and whenever it changes. A timestep that fits no format
(abnormal, or with a reward of several numbers) is sent whole, in the info.

    info for the engine ─ {}                                          the env's info was {}, and the format is unchanged
                        └ {TIMESTEP_KEY: (info, format, whole)}       format, whole or both are None
    whole = (class, whether the observation is sent in here, that observation, reward, done, further fields)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType, MethodType
from typing import Any

import numpy as np

from stepmill.envs import Steppable
from stepmill.envs.agent_stacking import zeros
from stepmill.envs.di_engine import BaseEnvTimestep, as_ding_env, dump_spaces, seed_env, tree_of_any
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Opaque

TIMESTEP_KEY = "di"  # in the engine's info; see the module
_EXACT = 2**53  # integers up to here are exact as float64
_NATIVE_KINDS = "fiub"

TimestepFormat = tuple[Any, ...]
"""Class of a timestep (None is `timestep_class()`), of its `done`, of its reward; dtype and shape of the reward."""


@dataclass(frozen=True, kw_only=True)
class ManagedSettings:
    """A manager's settings for its envs.

    Attributes:
        shared_memory: whether observations lie in the slab, as their space says. Otherwise they are opaque.
        step_tries: how often a step that raises is tried, including the first time.
        step_timeout_s, reset_timeout_s: limits that SIGALRM enforces, for envs that run in the caller's thread.
        is_process: whether the worker is a process, which is named after the env.
    """

    shared_memory: bool = True
    step_tries: int = 1
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None
    is_process: bool = True


@dataclass(frozen=True)
class ManagedEnvMaker:
    """An env_fn of the pool: makes the user's env, wrapped in a ManagedEnv.

    Attributes:
        sink: receives the user's env under its env_id, on the serial backend; None elsewhere.
    """

    env_fn: Callable[[], object]
    env_id: int
    settings: ManagedSettings
    sink: MutableMapping[int, object] | None = None

    def __call__(self) -> ManagedEnv:
        if self.settings.is_process:
            multiprocessing.current_process().name = f"subprocess_env_manager{self.env_id}_{time.time()}"
        return ManagedEnv(self)

    def make(self) -> Any:
        """Return a new env of the user's function."""
        env = as_ding_env(self.env_fn())
        if self.sink is not None:
            self.sink[self.env_id] = env
        return env


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a managed env."""
    assert isinstance(env, ManagedEnv)
    return EnvSpec(
        observation=tree_of_any(env.spaces[0]) if env.settings.shared_memory else Opaque(),
        action=Opaque(),
        spaces=dump_spaces(env.spaces),
    )


def adapt(env: object) -> Steppable:
    """Return the managed env itself, which has the engine's API."""
    assert isinstance(env, ManagedEnv)
    return env


class ManagedEnv:
    """One env of a manager, in the engine's API.

    Options of a reset:
    - "param": keyword arguments of the env's `reset`, also for later automatic resets. None means no arguments.
    - "seed": (seed, dynamic_seed or None), which is passed to the env before the reset.
    - "renew": whether the env is replaced by a new one before the reset.
    """

    def __init__(self, maker: ManagedEnvMaker) -> None:
        self._maker = maker
        self.settings = maker.settings
        self.env = maker.make()
        self.spaces = self._read_spaces()
        self._param: Mapping[str, Any] | None = {}
        self._replay_path: str | None = None
        self._last_format: TimestepFormat | None = None
        self._do_step: Callable[[Any], Any] = self._step_env if self._is_plain else self._step_guarded

    @property
    def _is_plain(self) -> bool:
        return self.settings.step_tries <= 1 and self.settings.step_timeout_s is None

    def _read_spaces(self) -> tuple[object, object, object]:
        try:
            found = _spaces_of(self.env)
        except Exception:
            found = None
        if found is not None and found[0] is not None:
            return found
        # Some envs have their spaces only after a reset. The env is then replaced, so that this reset does not count.
        self.env.reset()
        found = _spaces_of(self.env)
        self.env.close()
        self.env = self._maker.make()
        return found

    # ---- the engine's API ----------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[object, dict[Any, Any]]:
        """Begin an episode."""
        given = options or {}
        if given.get("renew"):
            self._replace_env()
        if "param" in given:
            self._param = given["param"]
        with time_limit(self.settings.reset_timeout_s, "reset"):
            if given.get("seed") is not None:
                seed_env(self.env, *given["seed"])
            return self.env.reset(**(self._param or {})), {}

    def step(self, action: Any) -> tuple[object, object, object, object, dict[Any, Any]]:
        """Step the env. Hot path."""
        timestep = self._do_step(action)
        obs, reward, done, info, *extra = timestep
        step_format = (
            timestep.__class__,
            done.__class__,
            reward.__class__,
            getattr(reward, "dtype", None),
            getattr(reward, "shape", None),
        )
        is_known = step_format == self._last_format
        if not extra and (is_known or _is_native(step_format)) and _is_regular(obs, reward, step_format, info):
            sent = None if is_known else (sent_class(step_format), *step_format[1:])
            self._last_format = step_format
            is_told = is_known and not info and info.__class__ is dict
            value = float(reward if step_format[4] is None else reward.item())
            return obs, value, done, False, {} if is_told else {TIMESTEP_KEY: (info, sent, None)}
        self._last_format = None
        is_bad = is_abnormal(info)
        is_obs_inside = obs is None or is_bad  # an abnormal timestep's observation may not be of the space
        whole = (sent_class(step_format), is_obs_inside, obs if is_obs_inside else None, reward, done, tuple(extra))
        is_over = not is_bad and isinstance(done, (bool, np.bool_)) and bool(done)
        return self._blank_obs() if is_obs_inside else obs, 0.0, is_over, False, {TIMESTEP_KEY: (info, None, whole)}

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    # ---- calls ---------------------------------------------------------------------------------------------------

    def look_up(self, name: str, method_names: list[str]) -> tuple[str, object]:
        """Look up an attribute of the env.

        Returns:
            ("value", the attribute), ("missing", repr of the env's class), ("callable", None) for a method that is one of
            `method_names`, or ("method", None) for another method.
        """
        if not hasattr(self.env, name):
            return "missing", repr(type(self.env))
        value = getattr(self.env, name)
        if isinstance(value, MethodType):
            return ("callable" if name in method_names else "method"), None
        return "value", value

    def command(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], method_names: list[str]) -> object:
        """Call a method of the env.

        Raises:
            KeyError: the name is not one of `method_names`.
        """
        if name not in method_names:
            raise KeyError(f"not support env cmd: {name}")
        return getattr(self.env, name)(*args, **kwargs)

    def frame(self, render_mode: str) -> object:
        """Render the env."""
        return render_frame(self.env, render_mode)

    @property
    def replay_path(self) -> str | None:
        """The folder where the env saves replays. Setting it enables them, also on an env that replaces this one."""
        return self._replay_path

    @replay_path.setter
    def replay_path(self, path: str | None) -> None:
        self._replay_path = path
        if path is not None:
            self.env.enable_save_replay(path)

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _replace_env(self) -> None:
        with contextlib.suppress(Exception):  # the env is replaced because it failed, and may fail in close() too
            self.env.close()
        self.env = self._maker.make()
        self._last_format = None
        self.replay_path = self._replay_path

    def _step_env(self, action: Any) -> Any:
        return self.env.step(action)

    def _step_guarded(self, action: Any) -> Any:
        for left in reversed(range(self.settings.step_tries)):
            try:
                with time_limit(self.settings.step_timeout_s, "step"):
                    return self.env.step(action)
            except Exception:
                if left == 0:
                    raise
        raise AssertionError("step_tries is at least 1")

    def _blank_obs(self) -> object:
        return zeros(tree_of_any(self.spaces[0])) if self.settings.shared_memory else None


def render_frame(env: Any, render_mode: str) -> object:
    """Render `env._env`, as DI-engine does. If it has a simulator, return the simulator's image."""
    inner = getattr(env, "_env", env)
    if hasattr(inner, "sim"):
        return inner.sim.render(camera_name="track", height=128, width=128)[::-1]
    try:
        return inner.render(mode=render_mode)
    except TypeError:  # Gymnasium's `render` has no parameter `mode`: the mode is chosen when the env is made
        return inner.render()


def is_abnormal(info: object) -> bool:
    """Whether an env has marked its timestep as abnormal.

    Raises:
        TypeError: info is neither a dict nor a list or tuple of them.
    """
    if isinstance(info, Mapping):
        return bool(info.get("abnormal", False))
    if isinstance(info, (list, tuple)):
        return any(bool(one.get("abnormal", False)) for one in info[:2])
    raise TypeError(f"invalid env timestep type: {type(info)}")


def _is_regular(obs: object, reward: Any, step_format: TimestepFormat, info: object) -> bool:
    if obs is None or (info and is_abnormal(info)):
        return False
    if info.__class__ is not dict and not isinstance(info, (dict, list, tuple)):
        raise TypeError(f"invalid env timestep type: {type(info)}")
    is_integer = step_format[2] is int or (step_format[3] is not None and step_format[3].kind in "iu")
    return not is_integer or -_EXACT <= int(reward if step_format[4] is None else reward.item()) <= _EXACT


def sent_class(step_format: TimestepFormat) -> type[Any] | None:
    """Return the class of a timestep for sending. None stands for `timestep_class()` in the receiving process."""
    return None if step_format[0] is BaseEnvTimestep else step_format[0]


def _is_native(step_format: TimestepFormat) -> bool:
    """Whether a reward of this format can be rebuilt exactly from a float64."""
    _, done_class, reward_class, dtype, shape = step_format
    if done_class not in (bool, np.bool_):
        return False
    if dtype is None:
        return reward_class in (float, int, bool)
    is_plain = isinstance(dtype, np.dtype) and dtype.kind in _NATIVE_KINDS and dtype.itemsize <= 8
    is_numpy = reward_class is np.ndarray or issubclass(reward_class, np.generic)
    return is_plain and is_numpy and int(np.prod(shape)) == 1


def _spaces_of(env: Any) -> tuple[object, object, object]:
    return env.observation_space, env.action_space, getattr(env, "reward_space", None)


@contextlib.contextmanager
def time_limit(timeout_s: float | None, phase: str) -> Iterator[None]:
    """Raise TimeoutError in the block if it takes too long. Works in the main thread only, and not inside native code."""
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    late = TimeoutError(f"the env's {phase} took longer than {timeout_s:g} s")

    def raise_late(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise late

    before = signal.signal(signal.SIGALRM, raise_late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    except TimeoutError as exc:
        if exc is late:
            # A new exception, because one that a signal handler raised counts as the program's and not as the env's.
            raise TimeoutError(str(late)) from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
