"""Reads what users give to `VectorEnv.reset`; never changes it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill.frontends.gymnasium.errors import ArgumentTypeError
from stepmill.spec.errors import UsageError

Seeds: TypeAlias = int | Sequence[int | None] | None


def read_seeds(seed: Seeds, num_envs: int) -> int | list[int | None] | None:
    """Return seeds as an int, a list of N, or None.

    Raises:
        UsageError: a list of another length, or something that is no whole number.
    """
    if seed is None or isinstance(seed, (int, np.integer)):
        return None if seed is None else _read_seed(seed)
    try:
        seeds = [None if one is None else _read_seed(one) for one in seed]
    except TypeError:
        raise ArgumentTypeError(f"seed={seed!r} is neither an int, a list of {num_envs}, nor None") from None
    if len(seeds) != num_envs:
        raise UsageError(f"seed has {len(seeds)} entries for {num_envs} envs; give one per env, or one int for all")
    return seeds


def _read_seed(seed: object) -> int:
    if isinstance(seed, (bool, np.bool_)):
        raise ArgumentTypeError(f"seed={seed!r} is a bool; give a whole number")
    return operator.index(seed)  # type: ignore[arg-type]  # the TypeError is the caller's message


def read_mask(mask: object, num_envs: int) -> NDArray[np.bool_]:
    """Return a reset mask, checked.

    Raises:
        ArgumentTypeError: it is no array of bools.
        UsageError: it has another shape than [N], or nothing is to be reset.
    """
    wanted = f"options['reset_mask'] must be a bool array of shape ({num_envs},) with at least one True"
    if not isinstance(mask, np.ndarray):
        raise ArgumentTypeError(f"{wanted}, and is a {type(mask).__name__}")
    if mask.shape != (num_envs,):
        raise UsageError(f"{wanted}, and has shape {mask.shape}")
    if mask.dtype != np.bool_:
        raise ArgumentTypeError(f"{wanted}, and has dtype {mask.dtype}")
    if not mask.any():
        raise UsageError(f"{wanted}, and has none")
    return mask
