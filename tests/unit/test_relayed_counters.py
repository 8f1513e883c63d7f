"""The counters of a worker of a Ray cluster's node in the pool's slab, without Ray and without a worker."""

from __future__ import annotations

import os

import numpy as np

from stepmill import _native
from stepmill.slab.counters import formats
from stepmill.slab.layout import lay_out
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Leaf

OF_THE_MOMENT = {"current", "running", "serving"}
WORDS = _native.counter_formats()["worker"]
PLACES: dict[str, int] = dict(zip(WORDS["names"], WORDS["offsets"], strict=True))
COUNTERS = [name for name in PLACES if name not in OF_THE_MOMENT]
NUMBERS = dict(zip(COUNTERS, range(1001, 1001 + len(COUNTERS)), strict=True))
AGAIN = {name: 10 * number for name, number in NUMBERS.items()}


def new_slab() -> SharedSlab:
    spec = EnvSpec(observation=Leaf(np.dtype("f4"), (4,)), action=Leaf(np.dtype("i8"), ()))
    return SharedSlab(lay_out(spec, [[0, 1], [2, 3]], lease_slots=2), 2)


def write(slab: SharedSlab, worker: int, numbers: dict[str, int]) -> None:
    for name, number in numbers.items():
        os.pwrite(slab.fds[0], np.uint64(number).tobytes(), slab.description.worker_words[worker] + PLACES[name])


def read(slab: SharedSlab, worker: int) -> dict[str, int]:
    with slab.view() as memory:
        words = np.frombuffer(memory, formats()["worker"], 1, slab.description.worker_words[worker])[0]
        return {name: int(words[name]) for name in COUNTERS}


def test_counters_of_a_worker_and_its_successors_add_up_in_the_pool() -> None:
    pool, node = new_slab(), new_slab()
    ours, theirs = _native.PoolRelay(pool.native, [0, 1]), _native.NodeRelay(node.native)
    try:
        write(node, 1, NUMBERS)
        assert ours.publish_results(theirs.collect_results()) == ([], 0)
        assert read(pool, 1) == NUMBERS
        assert set(read(pool, 0).values()) == {0}
        theirs.begin_generation(1)
        assert set(read(node, 1).values()) == {0}
        ours.expect_worker(1, 1)
        write(node, 1, AGAIN)
        ours.publish_results(theirs.collect_results())
        assert read(pool, 1) == {name: number + AGAIN[name] for name, number in NUMBERS.items()}
    finally:
        del ours, theirs
        pool.close()
        node.close()
