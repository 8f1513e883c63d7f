"""Envs whose methods are coroutines: those of a worker run at the same time, and each is an env like any other."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.observe.replay import Verdict, replay
from stepmill.pool.capsule import read_capsule
from stepmill.testing.gates import Gate
from tests.harness.coroutine_envs import (
    LENGTH,
    Fails,
    FailsOnce,
    LateOnce,
    PlainTurns,
    Remote,
    Turns,
    block,
    cancel_itself,
    cancel_later,
    die_once,
    exit_in_step,
    refuse_to_end,
    wait_at,
    wait_for_others,
    wait_forever,
    wait_longer_than_calls,
    with_orders,
)
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S

BACKENDS = ("serial", "thread", "process")


def plain(value: Any) -> Any:
    """Return a value that can be compared."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (np.ndarray, tuple, list)) else value


def as_lists(batch: stepmill.Batch) -> Any:
    return plain([batch.obs, batch.reward, batch.terminated, batch.truncated, batch.info])


def play(env_fns: list[Any], num_steps: int = 3 * LENGTH, **options: Any) -> list[Any]:
    """Play with one pool; return all results."""
    with stepmill.Pool(env_fns, **options) as pool:
        results = [as_lists(pool.reset(seed=7))]
        for t in range(num_steps):
            if pool.options.autoreset_mode == "Disabled" and t and t % LENGTH == 0:
                results.append(as_lists(pool.reset(options={"draw": t})))
            results.append(as_lists(pool.step(np.arange(len(env_fns)) + t % 3)))
        return results


@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_coroutines_return_what_plain_methods_return(backend: Any, autoreset_mode: Any) -> None:
    options = {"backend": backend, "autoreset_mode": autoreset_mode}
    assert play([Turns] * 4, **options) == play([PlainTurns] * 4, **options)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_the_envs_of_a_worker_are_in_step_at_the_same_time(backend: Any) -> None:
    num_envs = 50
    env_fns = [partial(Turns, partial(wait_for_others, num_envs))] * num_envs
    with stepmill.Pool(env_fns, num_workers=1, backend=backend) as pool:
        pool.reset()
        assert pool.step(np.ones(num_envs, np.int64)).reward.sum() == num_envs


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_coroutines_of_an_env_run_in_one_task(backend: Any, tmp_path: Path) -> None:
    closed = [tmp_path / "0", tmp_path / "1"]
    with stepmill.Pool([partial(Turns, closed=path) for path in closed], backend=backend) as pool:
        pool.reset()
        pool.step(np.ones(2, np.int64))
        assert pool.call("num_tasks") == (1, 1)
    assert [path.read_text() for path in closed] == ["1", "1"]


# ---- deadlines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_step_that_is_too_late_is_cancelled_and_costs_no_other_env(backend: Any) -> None:
    options = {"step_timeout_s": DEADLINE_S, "num_workers": 1, "backend": backend, "autoreset_mode": "Disabled"}
    with stepmill.Pool(with_orders(wait_forever), **options) as pool:
        pool.reset(seed=1)
        pids = pool.call("pid")
        pool.send(np.ones(3, np.int64))
        received = pool.receive(None)
        assert sorted(received.batch.env_id) == [1, 2]
        fault = received.faults[0]
        assert fault.kind == "raised", "its worker goes on"
        assert isinstance(fault.error, stepmill.EnvTimeout)
        assert "env 0 took longer than its deadline of 1 s for a step, and was cancelled" in fault.error.message
        assert fault.error.env_ids == (0,)
        assert "wait_forever" in fault.error.remote_traceback, "it says where the env waited"
        assert pool.reset(env_ids=[0], seed=3).obs[0, 1] == 0
        assert pool.call("pid") == pids


def test_an_env_that_was_cancelled_is_made_again_so_that_its_late_reply_reaches_no_episode() -> None:
    with stepmill.Pool([Remote] * 2, num_workers=1, step_timeout_s=DEADLINE_S, autoreset_mode="Disabled") as pool:
        pool.set_attr("name", ["a", "b"])
        pool.reset(seed=1)
        pool.send(["slow", "fast"])
        assert list(pool.receive(None).faults) == [0]
        assert list(pool.reset(env_ids=[0], seed=5).obs) == ["reply to reset 5 of a"], "it has its settings again"
        assert list(pool.step(["left", "right"]).obs) == ["reply to left", "reply to right"]


@pytest.mark.parametrize("orders", [refuse_to_end, block])
def test_a_worker_is_ended_if_its_env_goes_on_after_it_was_cancelled_or_blocks_the_event_loop(orders: Any) -> None:
    with stepmill.Pool(with_orders(orders), num_workers=1, step_timeout_s=DEADLINE_S) as pool:
        pool.reset()
        with pytest.raises(
            stepmill.EnvTimeout, match="env 0 took longer than its deadline of 1 s for a step, and its worker was ended"
        ):
            pool.step(np.ones(3, np.int64))
        assert pool.reset().obs[:, 1].tolist() == [0, 0, 0]


def test_a_thread_whose_env_goes_on_after_it_was_cancelled_is_given_up() -> None:
    with stepmill.Pool(with_orders(refuse_to_end), num_workers=1, step_timeout_s=DEADLINE_S, backend="thread") as pool:
        pool.reset()
        with pytest.raises(stepmill.EnvTimeout, match="env 0 took longer"):
            pool.step(np.ones(3, np.int64))


def test_a_cancelled_reset_is_tried_again(tmp_path: Path) -> None:
    options = {"reset_timeout_s": DEADLINE_S, "resets": {"retries": 1}}
    with stepmill.Pool([partial(LateOnce, tmp_path / "late")], backend="process", **options) as pool:
        assert pool.reset(seed=5).obs.tolist() == [PlainTurns().reset(seed=5)[0].tolist()]
        assert pool.stats().workers[0].reset_retries == 1


def test_a_reset_is_tried_again_although_a_task_of_the_env_cancels_the_wait_before(tmp_path: Path) -> None:
    resets = {"retries": 1, "retry_wait_s": HANG_GUARD_S / 10}
    with stepmill.Pool([partial(FailsOnce, tmp_path / "failed")], backend="process", resets=resets) as pool:
        assert pool.reset(seed=5).obs.tolist() == [PlainTurns().reset(seed=5)[0].tolist()]
        assert pool.step([1]).obs[0, 1] == 1


def test_a_close_ends_the_wait_before_a_reset_is_tried_again(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    with Gate() as gate:
        env_fn = partial(Fails, gate.path, closed)
        pool = stepmill.Pool([env_fn], backend="process", resets={"retries": 1, "retry_wait_s": HANG_GUARD_S})
        pool.reset_async()
        gate.wait_arrivals(1)
        gate.open()
        pool.close()
    assert closed.read_text() == "1"


# ---- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["thread", "process"])
@pytest.mark.parametrize(("orders", "name"), [(exit_in_step, "SystemExit"), (cancel_itself, "CancelledError")])
def test_whatever_a_coroutine_raises_is_an_error_of_its_env(orders: Any, name: str, backend: Any) -> None:
    with stepmill.Pool(with_orders(orders), num_workers=1, backend=backend) as pool:
        pool.reset()
        with pytest.raises(stepmill.EnvError, match=f"env 0 raised .*{name} in step"):
            pool.step(np.ones(3, np.int64))
        assert pool.reset().obs[:, 1].tolist() == [0, 0, 0]


def test_episodes_of_a_killed_worker_are_replayed_to_the_same_values(tmp_path: Path) -> None:
    env_fns = with_orders(partial(die_once, tmp_path / "died"), 4)
    found = play(env_fns, backend="process", num_workers=2, on_fault="replay", seeding="per_episode")
    assert (tmp_path / "died").exists()
    assert found == play([PlainTurns] * 4, backend="serial", seeding="per_episode")


def test_a_capsule_of_a_cancelled_step_is_replayed(tmp_path: Path) -> None:
    options = {"step_timeout_s": DEADLINE_S, "crash_dir": tmp_path, "backend": "process"}
    with stepmill.Pool([partial(Turns, wait_forever)], **options) as pool:
        pool.reset(seed=1)
        with pytest.raises(stepmill.EnvTimeout) as caught:
            pool.step([1])
    assert caught.value.capsule is not None
    capsule = read_capsule(caught.value.capsule, trust=True)
    assert "wait_forever" in capsule.traceback
    assert replay(capsule, partial(Turns, wait_forever), in_process=False).verdict is Verdict.REPRODUCED


# ---- requests ----------------------------------------------------------------------------------------------------------


def test_a_call_follows_the_step_of_its_env_and_other_envs_go_on() -> None:
    with Gate() as gate, stepmill.Pool(with_orders(partial(wait_at, gate.path)), num_workers=1) as pool:
        pool.reset()
        pool.send([1], env_ids=[0])
        gate.wait_arrivals(1)
        turns = pool.call_async(lambda env: env.turns.turn, env_ids=[0])
        pool.send([1, 1], env_ids=[1, 2])
        assert sorted(pool.recv(2).env_id) == [1, 2]
        assert not turns.is_done
        gate.open(1)
        assert turns.result() == (1,)
        assert pool.recv(1).env_id == [0]


def test_a_call_that_is_too_late_is_cancelled_and_its_env_goes_on() -> None:
    options = {"num_workers": 1, "workers": {"call_timeout_s": DEADLINE_S}}
    with stepmill.Pool([Turns] * 2, backend="process", **options) as pool:
        pool.reset()
        with pytest.raises(stepmill.EnvTimeout):
            pool.call("wait_here", env_ids=[0])
        late = pool.call_async("wait_here", env_ids=[0])
        with pytest.raises(
            stepmill.EnvTimeout, match=r"env 0 .* deadline of 1 s for a call, and was cancelled"
        ) as caught:
            late.result(HANG_GUARD_S)  # the worker's answer
        assert "wait_here" in caught.value.remote_traceback
        assert pool.step([1, 1]).obs[:, 1].tolist() == [1, 1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks do not count cancellations")
def test_a_task_that_goes_on_after_a_cancellation_is_not_being_cancelled() -> None:
    options = {"num_workers": 1, "workers": {"call_timeout_s": DEADLINE_S}}
    with stepmill.Pool([Turns], backend="process", **options) as pool:
        pool.reset()
        with pytest.raises(stepmill.EnvTimeout):
            pool.call_async("wait_here").result(HANG_GUARD_S)
        assert pool.call("num_cancellations") == (0,)


def test_a_call_that_is_late_because_it_waits_for_a_step_costs_no_step(gate: Gate) -> None:
    options = {"num_workers": 1, "backend": "process", "workers": {"call_timeout_s": DEADLINE_S}}
    orders = partial(wait_at, gate.path), wait_longer_than_calls
    with stepmill.Pool([partial(Turns, each) for each in orders], **options) as pool:
        pool.reset()
        pool.send([1, 1])
        late = pool.call_async("wait_here")
        assert pool.recv(1).env_id == [1]
        gate.open()
        assert pool.recv(1).env_id == [0]
        with pytest.raises(stepmill.EnvTimeout, match="for a call, and was cancelled") as caught:
            late.result(HANG_GUARD_S)
        assert len(caught.value.others) == 1
        gate.open()
        assert pool.step([1, 1]).obs[:, 1].tolist() == [2, 2]


def test_a_cancellation_that_comes_after_its_command_harms_no_later_command() -> None:
    with stepmill.Pool(with_orders(cancel_later), num_workers=1, step_timeout_s=10 * DEADLINE_S) as pool:
        pool.reset()
        for turn in range(1, LENGTH):
            assert pool.step(np.ones(3, np.int64)).obs[:, 1].tolist() == [turn] * 3


def test_a_close_ends_steps_that_wait(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    pool = stepmill.Pool([partial(Turns, wait_forever, closed)], backend="process")
    pool.reset()
    pool.send([1])
    pool.close()
    assert closed.read_text() == "1"


async def test_a_thread_that_runs_an_event_loop_refuses_coroutines_on_the_serial_backend() -> None:
    with pytest.raises(stepmill.UsageError, match="use backend='process'"):
        stepmill.Pool([Turns], backend="serial")


def test_envs_are_closed_at_the_same_time() -> None:
    class Meeting(Turns):
        async def close(self) -> None:
            await wait_for_others(20, self, None)

    with stepmill.Pool([Meeting] * 20, num_workers=1):
        pass
