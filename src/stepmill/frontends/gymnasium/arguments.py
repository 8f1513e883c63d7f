"""Reads what users give to `VectorEnv` and its `reset`; never changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.frontends.gymnasium.errors import ArgumentTypeError
from stepmill.spec.errors import UsageError
from stepmill.spec.options import OPTION_NAMES, OptionKeywords

_WITHOUT_EFFECT = ("shared_memory", "daemon")


class VectorKeywords(OptionKeywords, total=False):
    """The fields of PoolOptions, and what `gymnasium.vector.AsyncVectorEnv` takes beside them.

    Attributes:
        shared_memory, daemon: taken and not needed: observations always lie in shared memory, whatever their space, and
            workers may start processes and end with the program.
        worker: refused, unless it is None.
    """

    shared_memory: bool
    daemon: bool
    worker: None


VECTOR_NAMES = (*OPTION_NAMES, *_WITHOUT_EFFECT, "worker", "observation_mode", "options")
"""What `VectorEnv` takes by name."""


def read_keywords(keywords: VectorKeywords) -> dict[str, Any]:
    """Return the fields of PoolOptions out of the keyword arguments of a `VectorEnv`.

    Raises:
        UsageError: a worker function is given.
    """
    if keywords.get("worker") is not None:
        raise UsageError(
            "stepmill runs its own loop in its workers and takes no worker; reach into the envs by call(), get_attr() and "
            "set_attr(), or wrap them"
        )
    read = {name: value for name, value in keywords.items() if name not in (*_WITHOUT_EFFECT, "worker")}
    if read.get("context", "") is None:  # Gymnasium's default, which leaves it to multiprocessing
        del read["context"]
    return read


def read_options(options: object, num_envs: int) -> tuple[NDArray[np.bool_] | None, dict[str, Any] | None]:
    """Return the reset mask out of the options of a reset, and the options without it.

    Raises:
        ArgumentTypeError: they are no mapping, or the mask is no array of bools.
        UsageError: the mask has another shape than [N], or nothing is to be reset.
    """
    if options is None:
        return None, None
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(f"reset(options={options!r}) is a {type(options).__name__}; give a dict, or None")
    rest = dict(options)
    mask = rest.pop("reset_mask", None)
    if "reset_mask" not in options:
        return None, rest
    return read_mask(mask, num_envs), rest


def read_mask(mask: object, num_envs: int) -> NDArray[np.bool_]:
    """Return a reset mask, checked.

    Raises:
        ArgumentTypeError: it is no array of bools.
        UsageError: it has another shape than [N], or nothing is to be reset.
    """
    wanted = f"options['reset_mask'] must be an array or a list of bools, of shape ({num_envs},) with at least one True"
    if isinstance(mask, (list, tuple)) and all(isinstance(each, (bool, np.bool_)) for each in mask):
        mask = np.array(mask, np.bool_)
    if not isinstance(mask, np.ndarray):
        raise ArgumentTypeError(f"{wanted}, and is a {type(mask).__name__}")
    if mask.shape != (num_envs,):
        raise UsageError(f"{wanted}, and has shape {mask.shape}")
    if mask.dtype != np.bool_:
        raise ArgumentTypeError(f"{wanted}, and has dtype {mask.dtype}")
    if not mask.any():
        raise UsageError(f"{wanted}, and has none")
    return mask
