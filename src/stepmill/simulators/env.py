"""The env in the worker: each call is passed on to the process of the other interpreter."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, TypeAlias, cast

import gymnasium

from stepmill.simulators.maker import SimulatorEnvMaker
from stepmill.simulators.other_side import IS_CALLABLE, IS_MISSING
from stepmill.simulators.process import SimulatorError, SimulatorProcess
from stepmill.simulators.spaces import make_space
from stepmill.spec.remote_env import limits_here

Step: TypeAlias = "tuple[Any, Any, bool, bool, dict[str, Any]]"
_MAX_CHANGES = 1000
_SPACES = ("observation_space", "action_space", "reward_space")
_OWN = frozenset({*_SPACES, "render_mode", "metadata", "spec"})


class SimulatorEnv(gymnasium.Env[Any, Any]):
    """An env of another Python. Attributes and methods that are not Gymnasium's are those of the env there.

    Resets and calls start the process again if it has ended. Attributes that were set, and calls, are repeated then.
    """

    finds_paths = True  # an attribute may have a dotted name; what is on the way is not sent

    def __init__(self, maker: SimulatorEnvMaker) -> None:
        """Start the process, and make the env there.

        Raises:
            SimulatorError: the command is not that of a Python with NumPy.
            RemoteError: the function that makes the env raised an exception.
        """
        self._maker, self._limits = maker, limits_here()
        # What has changed the env apart from steps and resets: operations with their arguments, in their order.
        self._changes: dict[object, tuple[Any, ...]] = {}
        self._numbers = itertools.count()
        self._start()

    def _start(self) -> None:
        self._process = SimulatorProcess(self._maker.command, spins=self._limits.spins)
        try:
            described = self._process.begin(self._maker.make, self._maker.kwargs, self._limits.start_s)
            for operation, *arguments in self._changes.values():
                self._request(operation, *arguments)
        except BaseException:
            self._process.kill("was ended, because it could not begin")
            raise
        for name in _SPACES:
            setattr(self, name, make_space(described[name]))
        self.render_mode, self.metadata = described["render_mode"], described["metadata"]

    def step(self, action: Any) -> Step:
        """Step the env. Hot path."""
        return cast("Step", self._process.request("step", action, limit_s=self._limits.step_s)[1])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, in a new process if the last one has ended."""
        self._ensure_process()
        return cast(
            "tuple[Any, dict[str, Any]]", self._process.request("reset", seed, options, limit_s=self._limits.reset_s)[1]
        )

    def render(self) -> Any:
        """Return the picture. An env of gym that does not know its mode when it is made renders as "rgb_array"."""
        return self._request("render")[1]

    def close(self) -> None:
        """Close the env, and end its process."""
        self._process.close()

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the env there, or a function that calls its method. Its name may begin with an underscore."""
        return self._get(name) if name.startswith("_") else getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the env there."""
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            self._change(("attribute", name), "set", name, value)
        return True

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether the env there has an attribute."""
        try:
            self.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    np_random = property(lambda self: self.__getattr__("np_random"))  # not one of this side

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._get(name)

    def _get(self, name: str) -> Any:
        status, value = self._request("get", name)
        if status == IS_MISSING:
            raise AttributeError(value)
        return partial(self._call, name) if status == IS_CALLABLE else value

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.set_wrapper_attr(name, value)

    def _call(self, name: str, *args: object, **kwargs: object) -> Any:
        return self._change(next(self._numbers), "call", name, list(args), kwargs)

    def _change(self, key: object, operation: str, *arguments: object) -> Any:
        """Send a request that changes the env. A later process gets it again."""
        value = self._request(operation, *arguments)[1]
        self._changes.pop(key, None)
        if len(self._changes) < _MAX_CHANGES:
            self._changes[key] = operation, *arguments
        return value

    def _request(self, operation: str, *arguments: object) -> tuple[int, Any]:
        self._ensure_process()
        return self._process.request(operation, *arguments, limit_s=self._limits.call_s)

    def _ensure_process(self) -> None:
        """Start the process again if it has ended."""
        if self._process.end:
            if len(self._changes) >= _MAX_CHANGES:
                what = f"it was called {_MAX_CHANGES} times or more, which cannot be repeated; revive() makes a new env"
                raise SimulatorError(f"the simulator's process {self._process.end}, and is not started again: {what}")
            self._start()
