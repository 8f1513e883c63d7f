"""Commands to envs whose worker is found dead: the others get theirs, and the next `receive` returns the faults."""

from __future__ import annotations

import pytest

import stepmill
from tests.contract.test_receive import NUM_ENVS, ids_of, make
from tests.harness.pools import begun, kill_worker


def test_a_death_that_send_finds_is_returned_by_the_next_receive() -> None:
    with begun(make()) as pool:
        kill_worker(pool, 0)
        kill_worker(pool, 1)
        assert pool.send([1] * NUM_ENVS) == []

        faults = pool.receive(NUM_ENVS).faults

        assert {env_id: fault.worker for env_id, fault in faults.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
        assert pool.receive(0).faults == {}


def test_a_death_that_send_finds_does_not_stop_the_actions_of_other_envs() -> None:
    with begun(make()) as pool:
        kill_worker(pool)
        assert pool.send([4, 5, 6, 7], [3, 0, 2, 1]) == [3, 2]  # actions by place, and not by id

        received = pool.receive(NUM_ENVS)

        assert received.batch.env_id.tolist() == [2, 3]
        assert received.batch.obs[:, 2].tolist() == [1, 1]
        assert received.faults.keys() == {0, 1}
        with pytest.raises(stepmill.UsageError, match=r"envs \[0, 1\] have a fault"):
            pool.send([1] * NUM_ENVS)  # now the user knows


def test_a_reset_finds_a_death_and_resets_the_other_envs() -> None:
    with begun(make()) as pool:
        kill_worker(pool)
        assert pool.reset_async(env_ids=[0, 3], seed={0: 5, 3: 7}) == [3]

        received = pool.receive(3)

        assert ids_of(received) == [3]
        assert received.faults.keys() == {0, 1}
        assert pool.reset_async() == [0, 1, 2, 3]
        assert pool.recv().num_rows == NUM_ENVS


def test_a_recv_raises_what_send_found_and_then_returns_the_other_envs() -> None:
    with begun(make()) as pool:
        kill_worker(pool)
        assert pool.send([1] * NUM_ENVS) == [2, 3]
        with pytest.raises(stepmill.WorkerDied, match=r"its envs \[0, 1\] are lost"):
            pool.recv(NUM_ENVS)
        assert pool.recv().env_id.tolist() == [2, 3]


def test_an_env_whose_fault_was_not_received_gets_no_action() -> None:
    with begun(make()) as pool:
        kill_worker(pool)
        assert pool.send([1], [0]) == []
        assert pool.send([1] * 2, [1, 2]) == [2]
        assert pool.receive(3).faults.keys() == {0, 1}


def test_a_reset_drops_a_fault_that_was_not_received_with_a_warning() -> None:
    with begun(make()) as pool:
        kill_worker(pool)
        pool.send([1] * NUM_ENVS)

        with pytest.warns(RuntimeWarning, match="the fault is dropped"):
            pool.reset_async(env_ids=[0])

        received = pool.receive(4)
        assert sorted(ids_of(received)) == [0, 2, 3]
        assert received.faults.keys() == {1}
