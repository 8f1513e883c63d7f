"""`env.attr` and `env.method()`: one value per env, from where the envs live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from stepmill.frontends.torchrl.layers import has_named
from stepmill.pool.pool import Pool


class FanOut:
    """An attribute of all envs, or of some, that is asked for when it is used: called, iterated, indexed or compared.

    `list(env.place)` reads an attribute of every env, `env.place[2]` that of one, `env.jump(3)` calls a method of every
    env and returns a list, `env.engine.temperature` goes on from attribute to attribute.
    """

    def __init__(self, pool: Pool, path: str, env_ids: Sequence[int]) -> None:
        self._pool = pool
        self._path = path
        self._env_ids = tuple(env_ids)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method; an attribute that is no method is returned."""
        return list(self._pool.call(self._path, *args, env_ids=self._env_ids, **kwargs))

    def values(self) -> list[Any]:
        """Return the attribute of each env."""
        return list(self._pool.get_attr(self._path, env_ids=self._env_ids))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __len__(self) -> int:
        return len(self._env_ids)

    def __getitem__(self, index: int | slice) -> Any:
        return self.values()[index]

    def __eq__(self, other: object) -> bool:
        return self.values() == (other.values() if isinstance(other, FanOut) else other)

    __hash__ = None  # type: ignore[assignment]  # it compares by values that change

    def __getattr__(self, name: str) -> FanOut:
        if name.startswith("_"):
            raise AttributeError(f"{name!r} of envs is private; call a method of theirs that tells it")
        return FanOut(self._pool, f"{self._path}.{name}", self._env_ids)

    def __repr__(self) -> str:
        return f"<{self._path} of envs {list(self._env_ids)}>"


def has_attribute(pool: Pool, name: str) -> bool:
    """Whether env 0 has an attribute; asks its worker."""
    return bool(pool.get_attr(partial(has_named, name), env_ids=[0])[0])  # not by a call, which would count as a change
