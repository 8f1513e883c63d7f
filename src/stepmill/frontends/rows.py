"""Rows out of batches and into them, by the tree of their structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf, Node, TupleNode, map_tree


def first_row(node: Node, batch: Any) -> Any:
    """Return the first row of a batch, in the structure of a tree. Arrays are views of the batch's."""
    return map_tree(lambda _, column: column[0], node, batch)


def take_rows(node: Node, actions: Any, rows: Sequence[int], num_rows: int) -> Any:
    """Return some of `num_rows` actions, in the structure of a tree.

    Raises:
        UsageError: they have not the structure of the tree, or are more or fewer.
    """

    def take(_: Node, column: Any) -> Any:
        if len(column) != num_rows:
            raise UsageError(f"there are {len(column)} actions for {num_rows} envs; give one for each")
        return column[list(rows)] if isinstance(column, np.ndarray) else [column[row] for row in rows]

    try:
        return map_tree(take, node, actions)
    except (KeyError, IndexError, TypeError) as exc:
        raise UsageError(
            f"the actions are no batch of the action space: {type(exc).__name__}: {exc}; give one with all its parts"
        ) from exc


def stack_rows(node: Node, values: Sequence[Any], path: str = "action") -> Any:
    """Return a sequence of values, each of one env, as a batch.

    Raises:
        UsageError: one of them has not the structure of the tree.
    """
    if isinstance(node, Leaf):
        return np.asarray(values)
    try:
        if isinstance(node, DictNode):
            return {
                key: stack_rows(child, [value[key] for value in values], f"{path}[{key!r}]")
                for key, child in node.items
            }
        if isinstance(node, TupleNode):
            return tuple(
                stack_rows(child, [value[place] for value in values], f"{path}[{place}]")
                for place, child in enumerate(node.children)
            )
    except (KeyError, IndexError, TypeError) as exc:
        raise UsageError(f"{path} of an env lacks a part of the action space: {type(exc).__name__}: {exc}") from exc
    return tuple(values)


def as_batch(node: Node, value: Any, path: str = "action") -> Any:
    """Return one env's value as a batch of one.

    Raises:
        UsageError: it has not the structure of the tree.
    """
    if isinstance(node, Leaf):
        return np.asarray(value)[np.newaxis]
    try:
        if isinstance(node, DictNode):
            return {key: as_batch(child, value[key], f"{path}[{key!r}]") for key, child in node.items}
        if isinstance(node, TupleNode):
            children = [as_batch(child, value[place], f"{path}[{place}]") for place, child in enumerate(node.children)]
            return tuple(children) if node.factory is None else node.factory(*children)
    except (KeyError, IndexError, TypeError) as exc:
        raise UsageError(
            f"{path} is {value!r}, which lacks a part of the action spec; give a value of its structure"
        ) from exc
    return (value,)
