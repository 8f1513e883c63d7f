"""Named values beside the data: parameters of a simulation, the progress of the learner, switches of an env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepmill.spec.errors import UsageError

SetColumn = Callable[[str, Any, Any], None]
ReadAll = Callable[[Any], "tuple[dict[str, Any], ...]"]


class PoolProperties:
    """The properties of a pool's envs: what `pool.properties` is.

    A property reaches an env through its method `set_property(name, value)`, on whatever wrapper has one; an env
    without that method finds it in the dict `env.unwrapped.properties`. It takes effect after the commands sent to the
    env before, and before those sent after. What was set is set again on envs that are built anew.
    """

    def __init__(self, set_column: SetColumn, read_all: ReadAll) -> None:
        self._set_column = set_column
        self._read_all = read_all

    def set(self, name: str, value: Any, *, env_ids: Sequence[int] | None = None) -> None:
        """Give envs a property.

        Args:
            name: of the property.
            value: a list or tuple has one value per env; anything else is for all.
            env_ids: which envs; None is all.
        Raises:
            EnvError: an env refused it.
        """
        if not isinstance(name, str):
            raise UsageError(f"a property's name is a string, not the {type(name).__name__} {name!r}")
        self._set_column(name, value, env_ids)

    def get(self, name: str, *, env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return a property of envs, one value per env.

        Raises:
            UsageError: an env has no such property.
        """
        columns = self._read_all(env_ids)
        ids = range(len(columns)) if env_ids is None else env_ids
        missing = [int(env_id) for env_id, column in zip(ids, columns, strict=True) if name not in column]
        if missing:
            raise UsageError(f"envs {missing} have no property {name!r}; set it first, or ask properties.list()")
        return tuple(column[name] for column in columns)

    def list(self, *, env_ids: Sequence[int] | None = None) -> list[str]:
        """Return the names of all properties that any of the envs has, sorted."""
        return sorted({name for column in self._read_all(env_ids) for name in column})

    def read(self, *, env_ids: Sequence[int] | None = None) -> tuple[dict[str, Any], ...]:
        """Return a copy of all properties, one dict per env."""
        return self._read_all(env_ids)
