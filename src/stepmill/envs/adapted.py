"""What adapters that stand between the hot loop and an env have in common: all that is not stepped reaches the env itself."""

from __future__ import annotations

from typing import Any


class Adapted:
    """Holds an env of another API. Attributes, rendering and closing are the env's."""

    def __init__(self, env: object) -> None:
        self.env: Any = env

    @property
    def unwrapped(self) -> object:
        """The innermost env."""
        inner: object = getattr(self.env, "unwrapped", self.env)
        return inner

    def get_wrapper_attr(self, name: str) -> object:
        """Return an attribute of the env, looked for through its wrappers where it offers that."""
        through = getattr(self.env, "get_wrapper_attr", None)
        found: object = getattr(self.env, name) if through is None else through(name)
        return found

    def set_wrapper_attr(self, name: str, value: object) -> None:
        """Set an attribute of the env, on the wrapper that has it where it offers that."""
        through = getattr(self.env, "set_wrapper_attr", None)
        if through is None:
            setattr(self.env, name, value)
        else:
            through(name, value)

    def close(self) -> None:
        """Close the env; one without `close` needs none."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()
