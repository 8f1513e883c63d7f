"""`await env.call(...)` of a lease: what a task asks of its env between steps."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import stepmill
from stepmill.aio import leases
from stepmill.pool.port import PoolPort
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from tests.aio.test_leases import chaos_pool, held_by_id, kill_first_worker, play, played_alone
from tests.chaos.envs import CLOCK, IDENTITY, ChaosEnv
from tests.harness.hangs import DEADLINE_S
from tests.harness.kills import stop_process

CALL_LIMIT_S = 3 * DEADLINE_S
BOTH = pytest.mark.parametrize("backend", ["process", "thread"])


def gate_pool(gate: Gate, num_envs: int = 1, **options: Any) -> stepmill.AsyncPool:
    return stepmill.AsyncPool([partial(GateEnv, gate.path, env_id) for env_id in range(num_envs)], **options)


def read_clock(env: Any, factor: int = 1) -> int:
    return factor * int(env.unwrapped._clock)


def end_process(env: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_key_error(env: object) -> None:
    raise KeyError("planted")


@BOTH
async def test_calls_return_what_methods_functions_and_attributes_give(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SLICE_S", 1e4)  # each reply is announced

    async with chaos_pool(backend=backend) as pool:

        async def ask(seed: int) -> None:
            async with pool.lease() as env:
                assert await env.call("locate") == env.env_id  # needs no reset
                await env.reset(seed=seed)
                for clock in range(1, 10):
                    await env.step(1)
                    assert await env.call(read_clock, factor=3) == 3 * clock
                assert await env.call("identity") == env.env_id
                with pytest.raises(KeyError, match="planted"):
                    await env.call(raise_key_error)
                assert (await env.step(1))[1] == 10.0

        await asyncio.gather(*map(ask, range(12)))


@BOTH
async def test_a_call_waits_while_others_step_and_is_the_only_command_of_its_env(backend: Any, gate: Gate) -> None:
    async with (
        gate_pool(gate, 2, num_workers=2, backend=backend) as pool,
        pool.lease() as asked,
        pool.lease() as other,
    ):
        await other.reset()
        call = asyncio.create_task(asked.call("wait_here"))
        await asyncio.to_thread(gate.wait_arrivals)
        for action in (1, 2, 3):
            assert (await other.step(action))[1] == float(action)
        for command in (asked.reset, partial(asked.call, "wait_here")):
            with pytest.raises(stepmill.BusyEnvError, match="lease one env per task"):
                await command()
        gate.open()
        assert await call == asked.env_id


@BOTH
async def test_a_cancelled_call_goes_on_for_nobody_and_the_env_stays_usable(backend: Any, gate: Gate) -> None:
    async with gate_pool(gate, backend=backend) as pool, pool.lease() as env:
        await env.reset()
        await env.step(7)
        call = asyncio.create_task(env.call("wait_here"))
        await asyncio.to_thread(gate.wait_arrivals)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        later = asyncio.create_task(env.call(lambda env: "own"))
        await asyncio.sleep(0)
        gate.open()
        assert await later == "own"
        assert (await env.step(5))[0].tolist() == [0, 0, 2]


async def test_other_tasks_run_during_a_call_whose_reply_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call_now = PoolPort.call_now

    def call_and_wait(port: PoolPort, *args: Any) -> Any:
        future = call_now(port, *args)
        future.result()
        return future

    async with chaos_pool() as pool, pool.lease() as env:
        monkeypatch.setattr(PoolPort, "call_now", call_and_wait)
        ran: list[str] = []
        asyncio.get_running_loop().call_soon(ran.append, "another")
        assert await env.call("locate") == env.env_id
        assert ran == ["another"]


async def test_a_call_after_a_cancelled_step_comes_after_the_step(gate: Gate) -> None:
    async with gate_pool(gate) as pool, pool.lease() as env:
        await env.reset()
        step = asyncio.create_task(env.step(GATED_ACTION))
        await asyncio.to_thread(gate.wait_arrivals)
        step.cancel()
        with suppress(asyncio.CancelledError):
            await step
        call = asyncio.create_task(env.call(lambda env: env.unwrapped._t))
        await asyncio.sleep(0)
        gate.open()
        assert await call == 1


async def test_a_late_call_is_an_error_and_the_next_gets_its_own_reply(gate: Gate) -> None:
    async with gate_pool(gate, workers={"call_timeout_s": DEADLINE_S}) as pool, pool.lease() as env:
        with pytest.raises(stepmill.EnvTimeout, match=f"not done within {DEADLINE_S:g} s"):
            await env.call("wait_here")
        gate.open()
        assert await env.call(lambda env: "own") == "own"


@BOTH
async def test_close_ends_a_call(backend: Any, gate: Gate) -> None:
    async with gate_pool(gate, backend=backend) as pool:
        lease = pool.lease()
        await lease.__aenter__()
        call = asyncio.create_task(lease.call("wait_here"))
        await asyncio.to_thread(gate.wait_arrivals)
        closing = asyncio.create_task(pool.close())
        with pytest.raises(stepmill.ClosedPoolError):
            await call
        gate.open()
        await closing
        with pytest.raises(stepmill.ClosedPoolError):
            await lease.call("wait_here")


async def test_errors_of_calls_that_are_kept_hold_no_descriptor_open() -> None:
    async with chaos_pool() as pool, pool.lease() as env:
        await env.reset(seed=1)
        kept: list[BaseException] = []
        await env.call("locate")  # from here on the event loop receives the replies of the worker
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(KeyError) as caught:
                await env.call(raise_key_error)
            kept.append(caught.value)
        assert len(os.listdir("/proc/self/fd")) <= len(before)


async def is_marked(lost: stepmill.EnvLease) -> bool:
    """Return whether the step of an env that is lost says so in its info, or raises it."""
    try:
        return "fault" in (await lost.step(1))[4]
    except stepmill.WorkerDied:
        return False


@pytest.mark.parametrize("on_fault", ["raise", "truncate"])
async def test_a_death_in_a_call_is_raised_and_a_reset_brings_all_envs_of_the_worker_back(on_fault: Any) -> None:
    async with chaos_pool(on_fault=on_fault) as pool:
        by_id = await held_by_id(pool)
        with pytest.raises(stepmill.WorkerDied) as caught:
            await by_id[0].call(end_process)
        assert set(caught.value.env_ids) == {0, 1}
        assert [await is_marked(by_id[lost]) for lost in (0, 1)] == [on_fault == "truncate"] * 2
        assert (await by_id[2].step(1))[1] == 1.0
        assert await asyncio.gather(play(by_id[0], 4), play(by_id[1], 5)) == [played_alone(4), played_alone(5)]
        assert await by_id[0].call("locate") == 0


async def test_a_reset_after_a_death_in_a_call_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chaos_pool() as pool, pool.lease() as env:
        waits: list[bool] = []
        revive = pool.pool.revive
        monkeypatch.setattr(pool.pool, "revive", lambda ids, *, wait: (waits.append(wait), revive(ids, wait=wait)))
        with pytest.raises(stepmill.WorkerDied):
            await env.call(end_process)
        assert await play(env, 4) == played_alone(4)
        assert waits == [False]


async def test_under_replay_a_call_of_an_env_whose_worker_was_killed_reaches_the_rebuilt_env() -> None:
    async with chaos_pool(on_fault="replay", seeding="per_episode") as pool, pool.lease() as env:
        await env.reset(seed=1)
        await env.step(1)
        await asyncio.to_thread(kill_first_worker, pool)
        assert await env.call(read_clock) == 1
        obs = (await env.step(1))[0]
        assert [int(obs[column]) for column in (IDENTITY, CLOCK)] == [0, 2]


async def test_a_call_that_waits_for_its_env_to_be_rebuilt_leaves_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    num_waits = 0
    watch_call = PoolPort.watch_call

    def count(port: PoolPort, *args: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        return watch_call(port, *args)

    monkeypatch.setattr(PoolPort, "watch_call", count)

    options = {"on_fault": "replay", "seeding": "per_episode", "workers": {"call_timeout_s": CALL_LIMIT_S}}
    async with gate_pool(gate, **options) as pool, pool.lease() as env:
        gate.open()
        await env.reset(options={"gate": True})
        await asyncio.to_thread(gate.wait_arrivals)
        pid = pool.pool.stats().workers[0].pid
        stop_process(pid)
        call = asyncio.create_task(env.call(lambda env: "rebuilt"))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(gate.wait_arrivals)  # the replay repeats the reset
        before, began = num_waits, asyncio.get_running_loop().time()
        await asyncio.sleep(CALL_LIMIT_S)
        assert num_waits - before <= (asyncio.get_running_loop().time() - began) / leases.SLICE_S + 5
        gate.open()
        assert await call == "rebuilt"


async def test_calls_that_only_the_pool_may_make_are_refused() -> None:
    async with stepmill.AsyncPool(ChaosEnv, num_envs=1) as pool:
        lease = pool.lease()
        with pytest.raises(stepmill.UsageError, match="not held"):
            await lease.call("locate")
        async with lease as env:
            with pytest.raises(stepmill.UsageError, match="bypass the engine"):
                await env.call("step", 1)


@pytest.mark.parametrize("policy", ["raise", "truncate"])
async def test_an_env_that_was_lost_answers_no_call_before_its_reset(policy: Any) -> None:
    async with chaos_pool(on_fault=policy) as pool:
        envs = await held_by_id(pool)
        for env in envs.values():
            await env.step(1)
        kill_first_worker(pool)
        with suppress(stepmill.WorkerDied):
            await envs[0].step(1)  # finds the death
        await envs[0].reset(seed=1)  # restarts the worker, also for env 1
        for _ in range(2):
            with pytest.raises(stepmill.WorkerDied):
                await envs[1].call(read_clock)
        assert await envs[2].call(read_clock) == 1
        with suppress(stepmill.WorkerDied):
            await envs[1].step(1)
        with pytest.raises(stepmill.WorkerDied):
            await envs[1].call(read_clock)
        await envs[1].reset(seed=1)
        assert await envs[1].call(read_clock) == 0


@BOTH
async def test_a_call_that_outlives_its_lease_disturbs_no_other_task(backend: Any, gate: Gate) -> None:
    async with gate_pool(gate, backend=backend) as pool:
        async with pool.lease() as env:
            await env.reset(seed=1)
            call = asyncio.create_task(env.call("wait_here"))
            await asyncio.to_thread(gate.wait_arrivals)
        async with pool.lease() as env:
            reset = asyncio.create_task(env.reset(seed=2))
            for _ in range(3):
                await asyncio.sleep(0)
            gate.open()
            obs, _ = await reset
            assert obs.tolist() == [0, 0, 0]
            assert await call == 0
            assert (await env.step(1))[1] == 1.0


async def test_a_task_whose_lease_has_ended_sends_nothing_to_the_env_of_another(gate: Gate) -> None:
    async with gate_pool(gate) as pool:
        async with pool.lease() as env:
            await env.reset(seed=1)
            step = asyncio.create_task(env.step(GATED_ACTION))
            await asyncio.to_thread(gate.wait_arrivals)
            step.cancel()
            with suppress(asyncio.CancelledError):
                await step
            waiting = asyncio.create_task(env.reset(seed=9))  # waits for the step
            await asyncio.sleep(0)
        gate.open()
        async with pool.lease() as other:
            await other.reset(seed=2)
            await other.step(1)
            with pytest.raises(stepmill.UsageError, match="this lease of env 0 has ended while a task used it"):
                await waiting
            assert (await other.step(1))[0].tolist()[2] == 2


@pytest.mark.parametrize("what", ["step", "call", "reset", "lease", "receive"])
def test_a_pool_is_used_in_the_event_loop_in_which_it_was_entered(what: str) -> None:
    pool = stepmill.AsyncPool(ChaosEnv, num_envs=1)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    lease: Any = None

    async def begin() -> None:
        nonlocal lease
        await pool.__aenter__()
        if what not in ("lease", "receive"):
            lease = await pool.lease().__aenter__()
            await lease.reset(seed=1)

    async def use() -> None:
        if what == "receive":
            await pool.receive(0)
        await {"step": lambda: lease.step(1), "call": lambda: lease.call("locate"), "reset": lambda: lease.reset()}.get(
            what, lambda: pool.lease().__aenter__()
        )()

    try:
        first.run_until_complete(begin())
        with pytest.raises(stepmill.UsageError, match="used in the event loop in which the pool was entered"):
            second.run_until_complete(use())
        if lease is not None:
            assert first.run_until_complete(lease.step(1))[1] == 1.0
        second.run_until_complete(pool.close())
    finally:
        for loop in (first, second):
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
