"""A deadline of the user holds while workers are rebuilt: the wait ends, nothing is lost, and a later wait has the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.testing.gates import Gate
from tests.chaos import ChaosEnv
from tests.chaos.envs import CLOCK, make_fragile, make_gated
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, kill_unnoticed, make_pool

NUM_ENVS = 4  # on two workers: 0 and 1, and 2 and 3
TIMEOUT_S = 0.2


class RaisesOnce(ChaosEnv):
    """Env 1 raises in the third step of its life."""

    num_steps = 0

    def step(self, action: np.int64) -> Any:
        self.num_steps += 1
        if (self.identity, self.num_steps) == (1, 3):
            raise ValueError("once")
        return super().step(action)


@contextmanager
def stepped_pool(folder: Path, on_fault: str, make: Callable[[Path, int], ChaosEnv]) -> Iterator[stepmill.Pool]:
    """A pool whose constructors are made to wait, or to fail, after its second step."""
    env_fns = [partial(make, folder / "flag", identity=env_id) for env_id in range(NUM_ENVS)]
    restarts = {"max_restarts": 10_000}
    with begun(make_pool("fork", env_fns, on_fault=on_fault, seeding="per_episode", restarts=restarts)) as pool:
        pool.step([1] * NUM_ENVS)
        pool.step([2] * NUM_ENVS)
        (folder / "flag").touch()
        yield pool


def assert_times_out(wait: Callable[[], object]) -> None:
    begin = time.monotonic()
    with pytest.raises(stepmill.RecvTimeout, match=r"envs \[0, 1\] were not ready"):
        wait()
    assert TIMEOUT_S <= time.monotonic() - begin < HANG_GUARD_S


def send_and_recv(pool: stepmill.Pool, wait: str) -> Callable[[], Any]:
    """Send actions 3 to all envs; return what waits for their results."""
    if wait == "step_wait":
        PoolPort(pool).step_async(np.full(NUM_ENVS, 3))
        return partial(PoolPort(pool).step_wait, timeout_s=TIMEOUT_S)
    pool.send(np.full(NUM_ENVS, 3))
    return partial(pool.recv, NUM_ENVS, timeout_s=TIMEOUT_S)


def clocks_of(result: Any) -> list[int]:
    obs = result.obs if isinstance(result, stepmill.Batch) else result[0]
    return [int(clock) for clock in obs[:, CLOCK]]


@pytest.mark.parametrize("wait", ["recv", "step_wait"])
@pytest.mark.parametrize("on_fault", ["replay", "truncate"])
def test_a_wait_ends_at_its_deadline_while_constructors_block(on_fault: str, wait: str, tmp_path: Path) -> None:
    with Gate() as gate, stepped_pool(tmp_path, on_fault, partial(make_gated, gate=gate.path)) as pool:
        kill_unnoticed(pool)
        receive = send_and_recv(pool, wait)
        if on_fault == "truncate":  # a step of a lost env is cut short at once, its reset waits for the worker
            assert clocks_of(receive()) == [2, 2, 3, 3]
            receive = send_and_recv(pool, wait)

        assert_times_out(receive)
        gate.wait_arrivals()
        assert_times_out(receive)
        gate.open(2)
        result = pool.recv(NUM_ENVS)

        assert result.env_id.tolist() == [0, 1, 2, 3]
        assert clocks_of(result) == ([3] * 4 if on_fault == "replay" else [0, 0, 4, 4])
        assert clocks_of(pool.step([4] * NUM_ENVS)) == ([4] * 4 if on_fault == "replay" else [1, 1, 5, 5])


@pytest.mark.parametrize("on_fault", ["replay", "truncate"])
def test_results_of_others_are_received_while_constructors_block(on_fault: str, tmp_path: Path) -> None:
    with Gate() as gate, stepped_pool(tmp_path, on_fault, partial(make_gated, gate=gate.path)) as pool:
        kill_unnoticed(pool)
        if on_fault == "truncate":
            pool.step([3] * NUM_ENVS)
        pool.send([3] * NUM_ENVS)

        others = pool.recv(2)

        assert sorted(others.env_id.tolist()) == [2, 3]
        assert_times_out(partial(pool.recv, 2, timeout_s=TIMEOUT_S))
        gate.open(2)
        assert sorted(pool.recv(2).env_id.tolist()) == [0, 1]


@pytest.mark.parametrize("wait", ["recv", "step_wait"])
@pytest.mark.parametrize("on_fault", ["replay", "truncate"])
def test_a_wait_ends_at_its_deadline_while_a_restart_backs_off(on_fault: str, wait: str, tmp_path: Path) -> None:
    with stepped_pool(tmp_path, on_fault, make_fragile) as pool:
        kill_unnoticed(pool)
        receive = send_and_recv(pool, wait)
        if on_fault == "truncate":
            assert clocks_of(receive()) == [2, 2, 3, 3]
            receive = send_and_recv(pool, wait)

        for _ in range(4):  # the restarts fail; a time between two of them is soon longer than the deadline
            assert_times_out(receive)
        (tmp_path / "flag").unlink()
        result = pool.recv(NUM_ENVS)

        assert clocks_of(result) == ([3] * 4 if on_fault == "replay" else [0, 0, 4, 4])


@pytest.mark.parametrize(("on_fault", "clocks"), [("truncate", [3, 2, 3, 3]), ("replay", [3, 3, 3, 3])])
def test_an_env_that_raises_is_reset_where_it_lives(on_fault: str, clocks: list[int], tmp_path: Path) -> None:
    with Gate() as gate, stepped_pool(tmp_path, on_fault, partial(make_gated, gate=gate.path, kind=RaisesOnce)) as pool:
        pids = [worker.pid for worker in pool.stats().workers]

        result = pool.step([3] * NUM_ENVS)  # a rebuilt env would wait at the gate

        assert clocks_of(result) == clocks
        assert [worker.pid for worker in pool.stats().workers] == pids
