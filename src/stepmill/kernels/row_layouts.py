"""Rows of observations and actions as kernels see them, and back to values as Gymnasium's spaces have them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.envs.gymnasium import pickle_spaces, tree_of
from stepmill.spec.batch import ENGINE_INFO_KEYS
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.kernel import RowLayout, zero_infos
from stepmill.spec.tree import DictNode, Leaf, Node, TupleNode

_MAX_INFOS = 100
_KEY_BYTES = 40  # per info in a payload, more than the codec adds to a name and a value


def describe_spaces(
    observation: spaces.Space[Any], action: spaces.Space[Any], infos: np.dtype[Any] | None = None
) -> EnvSpec:
    """Return the spec of an env with these spaces and infos."""
    leaves = tuple((name, Leaf(value.dtype, value.shape)) for name, value in zero_infos(infos))
    return EnvSpec(
        observation=tree_of(observation, "observation_space"),
        action=tree_of(action, "action_space"),
        info=DictNode(leaves),
        spaces=pickle_spaces(observation, action, None),
        payload_bytes=sum(
            leaf.dtype.itemsize * int(np.prod(leaf.shape)) + _KEY_BYTES + len(name) for name, leaf in leaves
        ),
    )


def check_infos(infos: Any, name: str) -> np.dtype[Any] | None:
    """Return the dtype of a kernel's infos.

    Raises:
        UsageError: the dtype has no named fields, fields that are neither numbers nor arrays of numbers, or names that
            the pool uses.
    """
    if infos is None:
        return None
    dtype: np.dtype[Any] = np.dtype(infos, align=True)
    kinds = {field: dtype[field].base.kind for field in dtype.names or ()}
    wrong = sorted(field for field, kind in kinds.items() if kind not in "biuf" or field in ENGINE_INFO_KEYS)
    if not kinds or wrong or len(kinds) > _MAX_INFOS:
        raise UsageError(
            f"the infos {dtype} of the kernel {name} must be 1 to {_MAX_INFOS} named numbers or arrays of numbers"
            f"{f', and {wrong} are not, or are names that pools use themselves' if wrong else ''}; give "
            "np.dtype([('speed', 'f8'), ...])"
        )
    return dtype


def row_layout(node: Node, name: str) -> RowLayout:
    """Return how a kernel sees one row.

    Raises:
        UsageError: the space has parts of no fixed size, or a Dict or Tuple within another.
    """
    if isinstance(node, Leaf):
        return RowLayout(dtype=node.dtype, shape=node.shape, offsets=(0,))
    items: tuple[tuple[Any, Node], ...] = ()
    if isinstance(node, DictNode):
        items = node.items
    elif isinstance(node, TupleNode):
        items = tuple((f"f{place}", child) for place, child in enumerate(node.children))
    if not items or not all(isinstance(child, Leaf) and isinstance(key, str) for key, child in items):
        raise UsageError(
            f"{name} is not a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of those; give one of these"
        )
    fields = [(key, child.dtype, child.shape) for key, child in items if isinstance(child, Leaf)]
    dtype = np.dtype(fields, align=True)
    offsets = tuple(int(dtype.fields[key][1]) for key, _ in items) if dtype.fields else ()
    return RowLayout(dtype=dtype, shape=(), offsets=offsets)


def make_row(layout: RowLayout) -> NDArray[Any]:
    """Return zeroed memory for a row: an array of its shape, or of shape [1] if it is a single number or a record."""
    return np.zeros(layout.shape or (1,), layout.dtype)


def row_argument(layout: RowLayout, row: NDArray[Any], *, is_action: bool) -> Any:
    """Return the argument of a kernel's function for a row: an array, a record, or the number if an action is one."""
    if layout.dtype.names is not None:
        return row.view(np.recarray)[0]
    return row[0] if is_action and not layout.shape else row


def read_row(node: Node, row: NDArray[Any]) -> Any:
    """Return a copy of a row as the value of its space."""
    if isinstance(node, Leaf):
        return row[0] if not node.shape else row.copy()
    if isinstance(node, DictNode):
        return {key: copy_value(row[0][str(key)]) for key, _ in node.items}
    assert isinstance(node, TupleNode)
    return tuple(copy_value(row[0][f"f{place}"]) for place in range(len(node.children)))


def write_row(node: Node, row: NDArray[Any], value: Any) -> None:
    """Write a value of a space into a row."""
    if isinstance(node, Leaf):
        row[...] = value
    elif isinstance(node, DictNode):
        for key, _ in node.items:
            row[0][str(key)] = value[key]
    elif isinstance(node, TupleNode):
        for place, part in enumerate(value):
            row[0][f"f{place}"] = part


def copy_value(value: Any) -> Any:
    """Return a part of a record that does not share its memory."""
    return value.copy() if isinstance(value, np.ndarray) else value
