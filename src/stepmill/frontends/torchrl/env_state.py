"""Reads and writes, in a worker, the state of an env that lasts longer than an episode. This module does not import torch.

The state has parts, which the env and each of its wrappers contribute, from the outermost wrapper inwards:

    the result of its method `state_dict()`   part "MyEnv"
    an attribute with running statistics      part "NormalizeObservation.obs_rms": mean, var, count

If there are several wrappers of one class, the parts of the second begin with "MyEnv[1]", those of the third with "MyEnv[2]".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Parts: TypeAlias = dict[str, Any]
"""By name, the state of each part."""

_STATISTICS = ("mean", "var", "count")


@dataclass(frozen=True)
class _Part:
    name: str
    read: Callable[[], Any]
    load: Callable[[Any], object]


def read_parts(env: object) -> Parts:
    """Return a copy of the state of an env's parts; {} if it has none."""
    return {part.name: copy.deepcopy(part.read()) for part in _parts(env)}


def part_names(env: object) -> tuple[str, ...]:
    """Return the names of an env's parts without reading them."""
    return tuple(part.name for part in _parts(env))


def load_parts(env: object, state: Mapping[str, Any]) -> None:
    """Load the parts of an env that are in `state`; the others are not changed."""
    for part in _parts(env):
        if part.name in state:
            # A copy: on the thread and serial backends other envs receive the same objects.
            part.load(copy.deepcopy(state[part.name]))


def load_part(name: str, env: object, state: Mapping[str, Any]) -> None:
    """Load one part of an env from {name: state}; does nothing if the env has no such part."""
    load_parts(env, {name: state[name]})


def is_statistics(name: str) -> bool:
    """Whether the part with this name is running statistics."""
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
        # Looked up in the class: wrappers may forward attributes that they do not have to the env that they wrap.
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
        values = [state[name] for name in _STATISTICS]  # a missing key raises before anything is changed
        for name, value in zip(_STATISTICS, values, strict=True):
            now = getattr(statistics, name)
            shape, wanted = getattr(value, "shape", ()), getattr(now, "shape", ())
            if shape != wanted:
                raise ValueError(f"{name} has shape {shape}; it must have shape {wanted}")
        for name, value in zip(_STATISTICS, values, strict=True):
            setattr(statistics, name, value)

    return load
