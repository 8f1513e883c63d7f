"""Any Python env with `reset` and `step`. Its results are sent as one opaque value.

`step` may return four values, as in old gym, or five. Observations and actions need only be picklable, so that an env needs
no spaces; each step pays for encoding and decoding them.

The hot loop steps an `OpaqueEnv`. Its action is a pair (is_driven, action). With `is_driven` the engine sees the ends of
episodes and resets the env by its own rules; without it the env is stepped past its end, like a remote env without
autoreset. An observation is a pair (is_step, what the env returned).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import cloudpickle

from stepmill.envs import Steppable
from stepmill.envs.env_adapter import EnvAdapter
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Opaque

NO_INFO: dict[str, object] = {}  # the hot loop sends nothing for an empty dict
_NEW_GYM = (0, 26)  # the first gym whose step returns five values


@dataclass(frozen=True)
class OpaqueEnvMaker:
    """An env_fn that wraps the env of another env_fn."""

    env_fn: Callable[[], object]

    def __call__(self) -> OpaqueEnv:
        return OpaqueEnv(self.env_fn())


class OpaqueEnv(EnvAdapter):
    """Steps an env of any kind for the hot loop; see the module."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self.is_gymnasium = has_gymnasium_api(env)
        self._is_closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Reset the env with `options` as keyword arguments; pass the seed in the way of the env's API."""
        arguments: dict[str, object] = {} if options is None else dict(options)
        if seed is not None and self.is_gymnasium:
            arguments["seed"] = seed
        elif seed is not None:
            self.get_wrapper_attr("seed")(seed)  # type: ignore[operator]  # old gym's method
        return (False, self.env.reset(**arguments)), NO_INFO

    def step(self, action: tuple[bool, object]) -> tuple[object, float, object, object, Mapping[str, object]]:
        """Step the env. Hot path."""
        is_driven, env_action = action
        result = self.env.step(env_action)
        if not is_driven:
            return (True, result), 0.0, False, False, NO_INFO
        if len(result) == 4:
            return (True, result), 0.0, result[2], False, NO_INFO
        if len(result) == 5:
            return (True, result), 0.0, result[2], result[3], NO_INFO
        raise ValueError(f"step must return 4 values (old gym) or 5 (Gymnasium), and returned {len(result)}")

    def render_as(self, mode: str) -> object:
        """Return what the env's `render` returns for a mode."""
        parameters = _parameters(self.env.render)
        # gym 0.25 decorates all methods `render`.
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        takes_mode = "mode" in parameters or (takes_any and mode != "human")
        frame: object = self.env.render(mode=mode) if takes_mode else self.env.render()
        return frame

    def close(self) -> None:
        """Close the env once, if it has a method `close`."""
        if not self._is_closed:
            self._is_closed = True
            super().close()

    def close_env(self) -> None:
        """Close the env while its worker continues to run."""
        self.close()

    def get_wrapper_attr(self, name: str) -> object:
        """Return an attribute of the env itself, except for three of this adapter."""
        return (
            getattr(self, name)
            if name in ("render_as", "close_env", "is_gymnasium")
            else super().get_wrapper_attr(name)
        )


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of an env: its spaces, if it has any, and which API it has."""
    env = cast("OpaqueEnv", env)
    spaces = (getattr(env.env, "observation_space", None), getattr(env.env, "action_space", None))
    return EnvSpec(
        observation=Opaque(),
        action=Opaque(),
        metadata={"is_gymnasium": env.is_gymnasium},
        spaces=bytes(cloudpickle.dumps(spaces)),
    )


def adapt(env: object) -> Steppable:
    """Return the env itself, because `OpaqueEnv` has the engine's API."""
    return cast("Steppable", env)


def has_gymnasium_api(env: object) -> bool:
    """Whether an env's `reset` returns (observation, info) and takes a seed.

    It is true for Gymnasium's envs, and for gym's envs if gym is 0.26 or newer and `reset` takes a seed. For an env of
    neither library it is true if `reset` has a parameter `seed` and no `return_info`, which gym 0.22 had. A
    SubprocessEnv, which wrappers of either library accept, has an attribute for this.
    """
    of_subprocess_env = getattr(getattr(env, "unwrapped", env), "has_reset_info", None)
    if isinstance(of_subprocess_env, bool):
        return of_subprocess_env
    roots = {cls.__module__.partition(".")[0] for cls in type(env).__mro__}
    if "gymnasium" in roots:
        return True
    parameters = _parameters(getattr(env, "reset", _do_nothing))
    if "gym" in roots and hasattr(sys.modules.get("gym"), "__version__"):
        numbers = str(sys.modules["gym"].__version__).split(".")[:2]
        is_new = tuple(int(number) if number.isdigit() else 0 for number in numbers) >= _NEW_GYM
        return is_new and any(name == "seed" or each.kind is each.VAR_KEYWORD for name, each in parameters.items())
    return "seed" in parameters and "return_info" not in parameters


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def _do_nothing() -> None:
    """Replace a method that an env does not have."""
