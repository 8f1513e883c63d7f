"""Hypothesis strategies for Gymnasium spaces of every kind, nested to any depth."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st

from stepmill.testing.sampled import DTYPES

FLOATS = tuple(dtype for dtype in DTYPES if np.issubdtype(dtype, np.floating))
SHAPES = [(), (1,), (3,), (2, 2), (1, 2, 3), (0,), (2, 0)]
# Of at least 16 KiB for two envs, so that they are lent and not copied.
LARGE_SHAPES = [(2048,), (33, 100, 3)]

Space = gymnasium.Space[Any]


def _quiet_box(low: float, high: float, shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns of precision lost by float16 bounds
        return spaces.Box(low, high, shape, dtype)


@st.composite
def boxes(draw: st.DrawFn, shapes: list[tuple[int, ...]] = SHAPES) -> spaces.Box:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(shapes))
    if dtype is np.bool_:
        return _quiet_box(0, 1, shape, dtype)
    if dtype in FLOATS and draw(st.booleans()):
        return _quiet_box(-np.inf, np.inf, shape, dtype)
    low = 0 if np.issubdtype(dtype, np.unsignedinteger) else -20
    return _quiet_box(low, 100, shape, dtype)


@st.composite
def discretes(draw: st.DrawFn) -> spaces.Discrete:
    dtype = draw(st.sampled_from([np.int64, np.int64, np.int32, np.int16, np.uint8]))
    start = draw(st.integers(0 if dtype is np.uint8 else -30, 30))
    num = draw(st.sampled_from([1, 2, 7, 60, *([3000] if dtype is not np.uint8 else [])]))
    return spaces.Discrete(num, start=start, dtype=dtype)


@st.composite
def multi_discretes(draw: st.DrawFn) -> spaces.MultiDiscrete:
    dtype = draw(st.sampled_from([np.int64, np.int32, np.int8, np.uint16]))
    nvec = draw(st.sampled_from([[2, 3], [5], [[2, 3], [4, 5]]]))
    start = draw(st.sampled_from([None, np.full(np.shape(nvec), 3)]))
    return spaces.MultiDiscrete(np.array(nvec), dtype=dtype, start=start)


def multi_binaries() -> st.SearchStrategy[spaces.MultiBinary]:
    return st.sampled_from([1, 5, (2, 3)]).map(spaces.MultiBinary)


def fixed_leaves() -> st.SearchStrategy[Space]:
    return st.one_of(boxes(), discretes(), multi_discretes(), multi_binaries())


@st.composite
def graphs(draw: st.DrawFn) -> spaces.Graph:
    node = draw(st.sampled_from([spaces.Box(-1, 1, (2,)), spaces.Discrete(3)]))
    edge = draw(st.sampled_from([None, spaces.Box(0, 1, (1, 2)), spaces.Discrete(4)]))
    return spaces.Graph(node, edge)


def variable_leaves() -> st.SearchStrategy[Space]:
    simple = st.one_of(boxes([(2,), ()]), discretes())
    return st.one_of(
        st.integers(1, 20).map(lambda length: spaces.Text(length, min_length=0)),
        st.just(spaces.Text(8, charset="ab\u2603")),
        st.builds(spaces.Sequence, simple, stack=st.booleans()),
        graphs(),
        st.lists(simple, min_size=1, max_size=3).map(spaces.OneOf),
    )


def _nest(children: st.SearchStrategy[Space]) -> st.SearchStrategy[Space]:
    keys = st.sampled_from(["a", "b", "camera", "0", "a.b", "\u2603"])
    return st.one_of(
        st.dictionaries(keys, children, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(children, min_size=1, max_size=3).map(spaces.Tuple),
    )


def fixed_spaces() -> st.SearchStrategy[Space]:
    """Spaces whose every leaf has a fixed size."""
    return st.recursive(fixed_leaves(), _nest, max_leaves=6)


def any_spaces() -> st.SearchStrategy[Space]:
    """Spaces with Text, Sequence, Graph and OneOf among their leaves, too."""
    return st.recursive(st.one_of(fixed_leaves(), fixed_leaves(), variable_leaves()), _nest, max_leaves=6)


def large_spaces() -> st.SearchStrategy[Space]:
    """Spaces with at least one leaf large enough to be lent."""
    large = boxes(LARGE_SHAPES)
    return st.one_of(
        large, st.builds(lambda big, other: spaces.Dict({"big": big, "other": other}), large, any_spaces())
    )
