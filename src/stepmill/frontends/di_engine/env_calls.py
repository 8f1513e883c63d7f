"""Reads attributes of envs and calls their methods. A call runs after the commands that were sent to its env before."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from stepmill.frontends.di_engine.env_lifecycle import EnvLifecycle
from stepmill.frontends.di_engine.errors import (
    ClosedAttributeError,
    ManagerUsageError,
    MethodError,
    MissingAttributeError,
    UnknownCommandError,
    with_env_class,
)
from stepmill.spec.errors import EnvError

BASIC_METHODS = ("reset", "step", "seed", "close", "enable_save_replay")
_RENDER_MODES = ("rgb_array", "depth_array")


def _space(place: int) -> Any:
    """Return a property that has a space of env 0, or the one that a subclass has assigned, as in DI-engine."""

    def read(self: EnvCalls) -> Any:
        return self._own_spaces[place] if place in self._own_spaces else self._start().spaces[place]

    def write(self: EnvCalls, space: Any) -> None:
        self._own_spaces[place] = space

    return property(read, write)


class EnvCalls(EnvLifecycle):
    """The part of a manager, or of a supervisor, that reads attributes of envs and calls their methods."""

    _observation_space, _action_space, _reward_space = map(_space, range(3))

    @property
    def env_num(self) -> int:
        """The number of envs."""
        return self._env_num

    @property
    def observation_space(self) -> Any:
        """The observation space of env 0. Reading it starts the workers."""
        return self._observation_space

    @property
    def action_space(self) -> Any:
        """The action space of env 0. Reading it starts the workers."""
        return self._action_space

    @property
    def reward_space(self) -> Any:
        """The reward space of env 0, or None if it has none. Reading it starts the workers."""
        return self._reward_space

    @property
    def method_name_list(self) -> list[str]:
        """Names of the methods that may be called; a subclass may add more."""
        return [*BASIC_METHODS, "render", "reward_shaping", "enable_save_figure"]

    def call(self, cmd: str, *args: Any, env_ids: Sequence[int] | None = None, **kwargs: Any) -> dict[int, Any]:
        """Call a method of the envs.

        Args:
            cmd: a name in `method_name_list`.
            *args, **kwargs: arguments of the method, the same for every env.
            env_ids: the envs; None means all.
        Returns:
            The results by env_id.
        Raises:
            KeyError: cmd is not in `method_name_list`; nothing is called.
            EnvError: an env raised; the error is also of the class that the env raised.
        """
        names = self.method_name_list
        if cmd not in names:
            raise UnknownCommandError(f"not support env cmd: {cmd}")
        ids = list(range(self._env_num)) if env_ids is None else list(env_ids)
        self._check_ids(ids)
        return dict(zip(ids, self._ask("command", cmd, args, kwargs, names, env_ids=ids), strict=True))

    def render_ready(self, render_mode: str = "rgb_array") -> dict[int, Any]:
        """Return frames of the envs that need an action, by env_id.

        Args:
            render_mode: "rgb_array" or "depth_array".
        """
        if render_mode not in _RENDER_MODES:
            raise ManagerUsageError(f"render_mode={render_mode!r} is not one of {_RENDER_MODES}")
        ids = self._ready_ids()
        return dict(zip(ids, self._ask("frame", render_mode, env_ids=ids), strict=True)) if ids else {}

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Call `enable_save_figure` of one env."""
        self.call("enable_save_figure", figure_path, env_ids=[env_id])

    def reward_shaping(self, env_id: int, transitions: list[dict[str, Any]]) -> Any:
        """Return the transitions with the rewards that `reward_shaping` of one env gives them."""
        return self.call("reward_shaping", transitions, env_ids=[env_id])[env_id]

    def __getattr__(self, key: str) -> Any:
        """Return an attribute of every env as a list in the order of their ids; for a method, functions that call it.

        Raises:
            AttributeError: the manager is closed (also an AssertionError).
            AttributeError: the envs have no such attribute.
            RuntimeError: it is a method that `method_name_list` does not name.
        """
        if key.startswith("__"):
            raise AttributeError(key)
        if self.__dict__.get("_closed", True):
            raise ClosedAttributeError(self._closed_attribute_text)
        return self._attributes(key, list(range(self._env_num)))

    def _attributes(self, key: str, env_ids: Sequence[int]) -> list[Any]:
        self._check_ids(env_ids)
        found = self._ask("look_up", key, self.method_name_list, env_ids=env_ids)
        for kind, value in found:
            if kind == "missing":
                raise MissingAttributeError(f"env `{value}` doesn't have the attribute `{key}`")
            if kind == "method":
                raise MethodError(f"env getattr doesn't supports method({key}), please override method_name_list")
        return [
            value if kind == "value" else functools.partial(self._call_one, key, env_id)
            for env_id, (kind, value) in zip(env_ids, found, strict=True)
        ]

    def _call_one(self, cmd: str, env_id: int, *args: Any, **kwargs: Any) -> Any:
        return self.call(cmd, *args, env_ids=[env_id], **kwargs)[env_id]

    def _ask(self, name: str, *args: Any, env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        try:
            return self._open_client().pool.call(name, *args, env_ids=env_ids)
        except EnvError as error:
            raise with_env_class(error) from None

    def _ready_ids(self) -> list[int]:
        raise NotImplementedError
