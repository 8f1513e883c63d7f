"""Too few descriptors or too little memory: a start is refused with the name of the limit, and can be repeated when there is more."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import stepmill
from stepmill.testing import ImageEnv
from tests.harness.leaks import Footprint, find_leaks
from tests.harness.pools import begun, counting_envs, kill_worker, make_pool


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextmanager
def room_for(num_files: int) -> Iterator[None]:
    """Let this process, and those that it starts, open so many descriptors more."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with limited(resource.RLIMIT_NOFILE, lowest_free + num_files):
        yield


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
    with begun(made.pop()) as pool:  # it was not refused for another reason
        assert pool.step([1] * 4).reward.tolist() == [1.0] * 4
    assert room <= 40


@pytest.mark.parametrize(
    ("where", "crash_dir", "per_worker"), [("thread", False, 4), ("fork", False, 5), ("fork", True, 6)]
)
def test_a_worker_takes_as_many_descriptors_as_the_docs_say(
    where: str, crash_dir: bool, per_worker: int, tmp_path: Path
) -> None:
    options = {"crash_dir": str(tmp_path)} if crash_dir else {}
    gc.collect()  # what earlier tests left must not be closed between the two counts
    counts = []
    for num_workers in (2, 5):
        with begun(make_pool(where, counting_envs(5), num_workers=num_workers, **options)):
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] - counts[0] == 3 * per_worker


@pytest.mark.parametrize("where", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_restart_with_too_few_descriptors_is_refused_and_can_be_repeated(where: str) -> None:
    with begun(make_pool(where, counting_envs(2), num_workers=2)) as pool:
        kill_worker(pool, 1)
        room = 0
        while is_refused(pool.revive, room):
            room += 1
        pool.reset(seed=0)
        assert pool.step([1, 2]).reward.tolist() == [1.0, 2.0]
        assert room > 0


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
@pytest.mark.parametrize(("kind", "name"), [(resource.RLIMIT_FSIZE, "ulimit -f"), (resource.RLIMIT_AS, "ulimit -v")])
def test_a_start_without_room_for_the_results_is_refused_and_leaves_nothing(where: str, kind: int, name: str) -> None:
    env_fns = [partial(ImageEnv, shape=(512, 512, 3))] * 2
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used_bytes + (200 << 20) if kind == resource.RLIMIT_AS else 1 << 20
    with limited(kind, limit), pytest.raises(stepmill.UsageError, match=f"no memory for .* 2 envs.*{name}"):
        make_pool(where, env_fns, tuning={"slots": 250})  # 390 MB
