"""Trees number leaves and opaques in the order on which the slab, the native loop and the front-ends rely."""

import pickle
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import (
    DictNode,
    Leaf,
    LeafKind,
    Opaque,
    TupleNode,
    flatten,
    iter_tree,
    leaves,
    map_nest,
    map_tree,
    opaques,
    program,
    unflatten,
)

F4 = Leaf(np.dtype("f4"), (3,))
I8 = Leaf(np.dtype("i8"), (), LeafKind.DISCRETE)


class Pair(NamedTuple):
    left: object
    right: object


ends = st.sampled_from([F4, I8, Opaque(), Leaf(np.dtype("u1"), (), LeafKind.SCALAR)])
trees = st.recursive(
    ends,
    lambda inner: (
        st.dictionaries(st.text("abc", min_size=1), inner, max_size=3).map(lambda items: DictNode(tuple(items.items())))
        | st.lists(inner, max_size=3).map(lambda children: TupleNode(tuple(children)))
        | st.tuples(inner, inner).map(lambda children: TupleNode(children, Pair))
    ),
    max_leaves=8,
)
NESTED = DictNode((("b", TupleNode((I8, Opaque(), F4))), ("a", Opaque()), (3, F4)))


def test_leaves_and_opaques_have_paths_and_numbers_of_their_own():
    assert leaves(NESTED) == [("['b'][0]", I8), ("['b'][2]", F4), ("[3]", F4)]
    assert opaques(NESTED) == ["['b'][1]", "['a']"]
    assert leaves(F4) == [("", F4)]
    assert opaques(Opaque()) == [""]


def test_a_program_is_nested_tuples_of_plain_values():
    children = ((2, ((0, 0, 2), (3, 0), (0, 1, 0)), None), (3, 1), (0, 2, 0))
    assert program(NESTED) == (1, ("b", "a", 3), children)
    assert type(program(F4)[2]) is int
    assert program(TupleNode((F4, F4), Pair)) == (2, ((0, 0, 0), (0, 1, 0)), Pair)


def take_apart(node, value, arrays, columns):
    if isinstance(node, DictNode):
        for key, child in node.items:
            take_apart(child, value[key], arrays, columns)
    elif isinstance(node, TupleNode):
        assert type(value) is (node.factory or tuple)
        for place, child in enumerate(node.children):
            take_apart(child, value[place], arrays, columns)
    else:
        (arrays if isinstance(node, Leaf) else columns).append(value)


@given(trees)
def test_unflatten_puts_every_value_where_its_number_says(tree):
    arrays = [f"array {index}" for index in range(len(leaves(tree)))]
    columns = [f"column {index}" for index in range(len(opaques(tree)))]
    found_arrays, found_columns = [], []
    take_apart(tree, unflatten(tree, arrays, columns), found_arrays, found_columns)
    assert (found_arrays, found_columns) == (arrays, columns)


@given(trees, trees)
def test_specs_are_compatible_exactly_if_their_trees_are_equal(one, other):
    spec = EnvSpec(observation=one, action=I8, spaces=b"x", metadata={"fps": 1})
    assert spec.is_compatible(EnvSpec(observation=other, action=I8)) == (one == other)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_batched_envs_are_not_compatible_with_single_ones():
    single = EnvSpec(observation=F4, action=I8)
    assert not single.is_compatible(EnvSpec(observation=F4, action=I8, is_batched=True))
    assert not single.is_compatible(EnvSpec(observation=F4, action=I8, is_batched=True, batch_size=2))


@given(trees)
def test_a_value_taken_apart_and_put_together_is_the_same(tree):
    parts = [f"part {place}" for place, _ in enumerate(iter_tree(tree))]
    ends = [end for _, end in iter_tree(tree)]
    by_kind = [[p for p, end in zip(parts, ends, strict=True) if isinstance(end, kind)] for kind in (Leaf, Opaque)]

    value = unflatten(tree, *by_kind)

    assert flatten(tree, value) == parts
    seen = []
    assert map_tree(lambda end, part: seen.append((end, part)) or part, tree, value) == value
    assert seen == list(zip(ends, parts, strict=True))
    assert map_nest(lambda part: part, value) == value


def test_a_nest_is_mapped_with_others_like_it_in_classes_of_its_own():
    first, second = {"a": [1, (2, 3)], "b": Pair(4, 5)}, {"b": (50, 40), "a": ([10, (20, 30)])}

    mapped = map_nest(lambda left, right: left + right, first, second)

    assert mapped == {"a": [11, (22, 33)], "b": Pair(54, 45)}
    assert type(mapped["b"]) is Pair
