"""Env functions and the keyword arguments that they are called with. Workers load this file: no torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stepmill.spec.errors import UsageError

EnvFn: TypeAlias = Callable[..., object]
Kwargs: TypeAlias = Mapping[str, Any]


class BoundMaker:
    """An env function with its keyword arguments, of which each env is given a deep copy."""

    def __init__(self, fn: EnvFn, kwargs: Kwargs) -> None:
        self._fn = fn
        self._kwargs = kwargs

    def __call__(self) -> object:
        """Make an env."""
        return self._fn(**copy.deepcopy(dict(self._kwargs)))

    def __repr__(self) -> str:
        return f"{self._fn!r} with {dict(self._kwargs)!r}"


class EnvMakers:
    """How the N envs of a pool are made, which may change: the next pool's envs are made so.

    Args:
        makers: what stands for each env: a function, or a name.
        kwargs: keyword arguments, one mapping for all or one per env; not changed. None is none.
        bind: returns the env function of a maker with its keyword arguments; by default it calls the maker with them.
        is_uniform: the envs are all alike, and so one mapping for all is wanted.
    Raises:
        UsageError: another number of mappings than envs.
    """

    def __init__(
        self,
        makers: Sequence[Any],
        kwargs: Kwargs | Sequence[Kwargs] | None = None,
        *,
        bind: Callable[[Any, Kwargs], Callable[[], object]] | None = None,
        is_uniform: bool = False,
    ) -> None:
        self._makers = tuple(makers)
        self._bind = _call_with if bind is None else bind
        self._is_uniform = is_uniform
        empty: Kwargs = {}
        self._kwargs = [empty] * len(self._makers)
        self.update(kwargs or {})

    @property
    def kwargs(self) -> list[dict[str, Any]]:
        """Copies of the keyword arguments of each env."""
        return [copy.deepcopy(dict(own)) for own in self._kwargs]

    def functions(self) -> list[Callable[[], object]]:
        """Return the env functions of today; envs of one maker and one mapping share one object."""
        made: dict[tuple[int, int], Callable[[], object]] = {}
        for maker, own in zip(self._makers, self._kwargs, strict=True):
            key = id(maker), id(own)
            if key not in made:
                made[key] = self._bind(maker, own)
        return [made[id(maker), id(own)] for maker, own in zip(self._makers, self._kwargs, strict=True)]

    def update(self, kwargs: Kwargs | Sequence[Kwargs]) -> None:
        """Add keyword arguments, or replace those of the same name."""
        if isinstance(kwargs, Mapping):
            own = copy.deepcopy(dict(kwargs))
            merged = {id(old): {**old, **own} for old in self._kwargs}
            self._kwargs = [merged[id(old)] for old in self._kwargs]
            return
        if len(kwargs) != len(self._makers):
            raise UsageError(
                f"len(kwargs) and num_workers mismatch, got {len(kwargs)} and {len(self._makers)}: keyword arguments for "
                "another number of envs; give one mapping per env, or one for all"
            )
        if self._is_uniform:
            raise UsageError("EnvPool's envs are all made alike; give one mapping of keyword arguments for all of them")
        self._kwargs = [{**old, **copy.deepcopy(dict(new))} for old, new in zip(self._kwargs, kwargs, strict=True)]


def _call_with(fn: EnvFn, kwargs: Kwargs) -> Callable[[], object]:
    return BoundMaker(fn, kwargs) if kwargs else fn
