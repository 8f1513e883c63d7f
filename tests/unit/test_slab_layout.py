"""Where the fields of a slab lie, and who can write them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmill import _native
from stepmill.slab.layout import PAGE_BYTES, Layout, lay_out
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import DictNode, Leaf, Node, leaves

DTYPES = [np.dtype(name) for name in ("?", "u1", "i8", "f4")]
LEAF = st.builds(Leaf, st.sampled_from(DTYPES), st.lists(st.integers(1, 90), max_size=2).map(tuple))
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=5)  # servers of each worker


def tree_of(parts: list[Leaf]) -> Node:
    return DictNode(tuple((str(number), leaf) for number, leaf in enumerate(parts)))


@st.composite
def layouts(draw: Any, *, has_spares: bool = False) -> tuple[Layout, EnvSpec, list[list[int]]]:
    spec = EnvSpec(
        observation=tree_of(draw(st.lists(LEAF, max_size=3))),
        action=draw(LEAF),
        batch_size=draw(st.integers(1, 3)),
        is_batched=True,
        payload_bytes=draw(st.sampled_from([0, 5000])),
    )
    ends = list(accumulate(draw(SHARES)))
    servers = [list(range(begin, end)) for begin, end in pairwise([0, *ends])]
    num_spares = draw(st.integers(1, ends[-1] - 1)) if has_spares and ends[-1] > 1 else 0
    return lay_out(spec, servers, lease_slots=2, num_spares=num_spares), spec, servers


def pages_of(layout: Layout, worker: int) -> set[int]:
    ranges = layout.writable.ranges(worker)
    assert all(start % PAGE_BYTES == stop % PAGE_BYTES == 0 and start < stop for start, stop in ranges)
    assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))  # in order; none touches the next
    return {page for start, stop in ranges for page in range(start // PAGE_BYTES, stop // PAGE_BYTES)}


def is_learners(name: str) -> bool:
    return name.startswith(
        ("pool words", "description", "env counters", "learner's trace", "learner's words", "blobs", "action")
    )


@given(layouts() | layouts(has_spares=True))
def test_no_two_fields_share_a_byte(made: tuple[Layout, EnvSpec, list[list[int]]]) -> None:
    layout, _, _ = made
    spans = sorted((span.start, span.stop) for span in layout.spans)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= layout.size_bytes
    assert layout.size_bytes % PAGE_BYTES == 0


@given(layouts() | layouts(has_spares=True))
def test_a_worker_writes_no_page_of_the_learner_nor_of_another_workers_words(
    made: tuple[Layout, EnvSpec, list[list[int]]],
) -> None:
    layout, _, servers = made
    for worker in range(len(servers)):
        pages = pages_of(layout, worker)
        for span in layout.spans:
            is_others = span.name.startswith("worker ") and not span.name.startswith(f"worker {worker} ")
            if is_learners(span.name) or is_others:
                assert not pages & set(range(span.start // PAGE_BYTES, -(-span.stop // PAGE_BYTES))), span


@given(layouts())
def test_a_worker_can_write_each_of_its_rows_and_of_others_only_what_shares_a_page_with_them(
    made: tuple[Layout, EnvSpec, list[list[int]]],
) -> None:
    layout, spec, servers = made
    for (offset, stride, row_bytes, is_split), (_, leaf) in zip(
        columns(layout, "observation"), leaves(spec.observation), strict=True
    ):
        num_rows = spec.batch_size * sum(map(len, servers))
        assert is_split == (leaf.dtype.itemsize * int(np.prod(leaf.shape)) * num_rows < 16 * 1024)
        for worker, owned in enumerate(servers):
            start = (
                offset + layout.writable.segments[worker][0]
                if is_split
                else offset + spec.batch_size * owned[0] * row_bytes
            )
            for slot in range(int(str(layout.plan["num_slots"]))):
                begin = start + slot * stride
                end = begin + spec.batch_size * len(owned) * row_bytes
                assert set(range(begin // PAGE_BYTES, -(-end // PAGE_BYTES))) <= pages_of(layout, worker)


def columns(layout: Layout, name: str) -> list[tuple[int, int, int, bool]]:
    value = layout.plan[name]
    assert isinstance(value, list)
    return value


def test_rows_that_are_copied_share_no_page_with_those_of_another_worker() -> None:
    spec = EnvSpec(observation=Leaf(np.dtype("f4"), (4,)), action=Leaf(np.dtype("i8"), ()))
    layout = lay_out(spec, [[0, 1], [2, 3]], lease_slots=2)
    assert pages_of(layout, 0) & pages_of(layout, 1) == {int(str(layout.plan["shared_words"])) // PAGE_BYTES}


def test_with_spares_every_worker_writes_all_rows_and_still_no_words_of_others() -> None:
    spec = EnvSpec(observation=Leaf(np.dtype("f4"), (4,)), action=Leaf(np.dtype("i8"), ()))
    layout = lay_out(spec, [[0, 1, 4], [2, 3]], lease_slots=2, num_spares=1)
    own = [set(range(*(place // PAGE_BYTES for place in segment))) for segment in layout.writable.segments]
    assert pages_of(layout, 0) - own[0] == pages_of(layout, 1) - own[1]
    assert not pages_of(layout, 0) & own[1]


@pytest.mark.parametrize("num_workers", [2, 16, 64])
def test_a_slab_of_small_envs_takes_a_few_pages_for_each_worker(num_workers: int) -> None:
    spec = EnvSpec(observation=Leaf(np.dtype("f4"), (4,)), action=Leaf(np.dtype("i8"), ()))
    k = 256 // num_workers
    layout = lay_out(spec, [list(range(w * k, w * k + k)) for w in range(num_workers)], lease_slots=4)
    # Resident only where infos were written, and where envs took as long.
    sizes = {name: structure["itemsize"] for name, structure in _native.counter_formats().items()}
    payloads, counters = 256 * 1024, 256 * sizes["server"]
    traces = sizes["learner_trace"] + num_workers * sizes["worker_trace"]
    assert layout.size_bytes - payloads - counters - traces < 256 * 1024 + num_workers * 4 * PAGE_BYTES
