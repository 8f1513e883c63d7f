"""Env functions and their keyword arguments. Workers import this module, so it does not import torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stepmill.frontends.torchrl.errors import ArgumentCountError
from stepmill.spec.errors import UsageError

EnvFn: TypeAlias = Callable[..., object]
Kwargs: TypeAlias = Mapping[str, Any]


class BoundMaker:
    """An env function with its keyword arguments; each call gets a deep copy of them."""

    def __init__(self, fn: EnvFn, kwargs: Kwargs) -> None:
        self._fn = fn
        self._kwargs = kwargs

    def __call__(self) -> object:
        """Make an env."""
        return self._fn(**copy.deepcopy(dict(self._kwargs)))

    def __repr__(self) -> str:
        return f"{self._fn!r} with {dict(self._kwargs)!r}"


class EnvMakers:
    """Makes the functions and arguments of the N envs of a pool. `update` changes them for the next pool.

    Args:
        makers: one per env: a function, or a name that `bind` understands.
        kwargs: keyword arguments, one mapping for all envs or one per env; they are not changed. None means no arguments.
        bind: returns the env function for a maker and its keyword arguments; by default one that calls the maker with them.
        is_uniform: all envs must have the same arguments, so only one mapping for all is accepted.
    Raises:
        UsageError: the number of mappings is not the number of envs.
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
        self.update(kwargs or {}, name="create_env_kwargs")

    @property
    def kwargs(self) -> list[dict[str, Any]]:
        """Copies of the keyword arguments of each env."""
        return [copy.deepcopy(dict(own)) for own in self._kwargs]

    def functions(self) -> list[Callable[[], object]]:
        """Return the env functions with the present arguments; envs with the same maker and mapping share one object."""
        made: dict[tuple[int, int], Callable[[], object]] = {}
        for maker, own in zip(self._makers, self._kwargs, strict=True):
            key = id(maker), id(own)
            if key not in made:
                made[key] = self._bind(maker, own)
        return [made[id(maker), id(own)] for maker, own in zip(self._makers, self._kwargs, strict=True)]

    def update(self, kwargs: Kwargs | Sequence[Kwargs], *, name: str = "kwargs") -> None:
        """Add keyword arguments, or replace those with the same names."""
        if isinstance(kwargs, Mapping):
            own = copy.deepcopy(dict(kwargs))
            merged = {id(old): {**old, **own} for old in self._kwargs}
            self._kwargs = [merged[id(old)] for old in self._kwargs]
            return
        if len(kwargs) != len(self._makers):
            raise ArgumentCountError(
                f"len({name}) and num_workers mismatch, got {len(kwargs)} and {len(self._makers)}; "
                "give one mapping per env, or one for all"
            )
        if self._is_uniform:
            raise UsageError("all envs of an EnvPool pool have the same arguments; give one mapping for all of them")
        self._kwargs = [{**old, **copy.deepcopy(dict(new))} for old, new in zip(self._kwargs, kwargs, strict=True)]


def _call_with(fn: EnvFn, kwargs: Kwargs) -> Callable[[], object]:
    return BoundMaker(fn, kwargs) if kwargs else fn
