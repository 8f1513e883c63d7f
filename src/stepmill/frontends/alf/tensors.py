"""Arrays as torch tensors. The one file of this front-end that knows torch; it is imported on use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from stepmill.spec.errors import MissingExtraError

Convert = Callable[[Any], Any]


def is_torch_here() -> bool:
    """Whether torch can be imported, as far as can be told without doing so."""
    return sys.modules.get("torch") is not None or importlib.util.find_spec("torch") is not None


def to_tensor() -> Convert:
    """Return the function that makes an array a CPU tensor over the same memory.

    Raises:
        MissingExtraError: there is no torch.
    """
    convert: Convert = _torch().from_numpy  # the pool's arrays are writable: torch has nothing to warn of
    return convert


def mover(device: object) -> Convert | None:
    """Return the function that copies a tensor to a device; None if it is the CPU, where tensors are."""
    target = _torch().device(device)
    return None if target.type == "cpu" else lambda tensor: tensor.to(target)


def to_array(value: Any) -> Any:
    """Return a tensor, of any device, as an array; what is none as it is. Hot path."""
    if not hasattr(value, "detach"):
        return value
    try:
        return value.numpy()  # on the CPU, and no part of a graph: two calls less
    except (TypeError, RuntimeError):
        return value.detach().cpu().numpy()


def default_device() -> object:
    """Return ALF's default device, if ALF is in use, else "cpu"."""
    get_device = getattr(sys.modules.get("alf"), "get_default_device", None)
    return "cpu" if get_device is None else get_device()


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise MissingExtraError(module="torch", extra="torch") from exc
    return torch
