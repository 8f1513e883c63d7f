"""The base class of adapters that wrap an env of another API: attributes, rendering and closing reach the env itself."""

from __future__ import annotations

from typing import Any


class EnvAdapter:
    """Wraps an env. Subclasses add `reset` and `step`."""

    _has_wrappers = True  # whether attributes are searched in the way of Gymnasium's wrappers, if the env supports that

    def __init__(self, env: object) -> None:
        self.env: Any = env

    @property
    def unwrapped(self) -> object:
        """The innermost env."""
        inner: object = getattr(self.env, "unwrapped", self.env)
        return inner

    def get_wrapper_attr(self, name: str) -> object:
        """Return an attribute of the env."""
        through = getattr(self.env, "get_wrapper_attr", None) if self._has_wrappers else None
        found: object = getattr(self.env, name) if through is None else through(name)
        return found

    def set_wrapper_attr(self, name: str, value: object) -> None:
        """Set an attribute of the env, on the wrapper that has it if `_has_wrappers`."""
        through = getattr(self.env, "set_wrapper_attr", None) if self._has_wrappers else None
        if through is None:
            setattr(self.env, name, value)
        else:
            through(name, value)

    def close(self) -> None:
        """Close the env, if it has a method `close`."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()
