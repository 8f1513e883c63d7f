"""Reads what users give to `VectorEnv.reset`; never changes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepmill.frontends.gymnasium.errors import ArgumentTypeError
from stepmill.spec.errors import UsageError


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
