"""Checks the arguments of `VectorEnv` and of its `reset`, and changes none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import ArgumentTypeError, UsageError
from stepmill.spec.options import OPTION_NAMES, OptionKeywords, PoolOptions

_WITHOUT_EFFECT = ("shared_memory", "daemon")


class VectorKeywords(OptionKeywords, total=False):
    """The fields of PoolOptions, and further arguments of `gymnasium.vector.AsyncVectorEnv`.

    Attributes:
        shared_memory, daemon: accepted without effect, because observations are always in shared memory, and workers
            may always start processes and always end with the program.
        worker: must be None.
        max_concurrency: how many envs run at the same time. This is `num_workers`, because a worker runs one env at a time; of both,
            give one.
    """

    shared_memory: bool
    daemon: bool
    worker: None
    max_concurrency: int | None


VECTOR_NAMES = (*OPTION_NAMES, *_WITHOUT_EFFECT, "worker", "max_concurrency", "observation_mode", "options")
"""The keywords of `VectorEnv`."""


def check_positions(env_fns: object, misplaced: tuple[object, ...]) -> None:
    """Refuse arguments that follow `env_fns` by position.

    Raises:
        ArgumentTypeError: there are such arguments.
    """
    if misplaced and not callable(env_fns):  # a function in place of the list has a separate error
        raise ArgumentTypeError(
            f"VectorEnv got {', '.join(map(repr, misplaced))} by position after env_fns; give options by name, such as "
            "VectorEnv(env_fns, num_workers=4); the number of envs is the length of env_fns"
        )


def read_keywords(keywords: VectorKeywords, options: PoolOptions | None) -> dict[str, Any]:
    """Return the fields of PoolOptions among the keyword arguments of a `VectorEnv`.

    Raises:
        UsageError: a worker function is given, or max_concurrency is not a whole number from 1, or is given beside num_workers.
    """
    if keywords.get("worker") is not None:
        raise UsageError(
            "stepmill's workers run a loop of their own, which `worker` cannot replace; use call(), get_attr() and set_attr() "
            "to reach the envs, or wrap them"
        )
    own = ("worker", "max_concurrency", *_WITHOUT_EFFECT)
    read = {name: value for name, value in keywords.items() if name not in own}
    limit: Any = keywords.get("max_concurrency")
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)) or limit < 1:
            raise UsageError(f"max_concurrency={limit!r} must be a whole number, 1 or more, or None")
        if read.get("num_workers") is not None or (options is not None and options.num_workers is not None):
            raise UsageError(
                "max_concurrency and num_workers mean the same: how many envs run at once; give one of the two"
            )
        read["num_workers"] = int(limit)
    if read.get("context", "") is None:  # Gymnasium's default; stepmill has its own
        del read["context"]
    return read


def read_options(options: object, num_envs: int) -> tuple[NDArray[np.bool_] | None, dict[str, Any] | None]:
    """Return the reset mask in the options of a reset, and the other options.

    Raises:
        ArgumentTypeError: the options are not a mapping, or the mask is not an array of bools.
        UsageError: the shape of the mask is not [N], or the mask has no True.
    """
    if options is None:
        return None, None
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(f"reset(options={options!r}) is a {type(options).__name__}; give a dict, or None")
    mask = read_mask(options["reset_mask"], num_envs) if "reset_mask" in options else None
    return mask, {name: value for name, value in options.items() if name != "reset_mask"}


def read_mask(mask: object, num_envs: int) -> NDArray[np.bool_]:
    """Check a reset mask and return it as an array.

    Raises:
        ArgumentTypeError: the mask is not an array of bools.
        UsageError: the shape of the mask is not [N], or the mask has no True.
    """
    expected = (
        f"options['reset_mask'] must be an array or a list of bools, of shape ({num_envs},) with at least one True"
    )
    if isinstance(mask, (list, tuple)) and all(isinstance(each, (bool, np.bool_)) for each in mask):
        mask = np.array(mask, np.bool_)
    if not isinstance(mask, np.ndarray):
        raise ArgumentTypeError(f"{expected}; got a {type(mask).__name__}")
    if mask.shape != (num_envs,):
        raise UsageError(f"{expected}; got shape {mask.shape}")
    if mask.dtype != np.bool_:
        raise ArgumentTypeError(f"{expected}; got dtype {mask.dtype}")
    if not mask.any():
        raise UsageError(f"{expected}; got no True")
    return mask
