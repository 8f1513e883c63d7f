"""What an env keeps beyond an episode, read and written where the env lives. Workers load this file: no torch.

An env is a chain of layers, from its outermost wrapper inwards. A layer has parts:

    what its own `state_dict()` returns    part "MyEnv"
    an attribute with running statistics   part "NormalizeObservation.obs_rms": mean, var, count

Of several layers of one class the second is called "MyEnv[1]", the third "MyEnv[2]".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepmill.worker.calls import get_attr

Parts: TypeAlias = dict[str, Any]
"""By name, the state of each part."""

_STATISTICS = ("mean", "var", "count")


@dataclass(frozen=True)
class _Part:
    name: str
    read: Callable[[], Any]
    load: Callable[[Any], object]


def read_parts(env: object) -> Parts:
    """Return the state of an env's parts, a copy; {} if it keeps nothing."""
    return {part.name: copy.deepcopy(part.read()) for part in _parts(env)}


def part_names(env: object) -> tuple[str, ...]:
    """Return the names of an env's parts; none of them is read."""
    return tuple(part.name for part in _parts(env))


def load_parts(env: object, state: Mapping[str, Any]) -> None:
    """Give an env's parts the state that `state` has for them; parts that it does not name stay as they are."""
    for part in _parts(env):
        if part.name in state:
            part.load(copy.deepcopy(state[part.name]))  # without processes, other envs are given the same objects


def load_part(name: str, env: object, state: Mapping[str, Any]) -> None:
    """Give one part of an env its state, {name: state}; nothing if the env has no such part."""
    load_parts(env, {name: state[name]})


def has_named(name: str, env: object) -> bool:
    """Whether an env has an attribute, on whatever layer."""
    try:
        get_attr(env, name)
    except AttributeError:
        return False
    return True


def is_statistics(name: str) -> bool:
    """Whether a part of this name is running statistics."""
    return "." in name


def _parts(env: object) -> Iterator[_Part]:
    seen: dict[str, int] = {}
    visited: set[int] = set()
    layer: Any = env
    while layer is not None and id(layer) not in visited:
        visited.add(id(layer))
        number = seen.setdefault(type(layer).__name__, 0)
        seen[type(layer).__name__] += 1
        name = type(layer).__name__ + (f"[{number}]" if number else "")
        # Asked of the class: wrappers that hand on what they do not have would answer for the layers below.
        if all(callable(getattr(type(layer), method, None)) for method in ("state_dict", "load_state_dict")):
            yield _Part(name, layer.state_dict, layer.load_state_dict)
        for attribute, value in vars(layer).items() if hasattr(layer, "__dict__") else ():
            if all(hasattr(value, statistic) for statistic in _STATISTICS) and not callable(value.mean):
                yield _Part(f"{name}.{attribute}", _reader(value), _loader(value))
        layer = getattr(layer, "__dict__", {}).get("env")


def _reader(statistics: Any) -> Callable[[], Any]:
    return lambda: {name: getattr(statistics, name) for name in _STATISTICS}


def _loader(statistics: Any) -> Callable[[Any], object]:
    def load(state: Mapping[str, Any]) -> None:
        values = [state[name] for name in _STATISTICS]  # all of them, or nothing is changed
        for name, value in zip(_STATISTICS, values, strict=True):
            now = getattr(statistics, name)
            shape, wanted = getattr(value, "shape", ()), getattr(now, "shape", ())
            if shape != wanted:
                raise ValueError(f"{name} has shape {shape}, and {wanted} is wanted")
        for name, value in zip(_STATISTICS, values, strict=True):
            setattr(statistics, name, value)

    return load
