"""The env in the worker: each call is passed on to the process of the other interpreter."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, TypeAlias, cast

import gymnasium
import numpy as np

from stepmill.simulators.maker import SimulatorEnvMaker
from stepmill.simulators.other_side import IS_CALLABLE, IS_MISSING
from stepmill.simulators.process import SimulatorError, SimulatorProcess
from stepmill.spec.remote_env import limits_here

Step: TypeAlias = "tuple[Any, Any, bool, bool, dict[str, Any]]"
_MAX_CHANGES = 1000
_OWN = frozenset({"observation_space", "action_space", "reward_space", "render_mode", "metadata", "spec"})
_MANGLED = "_SimulatorEnv__"


class SimulatorEnv(gymnasium.Env[Any, Any]):
    """An env of another Python. Attributes and methods that are not Gymnasium's are those of the env there.

    Resets and calls start the process again if it has ended. Attributes that were set, and calls, are repeated then. What this
    object has for itself begins with two underscores, because a name with one may be of the env there.
    """

    finds_paths = True  # an attribute may have a dotted name; what is on the way is not sent

    def __init__(self, maker: SimulatorEnvMaker) -> None:
        """Start the process, and make the env there.

        Raises:
            SimulatorError: the command is not that of a Python with NumPy.
            RemoteError: the function that makes the env raised an exception.
        """
        self.__maker, self.__limits = maker, limits_here()
        # What has changed the env apart from steps and resets: operations with their arguments, in their order.
        self.__changes: dict[object, tuple[Any, ...]] = {}
        self.__start()

    def __start(self) -> None:
        self.__process = SimulatorProcess(self.__maker.command, self.__limits.spin_s)
        try:
            described = self.__process.begin(self.__maker.make, self.__maker.kwargs, self.__limits.start_s)
            for operation, *arguments in self.__changes.values():
                self.__request(self.__limits.call_s, operation, *arguments)
        except BaseException:
            self.__process.kill("was ended, because it could not begin")
            raise
        for name, value in described.items():
            setattr(self, name, make_space(value))

    def step(self, action: Any) -> Step:
        """Step the env. Hot path."""
        return cast("Step", self.__process.request("step", action, limit_s=self.__limits.step_s)[1])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, in a new process if the last one has ended."""
        obs, info = self.__request(self.__limits.reset_s, "reset", seed, options)[1]
        return obs, info

    def render(self) -> Any:
        """Return the picture. An env of gym that does not know its mode when it is made renders as "rgb_array"."""
        return self.__request(self.__limits.call_s, "render")[1]

    def close(self) -> None:
        """Close the env, and end its process."""
        self.__process.close()

    np_random = property(lambda self: self.__getattr__("np_random"))  # not one of this side
    np_random_seed = property(lambda self: self.__getattr__("np_random_seed"))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the env there, or a function that calls its method."""
        if name.startswith(("__", _MANGLED)):
            raise AttributeError(name)
        status, value = self.__request(self.__limits.call_s, "get", name)
        if status == IS_MISSING:
            raise AttributeError(value)
        return partial(self.__change, "call", name) if status == IS_CALLABLE else value

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN or name.startswith(_MANGLED):
            super().__setattr__(name, value)
        else:
            self.__change("set", name, value)

    def __change(self, operation: str, name: str, /, *args: object, **kwargs: object) -> Any:
        """Set an attribute, or call a method. A later process gets the same request again."""
        arguments: tuple[Any, ...] = args if operation == "set" else (list(args), kwargs)
        value = self.__request(self.__limits.call_s, operation, name, *arguments)[1]
        key = name if operation == "set" else object()
        self.__changes.pop(key, None)
        if len(self.__changes) < _MAX_CHANGES:
            self.__changes[key] = operation, name, *arguments
        return value

    def __request(self, limit_s: float | None, operation: str, *arguments: object) -> tuple[int, Any]:
        """Pass a call on. Start the process again if it has ended."""
        if self.__process.end:
            if len(self.__changes) >= _MAX_CHANGES:
                what = f"it was called {_MAX_CHANGES} times or more, which cannot be repeated; revive() makes a new env"
                raise SimulatorError(f"the simulator's process {self.__process.end}, and is not started again: {what}")
            self.__start()
        return self.__process.request(operation, *arguments, limit_s=limit_s)


def make_space(described: Any) -> Any:
    """Return a space of Gymnasium, or a part of one, of the plain data of `other_side.describe_space`."""
    if isinstance(described, list):
        return [make_space(each) for each in described]
    if not isinstance(described, tuple):
        return described
    name, parts = described
    if isinstance(parts, tuple):  # of the spaces of a Dict
        return name, make_space(parts)
    arguments = {key: make_space(part) for key, part in parts.items()} | {"sort_keys": False}
    if "dtype" in arguments:
        arguments["dtype"] = np.dtype(arguments["dtype"]).type
    make = getattr(gymnasium.spaces, name)
    known = inspect.signature(make).parameters  # older versions of Gymnasium lack some
    return make(**{key: value for key, value in arguments.items() if key in known})
