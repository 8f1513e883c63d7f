"""Agents as a dimension: makes trees and arrays [A, ...] of those of single agents, and returns one agent's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf, Node, TupleNode, flatten, leaves, map_tree, opaques, unflatten


def stack(trees: Sequence[Node]) -> Node:
    """Return one tree with leaves [A, ...] for A agents that have equal trees.

    Raises:
        UsageError: the trees differ, or have parts of no fixed size.
    """
    if any(tree != trees[0] for tree in trees) or opaques(trees[0]):
        raise UsageError(
            "the agents' spaces cannot be stacked, because they differ or have parts of no fixed size; give all agents the "
            "same space, of fixed size"
        )
    return _with_agents(trees[0], len(trees))


def _with_agents(node: Node, num_agents: int) -> Node:
    if isinstance(node, Leaf):
        return Leaf(node.dtype, (num_agents, *node.shape))
    if isinstance(node, DictNode):
        return DictNode(tuple((key, _with_agents(child, num_agents)) for key, child in node.items))
    if isinstance(node, TupleNode):
        return TupleNode(tuple(_with_agents(child, num_agents) for child in node.children), node.factory)
    return node


def stack_values(node: Node, values: Sequence[Any]) -> Any:
    """Stack one value per agent: return the structure of the tree `node` with arrays [A, ...]."""
    parts = zip(*(flatten(node, value) for value in values), strict=True)
    return unflatten(node, [np.stack([np.asarray(part) for part in own]) for own in parts])


def row_of(node: Node, value: Any, slot: int) -> Any:
    """Return one agent's part of a value with arrays [A, ...] in the structure of the tree `node`."""
    return map_tree(lambda _, array: array[slot], node, value)


def zeros(node: Node) -> Any:
    """Return zeros in the structure of a tree, and None for its parts of no fixed size."""
    arrays = [np.zeros(leaf.shape, leaf.dtype) for _, leaf in leaves(node)]
    return unflatten(node, arrays, [None] * len(opaques(node)))
