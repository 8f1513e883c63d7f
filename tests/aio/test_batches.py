"""A task that thinks in batches awaits `AsyncPool.receive`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from tests.aio.test_leases import chaos_pool
from tests.chaos.envs import CLOCK, KILL, RAISE


def ids_of(received: stepmill.Received) -> list[int]:
    return [] if received.batch is None else sorted(received.batch.env_id.tolist())


def gate_pool(gate: Gate, num_envs: int = 3) -> stepmill.AsyncPool:
    fns = [partial(GateEnv, gate.path, env_id) for env_id in range(num_envs)]
    return stepmill.AsyncPool(fns, envs_per_worker=1)


async def test_receive_waits_for_as_many_envs_as_it_is_asked_for(gate: Gate) -> None:
    async with gate_pool(gate) as pool:
        pool.reset_async()
        assert ids_of(await pool.receive(3)) == [0, 1, 2]
        pool.send([1, GATED_ACTION, 2])
        assert ids_of(await pool.receive(2)) == [0, 2]
        last = asyncio.create_task(pool.receive())
        await asyncio.to_thread(gate.wait_arrivals)
        assert not last.done()
        gate.open()
        assert ids_of(await last) == [1]


async def test_receive_returns_what_there_is_after_its_timeout_or_at_once(gate: Gate) -> None:
    async with gate_pool(gate) as pool:
        pool.reset_async()
        await pool.receive(None)
        pool.send([GATED_ACTION], env_ids=[0])
        assert ids_of(await pool.receive(timeout_s=0.01)) == []
        assert ids_of(await pool.receive(0)) == []
        gate.open()
        assert ids_of(await pool.receive()) == [0]
        with pytest.raises(stepmill.UsageError, match="send\\(\\) to more envs first"):
            await pool.receive()


async def test_a_cancelled_receive_loses_nothing(gate: Gate) -> None:
    async with gate_pool(gate) as pool:
        pool.reset_async()
        await pool.receive(3)
        pool.send([1, GATED_ACTION, 1])
        waiting = asyncio.create_task(pool.receive(3))
        await asyncio.to_thread(gate.wait_arrivals)
        with pytest.raises(stepmill.UsageError, match="another task waits"):
            await pool.receive()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        gate.open()
        assert ids_of(await pool.receive(3)) == [0, 1, 2]


async def test_faults_are_returned_and_a_reset_brings_their_envs_back_while_others_go_on() -> None:
    async with chaos_pool() as pool:
        pool.reset_async(seed=1)
        await pool.receive(4)
        pool.send([1, KILL, RAISE, 1])
        faults: dict[int, Any] = {}
        others: list[int] = []  # 3, and maybe 0 before its worker died
        while set(faults) != {0, 1, 2} or 3 not in others:
            received = await pool.receive()
            faults |= received.faults
            others += [] if received.batch is None else received.batch.env_id.tolist()
        assert faults[2].kind == "raised"
        assert isinstance(faults[0].error, stepmill.WorkerDied)
        pool.reset_async(env_ids=[0, 1, 2])
        clocks: dict[int, int] = {}
        while not {0, 1, 2} <= clocks.keys():
            batch = (await pool.receive()).batch
            clocks |= dict(zip(batch.env_id.tolist(), batch.obs[:, CLOCK].tolist(), strict=True))
        assert [clocks[env_id] for env_id in (0, 1, 2)] == [0, 0, 0]


async def test_an_env_that_does_not_exist_is_named() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=2, backend="thread") as pool:
        with pytest.raises(stepmill.UsageError, match="7"):
            pool.reset_async(env_ids=[7])


async def test_a_pool_is_used_by_leases_or_in_batches() -> None:
    async with chaos_pool() as pool:
        pool.reset_async()
        with pytest.raises(stepmill.UsageError, match="used with send"):
            pool.lease()
    async with chaos_pool() as pool, pool.lease():
        with pytest.raises(stepmill.UsageError, match="used with leases"):
            await pool.receive()
