"""Converts nests of arrays to nests of tensors and back, with functions that are built once per structure.

Only this module imports torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepmill.frontends.alf import errors
from stepmill.spec.errors import needs_extra
from stepmill.spec.tree import DictNode, Leaf, Node, TupleNode, leaves

Convert = Callable[[Any], Any]


def is_torch_here() -> bool:
    """Whether torch is installed. Does not import it."""
    return sys.modules.get("torch") is not None or importlib.util.find_spec("torch") is not None


def to_tensor() -> Convert:
    """Return the function that makes a CPU tensor over the memory of an array.

    Raises:
        MissingExtraError: torch is not installed.
    """
    convert: Convert = _torch().from_numpy  # torch does not warn: the pool's arrays are writable
    return convert


def mover(device: object) -> Convert | None:
    """Return the function that copies a tensor to a device; None for the CPU."""
    target = _torch().device(device)
    return None if target.type == "cpu" else lambda tensor: tensor.to(target)


def to_array(value: Any) -> Any:
    """Return a tensor of any device as an array; other values unchanged. Hot path."""
    if not hasattr(value, "detach"):
        return value
    try:
        return value.numpy()  # works for CPU tensors without gradients, and saves two calls
    except (TypeError, RuntimeError):
        return value.detach().cpu().numpy()


def default_device() -> object:
    """Return ALF's default device if ALF is imported, else "cpu"."""
    get_device = getattr(sys.modules.get("alf"), "get_default_device", None)
    return "cpu" if get_device is None else get_device()


def _torch() -> Any:
    with needs_extra("torch", "torch", ImportError):
        import torch
    return torch


def converter(node: Node, leaf: Convert) -> Convert:
    """Return the function that maps `leaf` over nests of a structure."""
    if not leaves(node):
        return _unchanged
    if isinstance(node, DictNode):
        items = [(key, converter(child, leaf)) for key, child in node.items]
        return lambda nest: {key: convert(nest[key]) for key, convert in items}
    if isinstance(node, TupleNode):
        parts = [converter(child, leaf) for child in node.children]
        factory = local_class(node.factory)
        if factory is None:
            return lambda nest: tuple([convert(child) for convert, child in zip(parts, nest, strict=True)])
        return fields_converter(factory, parts)
    return leaf


def fields_converter(factory: Callable[..., Any], parts: Sequence[Convert]) -> Convert:
    """Return the function that makes a named tuple of converted fields."""
    return lambda nest: factory(*[convert(child) for convert, child in zip(parts, nest, strict=True)])


def _unchanged(nest: Any) -> Any:
    return nest


def check_actions(node: Node, actions: Any, num_rows: int, path: str = "action") -> None:
    """Raise an error that names the wrong part of actions that the engine has refused.

    Args:
        node: the structure of one row's action.
        actions: a nest of arrays.
        num_rows: the length of the leading dimension.
        path: the name of `actions` in errors.
    Raises:
        ActionError: for the first wrong part.
    """
    if isinstance(node, DictNode):
        keys = [key for key, _ in node.items]
        if not isinstance(actions, Mapping) or set(actions) != set(keys):
            found = sorted(map(str, actions)) if isinstance(actions, Mapping) else type(actions).__name__
            raise errors.wrong_structure(f"{path} must be a dict with the keys {keys}, but is {found}")
        for key, child in node.items:
            check_actions(child, actions[key], num_rows, f"{path}[{key!r}]")
    elif isinstance(node, TupleNode):
        if not isinstance(actions, (tuple, list)) or len(actions) != len(node.children):
            raise errors.wrong_structure(f"{path} must have {len(node.children)} parts, but is {_kind_of(actions)}")
        for index, child in enumerate(node.children):
            check_actions(child, actions[index], num_rows, f"{path}[{index}]")
    elif isinstance(node, Leaf):
        _check_leaf(node, actions, num_rows, path)


def _check_leaf(leaf: Leaf, value: Any, num_rows: int, path: str) -> None:
    if isinstance(value, (Mapping, tuple)):
        raise errors.wrong_structure(f"{path} must be one array, but is {_kind_of(value)}")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise errors.not_an_array(path, value) from None
    if array.dtype.kind not in "biufc" or type(value) in (bool, float, int):
        raise errors.not_an_array(path, value)
    if array.ndim == 0 or len(array) != num_rows:
        raise errors.wrong_batch(path, num_rows, len(array) if array.ndim else 0, array.shape)
    if array.shape[1:] != leaf.shape or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise errors.wrong_array(path, f"{leaf.dtype} of shape {(num_rows, *leaf.shape)}", array.dtype, array.shape)


def _kind_of(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list, Mapping)) else ""
    return f"a {type(value).__name__}{size}"


def local_class(cls: Any) -> Any:
    """Return the named tuple class of this process that has the name and the fields of `cls`; `cls` if there is none.

    A class that a script defines is pickled by value: the class that comes from a worker differs from the script's own.
    """
    known = sys.modules.get(getattr(cls, "__module__", ""))
    for name in getattr(cls, "__qualname__", "").split("."):
        known = getattr(known, name, None)
    has_same_fields = known is not None and getattr(known, "_fields", None) == getattr(cls, "_fields", ())
    return known if has_same_fields else cls


def with_local_classes(node: Node) -> Node:
    """Return a tree whose named tuples have the classes of this process."""
    if isinstance(node, DictNode):
        return DictNode(tuple((key, with_local_classes(child)) for key, child in node.items))
    if isinstance(node, TupleNode):
        return TupleNode(tuple(map(with_local_classes, node.children)), local_class(node.factory))
    return node


def with_attributes(cls: Any) -> Any:
    """Return a named tuple class whose instances can have attributes: `cls`, or a subclass of the same name."""
    if cls is None or cls.__dictoffset__:
        return cls
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
