"""The structure of an observation or an action, as a tree that does not depend on Gymnasium.

    Leaf      an array of fixed dtype and shape: one field of the slab
    DictNode  keys and children
    TupleNode children, and the class that makes the tuple if it is a named tuple
    Opaque    a value without a fixed size, which is not in the arrays

Leaves and opaques are numbered separately, each from 0, in depth-first order. That order is the contract between the
slab, the native loop and the front-ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

PLAIN_DTYPE_KINDS = "biufc"  # bool, integers, float, complex: the dtypes of fixed size without references


class LeafKind(IntEnum):
    """The type of a leaf's value in the env."""

    ARRAY = 0  # an array of the leaf's shape
    SCALAR = 1  # a NumPy scalar: a Box of shape ()
    DISCRETE = 2  # a NumPy integer; the engine reuses objects for small ones


@dataclass(frozen=True)
class Leaf:
    """An array of fixed dtype and shape.

    Attributes:
        dtype: the dtype of the array. It is not structured, and not object.
        shape: the shape for one env, without a batch dimension.
        kind: the type of one value in the env.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    kind: LeafKind = LeafKind.ARRAY


@dataclass(frozen=True)
class DictNode:
    """A dict. Its items are in the order of the env's space, and so are the dicts that are returned."""

    items: tuple[tuple[Hashable, Node], ...]


@dataclass(frozen=True)
class TupleNode:
    """A tuple, or the result of a factory that is called with the children: a named tuple, or a list (`as_list`).

    Factories are compared by name: each worker sends its own copy of a class that is defined in a script or a function.
    """

    children: tuple[Node, ...]
    factory: Callable[..., object] | None = field(default=None, compare=False)
    name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = "" if self.factory is None else f"{self.factory.__module__}.{self.factory.__qualname__}"
        object.__setattr__(self, "name", name)


def as_list(*items: object) -> list[object]:
    """Return a list of its arguments. It is the factory of a TupleNode that is a list."""
    return list(items)


@dataclass(frozen=True)
class Opaque:
    """A value without a fixed size: a text, a sequence, a graph, or a value of a custom space."""


Node: TypeAlias = Leaf | DictNode | TupleNode | Opaque
Path: TypeAlias = str  # the index expression, for example "['camera'][0]"; empty for the root


def iter_tree(node: Node, path: Path = "") -> Iterator[tuple[Path, Leaf | Opaque]]:
    """Yield every leaf and every opaque with its path, depth first."""
    if isinstance(node, DictNode):
        for key, child in node.items:
            yield from iter_tree(child, f"{path}[{key!r}]")
    elif isinstance(node, TupleNode):
        for index, child in enumerate(node.children):
            yield from iter_tree(child, f"{path}[{index}]")
    else:
        yield path, node


def leaves(node: Node) -> list[tuple[Path, Leaf]]:
    """Return the leaves with their paths. The position in the list is the leaf index."""
    return [(path, part) for path, part in iter_tree(node) if isinstance(part, Leaf)]


def opaques(node: Node) -> list[Path]:
    """Return the paths of the opaque parts. The position in the list is the opaque index."""
    return [path for path, part in iter_tree(node) if isinstance(part, Opaque)]


def program(node: Node) -> tuple[object, ...]:
    """Return the tree as the nested tuples that native code reads.

    `(0, leaf_index, kind)` leaf · `(1, keys, children)` dict · `(2, children, factory | None)` tuple ·
    `(3, opaque_index)` opaque; kind is a plain int.
    """
    return _program(node, itertools.count(), itertools.count())


def _program(node: Node, next_leaf: Iterator[int], next_opaque: Iterator[int]) -> tuple[object, ...]:
    if isinstance(node, Leaf):
        return (0, next(next_leaf), int(node.kind))
    if isinstance(node, DictNode):
        keys = tuple(key for key, _ in node.items)
        return (1, keys, tuple(_program(child, next_leaf, next_opaque) for _, child in node.items))
    if isinstance(node, TupleNode):
        children = tuple(_program(child, next_leaf, next_opaque) for child in node.children)
        return (2, children, node.factory)
    return (3, next(next_opaque))


def unflatten(node: Node, arrays: Sequence[object], opaque_columns: Sequence[object] = ()) -> object:
    """Return arrays and opaque columns in the tree's structure: dicts, tuples, named tuples.

    Args:
        node: the tree.
        arrays: one array per leaf, in the order of `leaves(node)`. For a batch, each is [B, ...].
        opaque_columns: one column per opaque, in the order of `opaques(node)`. For a batch, each is a tuple of B
            values.
    """
    return _unflatten(node, iter(arrays), iter(opaque_columns))


def _unflatten(node: Node, arrays: Iterator[object], columns: Iterator[object]) -> object:
    if isinstance(node, Leaf):
        return next(arrays)
    if isinstance(node, DictNode):
        return {key: _unflatten(child, arrays, columns) for key, child in node.items}
    if isinstance(node, TupleNode):
        children = [_unflatten(child, arrays, columns) for child in node.children]
        return tuple(children) if node.factory is None else node.factory(*children)
    return next(columns)


def flatten(node: Node, value: Any) -> list[Any]:
    """Return the parts of a value that has the tree's structure, depth first.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the value has another structure.
    """
    if isinstance(node, DictNode):
        return [part for key, child in node.items for part in flatten(child, value[key])]
    if isinstance(node, TupleNode):
        children = zip(node.children, value, strict=True)
        return [part for child, each in children for part in flatten(child, each)]
    return [value]


def map_tree(function: Callable[[Leaf | Opaque, Any], Any], node: Node, value: Any) -> Any:
    """Return a value of the tree's structure in which `function(leaf or opaque, part)` replaces each part."""
    if isinstance(node, DictNode):
        return {key: map_tree(function, child, value[key]) for key, child in node.items}
    if isinstance(node, TupleNode):
        children = [map_tree(function, child, value[index]) for index, child in enumerate(node.children)]
        return tuple(children) if node.factory is None else node.factory(*children)
    return function(node, value)


def map_nest(function: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Return a nest of dicts, lists, tuples and named tuples with the function applied to its leaves.

    Args:
        function: a function that takes one leaf of each nest.
        nest: the first nest.
        *others: further nests of the same structure.
    """
    if isinstance(nest, Mapping):
        return {key: map_nest(function, child, *(other[key] for other in others)) for key, child in nest.items()}
    if isinstance(nest, (tuple, list)):
        children = [map_nest(function, *parts) for parts in zip(nest, *others, strict=True)]
        if hasattr(nest, "_fields"):
            return type(nest)(*children)
        return children if isinstance(nest, list) else tuple(children)
    return function(nest, *others)
