"""Lent arrays in forked processes: what a child holds is its own, whatever the learner does with its memory, and the reverse."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv, ImageEnv
from tests.harness.pools import begun, make_pool
from tests.harness.slab_memory import slab_parts

SHAPE = (84, 84, 4)
NUM_ENVS = 3
SLOTS = 2


class Child:
    """A fork of this process that runs `look` on request, and ends with its result."""

    def __init__(self, look: Callable[[], bool]) -> None:
        told, tell = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
            self._pid = os.fork()
        if self._pid == 0:
            code = 2
            try:
                os.read(told, 1)
                code = 0 if look() else 1
            finally:
                os._exit(code)
        os.close(told)
        self._tell = tell

    def look(self) -> int:
        """Return 0 if it saw what it should, 1 if not, 2 if it raised, less than 0 if it died of a signal."""
        os.write(self._tell, b"x")
        os.close(self._tell)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def images(where: str) -> stepmill.Pool:
    return make_pool(where, [partial(ImageEnv, i, SHAPE, length=100) for i in range(NUM_ENVS)], tuning={"slots": SLOTS})


def step_often(pool: stepmill.Pool) -> None:
    for _ in range(4 * (SLOTS + 3)):
        pool.step([0] * NUM_ENVS)


@contextlib.contextmanager
def lent(where: str) -> Iterator[tuple[stepmill.Pool, list[np.ndarray]]]:
    """A pool and observations of it, which are lent."""
    with begun(images(where)) as pool:
        held = [pool.step([0] * NUM_ENVS).obs]
        assert pool.stats().leased_slots == 1
        yield pool, held


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
def test_what_a_forked_child_holds_is_not_overwritten_when_the_learner_lets_go(where: str) -> None:
    with lent(where) as (pool, held):
        shown = held[0].copy()
        child = Child(lambda: np.array_equal(held[0], shown))
        held.clear()
        step_often(pool)
        assert child.look() == 0


def test_what_a_grandchild_holds_is_not_overwritten() -> None:
    with lent("fork") as (pool, held):
        shown = held[0].copy()

        def look() -> bool:
            grandchild = Child(lambda: np.array_equal(held[0], shown))
            held[0][:] = 7
            return grandchild.look() == 0

        child = Child(look)
        held.clear()
        step_often(pool)
        assert child.look() == 0


def test_what_a_forked_child_writes_into_its_arrays_is_not_seen_by_the_learner() -> None:
    with lent("fork") as (_, held):
        shown = held[0].copy()

        def look() -> bool:
            held[0][:] = 7
            return bool((held[0] == 7).all())

        assert Child(look).look() == 0
        assert np.array_equal(held[0], shown)


def test_all_slots_that_are_held_are_copied_and_the_learner_goes_on_lending() -> None:
    with begun(images("fork")) as pool:
        held = [pool.step([0] * NUM_ENVS).obs for _ in range(SLOTS)]
        assert pool.stats().leased_slots == SLOTS
        shown = [array.copy() for array in held]
        children = [Child(lambda: all(map(np.array_equal, held, shown))) for _ in range(3)]
        held.clear()
        step_often(pool)
        assert [child.look() for child in children] == [0, 0, 0]
        assert pool.stats().leased_slots == 0
        fresh = [pool.step([0] * NUM_ENVS).obs for _ in range(4)]
        assert pool.stats().leased_slots == SLOTS
        del fresh


def read_again(array: np.ndarray, shown: np.ndarray, gate: Any) -> None:
    gate.wait()
    if not np.array_equal(array, shown):
        raise SystemExit(3)


def test_workers_of_multiprocessing_keep_what_they_were_given() -> None:
    context = multiprocessing.get_context("fork")
    with lent("fork") as (pool, held):
        gate = context.Event()
        workers = [context.Process(target=read_again, args=(held[0], held[0].copy(), gate)) for _ in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for worker in workers:
                worker.start()
        held.clear()
        step_often(pool)
        gate.set()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_forked_child_cannot_write_the_slab() -> None:
    with lent("fork"):
        assert Child(lambda: bool(slab_parts()) and not any(part.is_writable for part in slab_parts())).look() == 0
        assert any(part.is_writable for part in slab_parts())


class WatchfulEnv(CountingEnv):
    """Holds an array of another pool, and says which slabs it could write."""

    def __init__(self, identity: int, held: np.ndarray) -> None:
        super().__init__(identity)
        self._held = held

    def inodes(self) -> set[str]:
        with open("/proc/self/maps", encoding="utf-8") as file:
            lines = [line.split() for line in file if "memfd:stepmill-slab" in line]
        return {line[4] for line in lines if "w" in line[1]}

    def total(self) -> int:
        return int(self._held.sum())


def test_workers_forked_for_one_pool_cannot_write_the_slab_of_another() -> None:
    with lent("fork") as (pool, held):
        total = int(held[0].sum())
        with make_pool("fork", [partial(WatchfulEnv, i, held[0]) for i in range(2)]) as other:
            held.clear()
            step_often(pool)
            assert [len(inodes) for inodes in other.call("inodes")] == [1, 1]
            assert other.call("total") == (total, total)


class ForkingEnv(CountingEnv):
    """Its step forks a child that writes over the slab."""

    def __init__(self, identity: int) -> None:
        super().__init__(identity)
        self.observation_space = gymnasium.spaces.Box(-1, 2**40, (3,), np.int64)
        self.codes: list[int] = []

    def step(self, action: np.int64) -> Any:
        child = os.fork()
        if child == 0:
            writable = [part for part in slab_parts() if part.is_writable]
            os._exit(len(writable))
        self.codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return super().step(action)


def test_a_child_that_an_env_forks_cannot_write_the_slab() -> None:
    with begun(make_pool("fork", [partial(ForkingEnv, i) for i in range(2)])) as pool:
        assert pool.step([3, 4]).reward.tolist() == [3.0, 4.0]
        assert pool.get_attr("codes") == ([0], [0])
