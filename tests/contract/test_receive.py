"""`Pool.receive` returns results and the faults of envs, and raises no error of an env; nothing is lost on the way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import stepmill
from stepmill import pool as pool_package
from stepmill.spec import batch as batch_module
from stepmill.spec import received as received_module
from stepmill.spec.options import EnvState
from stepmill.testing.faulty import RaisingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from tests.chaos import HANG, KILL, RAISE, ChaosEnv
from tests.chaos.envs import Traps, make_env
from tests.harness.hangs import DEADLINE_S
from tests.harness.interrupts import LineInterrupt
from tests.harness.pools import begun, kill_worker, make_pool

NUM_ENVS = 4
FILES = (str(Path(pool_package.__file__).parent), batch_module.__file__, received_module.__file__)


def chaos_envs(num_envs: int = NUM_ENVS) -> list[Callable[[], ChaosEnv]]:
    return [partial(ChaosEnv, env_id) for env_id in range(num_envs)]


def make(where: str = "fork", **options: object) -> stepmill.Pool:
    """Worker 0 has envs 0 and 1, worker 1 has envs 2 and 3."""
    return make_pool(where, chaos_envs(), **options)


def end_process(env: object) -> None:
    os._exit(1)


def ids_of(received: stepmill.Received) -> list[int]:
    return [] if received.batch is None else received.batch.env_id.tolist()


def is_empty(received: stepmill.Received) -> bool:
    return received.batch is None and not received.faults


def kinds_of(received: stepmill.Received) -> dict[int, str]:
    return {env_id: fault.kind for env_id, fault in received.faults.items()}


def test_without_faults_it_returns_what_recv_returns(pool_of):
    pool, twin = pool_of(chaos_envs()), pool_of(chaos_envs())
    for each in (pool, twin):
        each.reset(seed=0)
        each.send([1, 2, 3, 4])

    received = pool.receive(NUM_ENVS)

    assert received.batch.obs.tolist() == twin.recv().obs.tolist()
    assert received.faults == {}


def test_an_env_that_raises_is_a_fault_beside_the_results_of_the_others(pool_of):
    pool = begun(pool_of(chaos_envs()))
    pool.send([1, RAISE, 1, 1])

    received = pool.receive(NUM_ENVS)

    assert ids_of(received) == [0, 2, 3]
    fault = received.faults[1]
    assert (list(received.faults), fault.kind, fault.env_ids, fault.is_loss) == ([1], "raised", (1,), False)
    assert isinstance(fault.error, stepmill.EnvError)
    assert fault.error.env_id == 1
    assert pool.states[1] is EnvState.FAULTED
    pool.reset(env_ids=[1])
    assert pool.step([1] * NUM_ENVS).obs[:, 2].tolist() == [2, 1, 2, 2]


def test_a_fault_is_returned_once_and_not_raised_afterwards(pool_of):
    pool = begun(pool_of(chaos_envs()))
    pool.send([RAISE, 1, 1, 1])
    assert list(pool.receive(NUM_ENVS).faults) == [0]

    pool.send([1, 1, 1], [1, 2, 3])

    assert pool.recv().env_id.tolist() == [1, 2, 3]
    assert pool.receive(0).faults == {}


def test_faults_count_toward_min_envs(pool_of):
    pool = begun(pool_of(chaos_envs()))
    pool.send([RAISE, RAISE], [0, 1])

    received = pool.receive(2)

    assert (received.batch, sorted(received.faults)) == (None, [0, 1])
    assert len({id(fault.error) for fault in received.faults.values()}) == 2


def test_what_the_policy_handles_stands_in_infos_only(pool_of):
    pool = begun(pool_of(chaos_envs(), on_fault="truncate"))
    pool.send([1, RAISE, 1, 1])

    received = pool.receive(NUM_ENVS)

    assert (ids_of(received), received.faults) == ([0, 1, 2, 3], {})
    assert "raised" in received.batch.info["fault"]["kind"].tolist()


def test_without_a_number_it_waits_for_all_that_are_pending(pool_of):
    pool = begun(pool_of(chaos_envs()))
    with pytest.raises(stepmill.UsageError, match="0 are stepping"):
        pool.receive(None)
    pool.send([1, RAISE, 1], [0, 1, 2])

    received = pool.receive(None)

    assert (ids_of(received), kinds_of(received)) == ([0, 2], {1: "raised"})
    assert received.errors([0, 1]) == [received.faults[1].error]
    assert received.errors([0]) == []


def test_max_envs_limits_results_and_the_rest_comes_next(pool_of):
    pool = begun(pool_of(chaos_envs()))
    pool.send([1, 1, RAISE, 1])

    first = pool.receive(1, 2)
    rest: dict[int, str] = kinds_of(first)
    received = ids_of(first)
    assert len(received) <= 2
    while len(received) + len(rest) < NUM_ENVS:
        more = pool.receive(1, 2)
        assert len(ids_of(more)) <= 2
        received += ids_of(more)
        rest |= kinds_of(more)

    assert (sorted(received), rest) == ([0, 1, 3], {2: "raised"})


@pytest.mark.parametrize("where", ["thread", "fork"])
def test_a_timeout_returns_what_there_is(pool_of, gate):
    pool = begun(pool_of([*[partial(GateEnv, gate.path, i) for i in range(2)], RaisingEnv], num_workers=3))
    pool.send([GATED_ACTION], [0])
    assert is_empty(pool.receive(1, timeout_s=0))
    assert is_empty(pool.receive(0))
    pool.send([1, 0], [1, 2])
    assert pool.receive(2).faults.keys() == {2}  # env 1 has stepped

    assert is_empty(pool.receive(1, timeout_s=0.01))
    gate.open()
    assert ids_of(pool.receive(1)) == [0]


@pytest.mark.parametrize("where", ["thread", "fork"])
def test_a_timeout_returns_the_results_and_faults_that_are_fewer_than_wanted(pool_of, gate):
    pool = begun(pool_of([*[partial(GateEnv, gate.path, i) for i in range(2)], RaisingEnv], num_workers=3))
    pool.send([GATED_ACTION, 1, 0])
    while EnvState.BUSY in pool.states[1:]:
        os.sched_yield()

    received = pool.receive(3, timeout_s=0)

    assert (ids_of(received), kinds_of(received)) == ([1], {2: "raised"})
    gate.open()
    assert ids_of(pool.receive(1)) == [0]


def test_misuse_is_raised(pool_of):
    pool = begun(pool_of(chaos_envs()))
    with pytest.raises(stepmill.UsageError, match="0 are stepping or have a fault"):
        pool.receive()
    pool.send([1, 1], [0, 1])
    for least, most in ((3, None), (2, 1), (-1, None)):
        with pytest.raises(stepmill.UsageError, match="cannot wait for"):
            pool.receive(least, most)
    with pytest.raises(stepmill.UsageError):
        pool.receive(timeout_s=-1)
    assert ids_of(pool.receive(2)) == [0, 1]
    pool.close()
    with pytest.raises(stepmill.ClosedPoolError):
        pool.receive(0)


# ---- workers ---------------------------------------------------------------------------------------------------------------


def test_a_death_is_one_error_of_all_envs_of_the_worker() -> None:
    with begun(make()) as pool:
        pool.send([1, 1, KILL, 1])

        received = pool.receive(NUM_ENVS)

        assert ids_of(received) == [0, 1]
        assert kinds_of(received) == {2: "died", 3: "died"}
        faults = list(received.faults.values())
        assert faults[0].error is faults[1].error
        assert isinstance(faults[0].error, stepmill.WorkerDied)
        assert {(fault.worker, fault.env_ids, fault.is_loss) for fault in faults} == {(1, (2, 3), True)}
        assert pool.reset(env_ids=[2, 3]).obs[:, 2].tolist() == [0, 0]


def test_idle_envs_of_a_dead_worker_have_the_fault_too() -> None:
    with begun(make()) as pool:
        pool.send([KILL], [3])
        assert pool.receive().faults.keys() == {2, 3}


def test_faults_of_idle_envs_end_no_wait_for_all() -> None:
    with Gate() as gate, begun(make_pool("fork", [partial(GateEnv, gate.path, i) for i in range(NUM_ENVS)])) as pool:
        pool.send([GATED_ACTION, GATED_ACTION], [0, 2])
        gate.wait_arrivals(2)
        kill_worker(pool)
        gate.open()

        received = pool.receive(None)

        assert (ids_of(received), received.faults.keys()) == ([2], {0, 1})


def test_a_result_from_before_the_death_comes_with_the_fault_of_its_env() -> None:
    with begun(make()) as pool:
        pool.send([1], [2])
        while 2 not in pool.ready_ids:
            os.sched_yield()
        pool.send([KILL], [3])

        received = pool.receive(2)

        assert (ids_of(received), received.faults.keys()) == ([2], {2, 3})
        assert pool.states[2] is EnvState.FAULTED


def test_two_deaths_are_two_errors() -> None:
    with begun(make()) as pool:
        pool.send([KILL, 1, KILL, 1])

        faults = pool.receive(NUM_ENVS).faults
        while len(faults) < NUM_ENVS:
            faults |= pool.receive(NUM_ENVS - len(faults)).faults

        assert {env_id: fault.worker for env_id, fault in faults.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
        assert len({id(fault.error) for fault in faults.values()}) == 2


def test_an_env_that_is_too_late_is_named_in_the_fault_of_all_envs_of_its_worker() -> None:
    with begun(make(step_timeout_s=DEADLINE_S)) as pool:
        pool.send([1, 1, 1, HANG])

        received = pool.receive(NUM_ENVS)

        assert kinds_of(received) == {2: "timed_out", 3: "timed_out"}
        error = received.faults[2].error
        assert isinstance(error, stepmill.EnvTimeout)
        assert error.env_id == 3


def send_to_a_dead_worker(pool: stepmill.Pool, gate: Gate) -> None:
    """Let the worker of envs 0 and 1 die while env 1 runs, and let a step of env 0 find that."""
    pool.reset(seed=0)
    pool.send([GATED_ACTION], [1])
    gate.wait_arrivals(1)
    kill_worker(pool)
    assert pool.send([1], [0]) == []


def gated_pool(gate: Gate) -> stepmill.Pool:
    return make_pool("fork", [partial(GateEnv, gate.path, i) for i in range(NUM_ENVS)])


@pytest.mark.parametrize("least", [0, 1, None])
def test_a_death_that_send_finds_is_returned_once_for_an_env_that_was_stepping(least: int | None) -> None:
    with Gate() as gate, gated_pool(gate) as pool:
        send_to_a_dead_worker(pool, gate)

        received = pool.receive(least)

        assert kinds_of(received) == {0: "died", 1: "died"}
        assert received.faults[0].error is received.faults[1].error
        assert is_empty(pool.receive(0))


def test_a_death_that_send_finds_is_raised_once_for_an_env_that_was_stepping() -> None:
    with Gate() as gate, gated_pool(gate) as pool:
        send_to_a_dead_worker(pool, gate)
        with pytest.raises(stepmill.WorkerDied):
            pool.recv()
        assert pool.states[:2] == [EnvState.FAULTED] * 2
        assert pool.stats().faults_by_kind == {"died": 1}
        with pytest.raises(stepmill.UsageError, match="nothing pending"):
            pool.recv()


def test_a_death_that_was_raised_is_no_result_that_a_reset_drops() -> None:
    with Gate() as gate, gated_pool(gate) as pool:
        send_to_a_dead_worker(pool, gate)
        gate.open()
        with pytest.raises(stepmill.WorkerDied):
            pool.reset(env_ids=[0, 1])
        assert pool.reset(env_ids=[0, 1]).num_rows == 2  # without a warning, which would be an error


def test_a_death_that_a_call_raised_is_no_result_that_a_reset_drops() -> None:
    with begun(make("fork")) as pool:
        pool.send([KILL], [1])
        with pytest.raises(stepmill.WorkerDied):
            pool.call("locate", env_ids=[1])
        assert pool.reset(env_ids=[0, 1]).num_rows == 2


def test_receive_returns_a_death_that_a_call_raised_also_for_a_neighbour_and_after_a_revive() -> None:
    with begun(make()) as pool:
        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.call(end_process, env_ids=[1])
        assert list(caught.value.env_ids) == [0, 1]
        pool.revive([1])  # env 0 was lost, too, and its user has not heard of it

        received = pool.receive(0)

        assert kinds_of(received) == {0: "died"}
        assert received.faults[0].error is caught.value
        assert is_empty(pool.receive(0))


def test_a_death_that_recv_raises_is_not_returned_again() -> None:
    with begun(make()) as pool:
        pool.send([KILL], [0])
        with pytest.raises(stepmill.WorkerDied):
            pool.recv()
        assert pool.receive(0).faults == {}


@pytest.mark.parametrize("waits", [True, False])
def test_the_error_of_a_worker_that_cannot_be_restarted_is_returned(tmp_path: Path, waits: bool) -> None:
    with begun(make_pool("fork", [partial(make_env, str(tmp_path), env_id, 1) for env_id in range(NUM_ENVS)])) as pool:
        pool.send([KILL], [1])
        pool.receive()
        Traps(str(tmp_path)).set("build", 0, RAISE)
        if not waits:
            pool.revive([0, 1], wait=False)
        assert pool.reset_async(env_ids=[0, 1]) == ([] if waits else [0, 1])

        received = pool.receive(2)

        assert (received.batch, kinds_of(received)) == (None, {0: "died", 1: "died"})
        assert isinstance(received.faults[1].error, stepmill.EnvError)
        assert received.faults[1].error.phase == "construct"
        assert pool.reset(env_ids=[0, 1]).num_rows == 2


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------------


def receive_everywhere(pool: stepmill.Pool, send: Callable[[], None], results: list[int], faults: list[int]) -> int:
    """Let Ctrl-C come at one place further each time; check that all is returned, once. Returns at how many places."""
    for place in range(1, 10_000):
        pool.reset()
        send()
        calls: list[stepmill.Received] = []
        is_interrupted = LineInterrupt(
            place, FILES, ("wait_and_collect", "_collect_with_faults", "_collect", "receive")
        ).call(
            lambda calls=calls: calls.append(pool.receive(NUM_ENVS))  # type: ignore[misc]
        )
        assert is_interrupted == (not calls)
        while sum(len(ids_of(call)) + len(call.faults) for call in calls) < len(results) + len(faults):
            calls.append(pool.receive(1))
        assert sorted(env_id for call in calls for env_id in ids_of(call)) == results
        assert sorted(env_id for call in calls for env_id in call.faults) == faults
        assert is_empty(pool.receive(0))
        if not is_interrupted:
            return place
    raise AssertionError("receive() never ended")


@pytest.mark.parametrize("where", ["serial", "fork"])
def test_no_result_and_no_fault_is_lost_or_doubled_wherever_ctrl_c_arrives(pool_of):
    pool = pool_of(chaos_envs())
    assert receive_everywhere(pool, lambda: pool.send([RAISE, 1, 1, 1]), [1, 2, 3], [0]) > 50


@pytest.mark.slow
def test_no_death_is_lost_or_doubled_wherever_ctrl_c_arrives() -> None:
    with make() as pool:
        assert receive_everywhere(pool, lambda: pool.send([1, 1, KILL, 1]), [0, 1], [2, 3]) > 50


def test_a_send_to_other_envs_goes_on_after_an_interrupted_receive() -> None:
    with make("serial") as pool:
        for place in range(1, 10_000):
            pool.reset(seed=0)
            pool.send([RAISE], [0])
            calls: list[stepmill.Received] = []
            is_interrupted = LineInterrupt(place, FILES, ("receive",)).call(
                lambda calls=calls: calls.append(pool.receive())  # type: ignore[misc]
            )
            pool.send([1], [1])
            with contextlib.nullcontext() if pool._recovery.news.faults else pytest.raises(stepmill.UsageError):
                assert pool.send([1], [0]) == []
            received = pool.receive(1 if calls else 2)
            assert (ids_of(received), received.faults.keys()) == ([1], set() if calls else {0})
            if not is_interrupted:
                assert place > 20
                return
        raise AssertionError("receive() never ended")


def send_interrupted(pool: stepmill.Pool, place: int) -> bool:
    """Send to a worker that is dead, with Ctrl-C at this place; return whether Ctrl-C came."""
    return LineInterrupt(place, FILES).call(lambda: pool.send([1] * NUM_ENVS))


def receive_death(pool: stepmill.Pool) -> set[int]:
    """Return the envs whose death `send` has found, now or before."""
    while not (faults := pool.receive(0).faults):
        with contextlib.suppress(stepmill.BusyEnvError):  # an interrupt came after the actions were sent
            pool.send([1] * NUM_ENVS)
    return set(faults)


@pytest.mark.parametrize("first", [1, *(pytest.param(place, marks=pytest.mark.slow) for place in (2, 3, 4))])
def test_no_death_that_send_finds_is_lost_wherever_ctrl_c_arrives(first: int) -> None:
    with make() as pool:
        place, is_interrupted = first - 4, True
        while is_interrupted:
            place += 4
            pool.reset()
            kill_worker(pool)
            is_interrupted = send_interrupted(pool, place)
            assert receive_death(pool) == {0, 1}
        assert place > 20
