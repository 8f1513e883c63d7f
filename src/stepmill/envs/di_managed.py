"""What runs in a worker for an env of a DI-engine manager: a `ManagedEnv` around each env.

It makes DI-engine's steps fit the hot loop, and loses nothing of them. Observations go where their space says, or beside
the arrays as they are. Actions are opaque: the env gets the very object that the user gave. Rewards lie in the slab as
float64; which class, dtype and shape they had, their `Form`, is told once and whenever it changes. What does not fit a
form (abnormal timesteps, rewards of many numbers) travels whole, in the info.

    info of the engine ─ {}                       nothing to tell: the env's info was {}
                       └ {CARGO: (info, form, whole)}   form or whole, or both, are None
    whole = (class, whether the observation is apart, that observation, reward, done, further fields)
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
from stepmill.envs.di_engine import BaseEnvTimestep, as_ding_env, dump_spaces, give_seed, tree_of_any
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Opaque

CARGO = "di"
_EXACT = 2**53  # integers up to here are exact as float64
_NATIVE_KINDS = "fiub"

Form = tuple[Any, ...]  # class of the timestep (None: ours), class of done, class of reward, its dtype, its shape


@dataclass(frozen=True, kw_only=True)
class ManagedSettings:
    """What a manager asks of its envs' workers.

    Attributes:
        shared_memory: observations lie in the slab, as their space says; else any object goes.
        step_tries: how often a step that raises is tried.
        step_timeout_s, reset_timeout_s: limits by alarm, for envs that run in the caller's own thread.
        is_process: the worker is a process of its own, to be named after the env.
    """

    shared_memory: bool = True
    step_tries: int = 1
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None
    is_process: bool = True


@dataclass(frozen=True)
class EnvMaker:
    """An env_fn of the pool: makes the user's env, and a ManagedEnv around it.

    Attributes:
        sink: where the env is put, by env_id, for who runs it in line; None elsewhere.
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
        """Make the user's env."""
        env = as_ding_env(self.env_fn())
        if self.sink is not None:
            self.sink[self.env_id] = env
        return env


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return what a managed env says of itself; `like` itself if that says the same."""
    assert isinstance(env, ManagedEnv)
    spec = EnvSpec(
        observation=tree_of_any(env.spaces[0]) if env.settings.shared_memory else Opaque(),
        action=Opaque(),
        spaces=dump_spaces(env.spaces),
    )
    return like if like is not None and spec == like else spec


def adapt(env: object) -> Steppable:
    """Return the managed env: it has the engine's own API."""
    assert isinstance(env, ManagedEnv)
    return env


class ManagedEnv:
    """One env of a manager, in the engine's API.

    Options of a reset:
    - "param": keyword arguments of the env's own `reset`, kept for automatic ones; None calls it without.
    - "seed": (seed, dynamic_seed or None), given to the env first.
    - "renew": make the env anew before.
    """

    def __init__(self, maker: EnvMaker) -> None:
        self._maker = maker
        self.settings = maker.settings
        self.env = maker.make()
        self.spaces = self._read_spaces()
        self._param: Mapping[str, Any] | None = {}
        self._replay_path: str | None = None
        self._form: Form | None = None
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
        # Some envs know their spaces only after a reset. It must not count as the first one: another env is made.
        self.env.reset()
        found = _spaces_of(self.env)
        self.env.close()
        self.env = self._maker.make()
        return found

    # ---- the engine's API ----------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[object, dict[Any, Any]]:
        """Begin an episode."""
        told = options or {}
        if told.get("renew"):
            self._renew()
        if "param" in told:
            self._param = told["param"]
        with _alarm(self.settings.reset_timeout_s, "reset"):
            if told.get("seed") is not None:
                give_seed(self.env, *told["seed"])
            return self.env.reset(**(self._param or {})), {}

    def step(self, action: Any) -> tuple[object, object, object, object, dict[Any, Any]]:
        """Step the env. Hot path."""
        timestep = self._do_step(action)
        obs, reward, done, info, *extra = timestep
        form = (
            timestep.__class__,
            done.__class__,
            reward.__class__,
            getattr(reward, "dtype", None),
            getattr(reward, "shape", None),
        )
        if form == self._form and not extra and _is_regular(obs, reward, form, info):
            return (
                obs,
                float(reward if form[4] is None else reward.item()),
                done,
                False,
                ({CARGO: (info, None, None)} if info or info.__class__ is not dict else {}),
            )
        return self._step_irregular(timestep, form)

    def _step_irregular(self, timestep: Any, form: Form) -> tuple[object, object, object, object, dict[Any, Any]]:
        obs, reward, done, info, *extra = timestep
        is_bad = is_abnormal(info)
        if not extra and not is_bad and _is_native(form) and _is_regular(obs, reward, form, info):
            self._form = form
            sent = (sent_class(form), *form[1:])
            return obs, float(reward if form[4] is None else reward.item()), done, False, {CARGO: (info, sent, None)}
        self._form = None
        is_apart = obs is None or is_bad  # what it says is no observation that a space knows
        whole = (sent_class(form), is_apart, obs if is_apart else None, reward, done, tuple(extra))
        is_over = not is_bad and isinstance(done, (bool, np.bool_)) and bool(done)
        return self._blank_obs() if is_apart else obs, 0.0, is_over, False, {CARGO: (info, None, whole)}

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    # ---- calls ---------------------------------------------------------------------------------------------------

    def look_up(self, name: str, method_names: list[str]) -> tuple[str, object]:
        """Return ("value", an attribute), or ("missing", repr of the env's class), ("method", None), ("callable", None)."""
        if not hasattr(self.env, name):
            return "missing", repr(type(self.env))
        value = getattr(self.env, name)
        if isinstance(value, MethodType):
            return ("callable" if name in method_names else "method"), None
        return "value", value

    def command(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], method_names: list[str]) -> object:
        """Call a method of the env.

        Raises:
            KeyError: it is not one of `method_names`.
        """
        if name not in method_names:
            raise KeyError(f"not support env cmd: {name}")
        return getattr(self.env, name)(*args, **kwargs)

    def frame(self, render_mode: str) -> object:
        """Render what the env wraps, as DI-engine does; a simulator's own picture if it has one."""
        inner = getattr(self.env, "_env", self.env)
        if hasattr(inner, "sim"):
            return inner.sim.render(camera_name="track", height=128, width=128)[::-1]
        try:
            return inner.render(mode=render_mode)
        except TypeError:  # Gymnasium's take no mode: it was chosen when the env was made
            return inner.render()

    @property
    def replay_path(self) -> str | None:
        """Where the env saves replays; to set it tells the env. The engine sets it again on an env made anew."""
        return self._replay_path

    @replay_path.setter
    def replay_path(self, path: str | None) -> None:
        self._replay_path = path
        if path is not None:
            self.env.enable_save_replay(path)

    # ---- inner ---------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        with contextlib.suppress(Exception):  # it is given up because it misbehaves
            self.env.close()
        self.env = self._maker.make()
        self._form = None
        self.replay_path = self._replay_path

    def _step_env(self, action: Any) -> Any:
        return self.env.step(action)

    def _step_guarded(self, action: Any) -> Any:
        for left in reversed(range(self.settings.step_tries)):
            try:
                with _alarm(self.settings.step_timeout_s, "step"):
                    return self.env.step(action)
            except Exception:
                if left == 0:
                    raise
        raise AssertionError("step_tries is at least 1")

    def _blank_obs(self) -> object:
        return _blank(tree_of_any(self.spaces[0])) if self.settings.shared_memory else None


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


def _is_regular(obs: object, reward: Any, form: Form, info: object) -> bool:
    if obs is None or (info and is_abnormal(info)):
        return False
    if info.__class__ is not dict and not isinstance(info, (dict, list, tuple)):
        raise TypeError(f"invalid env timestep type: {type(info)}")
    is_integer = form[2] is int or (form[3] is not None and form[3].kind in "iu")
    return not is_integer or -_EXACT <= int(reward if form[4] is None else reward.item()) <= _EXACT


def sent_class(form: Form) -> type[Any] | None:
    """Return the class of a timestep as it travels: None stands for `timestep_class()` over there."""
    return None if form[0] is BaseEnvTimestep else form[0]


def _is_native(form: Form) -> bool:
    """Whether a reward of this form is rebuilt exactly from a float64."""
    _, done_class, reward_class, dtype, shape = form
    if done_class not in (bool, np.bool_):
        return False
    if dtype is None:
        return reward_class in (float, int, bool)
    is_plain = isinstance(dtype, np.dtype) and dtype.kind in _NATIVE_KINDS and dtype.itemsize <= 8
    is_numpy = reward_class is np.ndarray or issubclass(reward_class, np.generic)
    return is_plain and is_numpy and int(np.prod(shape)) == 1


def _spaces_of(env: Any) -> tuple[object, object, object]:
    return env.observation_space, env.action_space, getattr(env, "reward_space", None)


def _blank(node: Any) -> object:
    """Return zeros in the structure of an observation, for a step that has none."""
    if hasattr(node, "items"):
        return {key: _blank(child) for key, child in node.items}
    if hasattr(node, "children"):
        return tuple(_blank(child) for child in node.children)
    return None if isinstance(node, Opaque) else np.zeros(node.shape, node.dtype)


@contextlib.contextmanager
def _alarm(timeout_s: float | None, phase: str) -> Iterator[None]:
    """Raise TimeoutError in an env that takes too long; in the main thread only, and not in native code."""
    if timeout_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    late = TimeoutError(f"the env's {phase} took longer than {timeout_s:g} s")

    def ring(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    except TimeoutError as exc:
        if (
            exc is late
        ):  # raised anew: what a signal handler raised would be taken for the program's, and not for the env's
            raise TimeoutError(str(late)) from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
