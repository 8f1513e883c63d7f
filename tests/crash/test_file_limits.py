"""Too few descriptors: a start or restart is refused with the name of the limit, and can be repeated when there are more."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import stepmill
from tests.harness.leaks import Footprint, find_leaks
from tests.harness.pools import counting_envs, make_pool


@contextmanager
def room_for(num_files: int) -> Iterator[None]:
    """Let this process, and those that it starts, open so many descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + num_files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_refused(start: Callable[[], object], room: int) -> bool:
    """Whether this needs more room than there is, and says so."""
    try:
        with room_for(room):
            start()
    except stepmill.UsageError as error:
        return "ulimit -n" in str(error)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("where", ["serial", "thread", "fork", "forkserver", "spawn"])
def test_a_start_with_too_few_descriptors_is_refused_and_leaves_nothing(where: str) -> None:
    made: list[stepmill.Pool] = []

    def start() -> None:
        made.append(make_pool(where, counting_envs(4), num_workers=4))

    make_pool(where, counting_envs(4), num_workers=4).close()
    before = Footprint.take()
    stride = 1 if where in ("serial", "thread", "fork") else 7
    room = 0
    while is_refused(start, room):
        assert find_leaks(before) == []
        room += stride
    with made.pop() as pool:  # it was not refused for another reason
        pool.reset(seed=0)
        assert pool.step([1] * 4).reward.tolist() == [1.0] * 4
    assert room <= 40


@pytest.mark.parametrize(
    ("where", "crash_dir", "per_worker"), [("thread", False, 4), ("fork", False, 5), ("fork", True, 6)]
)
def test_a_worker_takes_as_many_descriptors_as_the_docs_say(
    where: str, crash_dir: bool, per_worker: int, tmp_path: Path
) -> None:
    options = {"crash_dir": str(tmp_path)} if crash_dir else {}
    counts = []
    for num_workers in (2, 5):
        with make_pool(where, counting_envs(5), num_workers=num_workers, **options) as pool:
            pool.reset(seed=0)
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] - counts[0] == 3 * per_worker


@pytest.mark.parametrize("where", ["fork", "forkserver"])
def test_a_restart_with_too_few_descriptors_is_refused_and_can_be_repeated(where: str) -> None:
    with make_pool(where, counting_envs(2), num_workers=2) as pool:
        pool.reset(seed=0)
        os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
        while not pool.stats().workers[1].is_dead:
            os.sched_yield()
        room = 0
        while is_refused(pool.revive, room):
            room += 1
        pool.reset(seed=0)
        assert pool.step([1, 2]).reward.tolist() == [1.0, 2.0]
        assert room > 0
