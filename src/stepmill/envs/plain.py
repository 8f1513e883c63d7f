"""Any Python env with `reset` and `step`, as it is: what it returns travels whole, as one value of no fixed size.

Old gym's four values and Gymnasium's five are both understood. Nothing is asked of observations and actions but that
they pickle, so that an env needs no spaces. The price is a pass through the codec for each step.

`PlainEnv` is what the hot loop steps. An action is a pair (is_driven, action): with `is_driven` the ends of episodes are
told to the engine, which then resets the env by its own rules; without it the env is stepped past its end, as a remote
env without any autoreset is. An observation is a pair (is_step, what the env returned).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle

from stepmill.envs import Steppable
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Opaque

NO_INFO: dict[str, object] = {}  # the loop knows an empty dict, and sends nothing for it
_NEW_GYM = (0, 26)  # the first gym whose step returns five values


@dataclass(frozen=True)
class PlainMaker:
    """An env_fn that wraps what another one makes."""

    env_fn: Callable[[], object]

    def __call__(self) -> PlainEnv:
        return PlainEnv(self.env_fn())


class PlainEnv:
    """Steps an env of any kind for the hot loop; see the module."""

    def __init__(self, env: object) -> None:
        self.env: Any = env
        self.is_gymnasium = speaks_gymnasium(env)
        self._is_closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Reset the env with `options` as its keyword arguments; a seed goes where the env's API takes it."""
        arguments: dict[str, object] = {} if options is None else dict(options)
        if seed is not None and self.is_gymnasium:
            arguments["seed"] = seed
        elif seed is not None:
            self.env.seed(seed)
        return (False, self.env.reset(**arguments)), NO_INFO

    def step(self, action: tuple[bool, object]) -> tuple[object, float, object, object, Mapping[str, object]]:
        """Step the env. Hot path."""
        is_driven, own = action
        result = self.env.step(own)
        if not is_driven:
            return (True, result), 0.0, False, False, NO_INFO
        if len(result) == 4:
            return (True, result), 0.0, result[2], False, NO_INFO
        if len(result) == 5:
            return (True, result), 0.0, result[2], result[3], NO_INFO
        raise TypeError(f"step must return 4 values (old gym) or 5 (Gymnasium), and returned {len(result)}")

    def render_as(self, mode: str) -> object:
        """Return a frame; None for "human", which is drawn where the env is."""
        takes_mode = "mode" in _parameters(self.env.render)
        frame: object = self.env.render(mode=mode) if takes_mode else self.env.render()
        return None if mode == "human" else frame

    def close(self) -> None:
        """Close the env, once. An env without `close` needs none."""
        if not self._is_closed:
            self._is_closed = True
            getattr(self.env, "close", _do_nothing)()

    def close_env(self) -> None:
        """Close the env while its worker lives on."""
        self.close()

    def get_wrapper_attr(self, name: str) -> object:
        """Return what is called on the env itself; three names are this adapter's."""
        if name in ("render_as", "close_env", "is_gymnasium"):
            return getattr(self, name)
        through = getattr(self.env, "get_wrapper_attr", None)
        found: object = getattr(self.env, name) if through is None else through(name)
        return found

    def set_wrapper_attr(self, name: str, value: object) -> None:
        """Set an attribute of the env itself."""
        through = getattr(self.env, "set_wrapper_attr", None)
        if through is None:
            setattr(self.env, name, value)
        else:
            through(name, value)


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return what can be said of any env: its spaces, if it has some, and which API it speaks."""
    env = cast("PlainEnv", env)
    spaces = (getattr(env.env, "observation_space", None), getattr(env.env, "action_space", None))
    spec = EnvSpec(
        observation=Opaque(),
        action=Opaque(),
        metadata={"is_gymnasium": env.is_gymnasium},
        spaces=bytes(cloudpickle.dumps(spaces)),
    )
    return like if like is not None and like == spec else spec


def adapt(env: object) -> Steppable:
    """Return the env, which was made for the hot loop."""
    return cast("Steppable", env)


def speaks_gymnasium(env: object) -> bool:
    """Whether an env's `reset` returns (observation, info) and takes a seed.

    Gymnasium's envs do, and those of gym from 0.26 on. Of an env that is neither, the signature of `reset` tells: one
    that names `seed`, and not gym 0.22's `return_info`, does.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(env).__mro__}
    if "gymnasium" in roots:
        return True
    if "gym" in roots and hasattr(sys.modules.get("gym"), "__version__"):
        numbers = str(sys.modules["gym"].__version__).split(".")[:2]
        return tuple(int(number) if number.isdigit() else 0 for number in numbers) >= _NEW_GYM
    parameters = _parameters(getattr(env, "reset", _do_nothing))
    return "seed" in parameters and "return_info" not in parameters


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _do_nothing() -> None:
    """Stand for a method that an env does not have."""
