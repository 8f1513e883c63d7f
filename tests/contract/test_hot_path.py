"""What a step costs beside the envs: no pipe and no queue, no copy of results, no CPU while it waits."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

import stepmill
from stepmill.testing.envs import ImageEnv
from stepmill.testing.gates import GATED_ACTION, GateEnv
from tests.harness.pools import begun

PROCESSES = pytest.mark.parametrize("where", ["fork", "forkserver"])
WAIT_S = 1.0


def bytes_written(place: int | str) -> int:
    """Return how many bytes a process or a thread has written by system calls."""
    lines = Path(f"/proc/{place}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def mapping_of(address: int) -> str:
    """Return the line of /proc/self/maps with an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise LookupError(f"nothing is mapped at {address:#x}")


@pytest.mark.covers("X-4/path")
@PROCESSES
def test_actions_and_results_pass_through_no_pipe_and_no_queue(pool_of):
    pool = begun(pool_of([partial(ImageEnv, i) for i in range(4)], num_workers=2))
    places = ["thread-self", *(worker.pid for worker in pool.stats().workers)]
    before = [bytes_written(place) for place in places]
    for _ in range(200):
        pool.step([0] * 4)
    written = [bytes_written(place) - earlier for place, earlier in zip(places, before, strict=True)]
    assert max(written) < 200 * 8  # at most a wake-up a step; an image has thousands of bytes


@pytest.mark.covers("X-1/memory")
@PROCESSES
def test_large_results_are_the_shared_memory_itself(pool_of):
    pool = begun(pool_of([partial(ImageEnv, i) for i in range(4)], num_workers=2))
    batch = pool.step([0] * 4)
    assert "memfd:stepmill-slab" in mapping_of(batch.obs.__array_interface__["data"][0])


@pytest.mark.covers("G-15/waiting")
@pytest.mark.parametrize("where", ["thread", "fork"])
def test_a_wait_for_results_uses_no_cpu(pool_of, gate):
    pool = begun(pool_of([partial(GateEnv, gate.path, i) for i in range(2)], num_workers=2))
    pool.send([GATED_ACTION, GATED_ACTION])
    gate.wait_arrivals(2)
    before = time.process_time()  # of all threads of this process
    with pytest.raises(stepmill.RecvTimeout):
        pool.recv(1, timeout_s=WAIT_S)
    assert time.process_time() - before < WAIT_S / 4
    gate.open(2)
    assert len(pool.recv(2).env_id) == 2
