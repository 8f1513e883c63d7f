"""The kernels that come with stepmill, by the ids of their envs."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

import numpy as np

from stepmill.kernels.mujoco_tasks import IDS as MUJOCO_IDS
from stepmill.kernels.mujoco_tasks import make_mujoco, mujoco_arguments
from stepmill.kernels.python import PythonKernel
from stepmill.kernels.toy_text import make_tabular, tabular_arguments
from stepmill.spec.errors import UsageError

_MAKERS = {
    "CartPole-v1": "classic_control:make_cartpole",
    "MountainCar-v0": "classic_control:make_mountain_car",
    "MountainCarContinuous-v0": "classic_control:make_mountain_car_continuous",
    "Pendulum-v1": "classic_control:make_pendulum",
    "Acrobot-v1": "classic_control:make_acrobot",
    "Blackjack-v1": "toy_text:make_blackjack",
    "stepmill/Catch84-v0": "catch:make_catch",
}
_TABULAR = ("FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4", "CliffWalking-v1", "CliffWalkingSlippery-v1")
_LIMIT = "max_episode_steps"
_MADE_OF_FILES: dict[tuple[object, ...], PythonKernel] = {}  # kernels with a model of the user, by identity, too


def names() -> tuple[str, ...]:
    """Return the ids of the kernels that come with stepmill."""
    return (*_MAKERS, *_TABULAR, *MUJOCO_IDS)


def find(id: str, **arguments: object) -> PythonKernel:  # noqa: A002  Gymnasium's name
    """Return the kernel of an id.

    Args:
        id: one of `names()`.
        **arguments: arguments of Gymnasium's env of this id, with the same meaning; and max_episode_steps as for
            `gymnasium.make`: -1 means no limit, None the registered limit.
    Raises:
        UsageError: there is no such kernel, or it does not take an argument. The message lists the kernels, or the
            arguments that the kernel takes.
    """
    if id not in names():
        raise UsageError(
            f"there is no kernel for {id!r}; there are {', '.join(names())}, or write one: docs/kernels.md. "
            "Other backends run every env"
        )
    takes = _arguments_of(id)
    unknown = sorted(arguments.keys() - takes.keys() - {_LIMIT})
    if unknown:
        taken = ", ".join(f"{name}={default!r}" for name, default in takes.items())
        raise UsageError(
            f"the kernel {id} does not take {', '.join(unknown)}; it takes {taken}{', ' * bool(taken)}{_LIMIT}=None. Other "
            "backends run Gymnasium's own env"
        )
    given = {name: _converted(id, name, value, takes[name]) for name, value in arguments.items() if name != _LIMIT}
    key = id, tuple(sorted(given.items())), _limit(arguments.get(_LIMIT))
    if "xml_file" not in given:
        return _make(*key)
    fresh = _make.__wrapped__(*key)  # the file, or one that it refers to, may have been edited
    return _MADE_OF_FILES.setdefault((*key, fresh.identity), fresh)


@cache
def _make(id: str, given: tuple[tuple[str, object], ...], limit: int | None) -> PythonKernel:  # noqa: A002
    if limit is not None:
        make = _make.__wrapped__ if "xml_file" in dict(given) else _make
        made = make(id, given, None).with_limit(limit)
    elif id in MUJOCO_IDS:
        made = make_mujoco(id, dict(given))
    elif id in _TABULAR:
        made = make_tabular(id, dict(given))
    else:
        made = _maker(id)(**dict(given))
    arguments = dict(given) if limit is None else {**dict(given), _LIMIT: limit or -1}
    made.find_again = partial(_find_again, id, arguments)
    return made


def _find_again(id: str, arguments: dict[str, object], identity: str) -> PythonKernel:  # noqa: A002
    found = find(id, **arguments)
    if found.identity != identity:
        raise UsageError(f"the model of {id} {arguments} differs from that of the pool's program; make a new pool")
    return found


def _maker(id: str) -> Callable[..., PythonKernel]:  # noqa: A002
    module, _, name = _MAKERS[id].partition(":")
    maker: Callable[..., PythonKernel] = getattr(import_module(f"stepmill.kernels.{module}"), name)
    return maker


def _arguments_of(id: str) -> Mapping[str, object]:  # noqa: A002
    """Return the arguments of a kernel, with their default values."""
    if id in MUJOCO_IDS:
        return mujoco_arguments(id)
    if id in _TABULAR:
        return tabular_arguments(id)
    return {name: parameter.default for name, parameter in inspect.signature(_maker(id)).parameters.items()}


# ---- values ------------------------------------------------------------------------------------------------------------


def _limit(value: object) -> int | None:
    """Return the time limit in steps: 0 for no limit, and None for the registered one."""
    if value is None:
        return None
    limit = _whole_number(value)
    if limit is None or (limit < 1 and limit != -1):
        raise UsageError(
            f"max_episode_steps={value!r} must be 1 or more, -1 for no limit, or None for the registered one"
        )
    return max(limit, 0)


def _converted(id: str, name: str, value: Any, default: object) -> Any:  # noqa: A002
    """Return an argument with the type of its default value, and hashable.

    Raises:
        UsageError: the argument has another type.
    """
    found: Any = None
    if isinstance(default, bool):
        found, wanted = bool(value) if isinstance(value, (bool, np.bool_)) else None, "True or False"
    elif isinstance(default, int) and not (name == "main_body" and isinstance(value, str)):
        found, wanted = _whole_number(value), "a whole number"
    elif isinstance(default, float):
        found, wanted = _number(value), "a number"
    elif isinstance(default, str):
        found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
        wanted = "a str"
    elif isinstance(default, tuple):
        numbers = tuple(map(_number, value)) if isinstance(value, (tuple, list, np.ndarray)) else ()
        found = numbers if len(numbers) == len(default) and None not in numbers else None
        wanted = f"{len(default)} numbers"
    else:
        return _frozen(name, value)
    if found is None and not (value is None and name == "map_name"):  # Gymnasium's envs take None only for this one
        raise UsageError(f"{name}={value!r} of the kernel {id} must be {wanted}, as {default!r} is")
    return found


def _whole_number(value: Any) -> int | None:
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _frozen(name: str, value: Any) -> Any:
    """Return lists and arrays as tuples."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(name, item) for item in value)
    if not isinstance(value, Hashable):
        raise UsageError(f"{name} has a {type(value).__name__} in it; give numbers, strings, or lists of them")
    return value
