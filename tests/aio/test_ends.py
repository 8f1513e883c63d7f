"""The start and the end of an `AsyncPool`: nobody waits forever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv, wait_at
from tests.aio.test_leases import chaos_pool
from tests.harness.hangs import HANG_GUARD_S


class GatedConstructor(CountingEnv):
    def __init__(self, path: str) -> None:
        wait_at(path)
        super().__init__()


async def test_close_ends_the_wait_of_every_task(gate: Gate) -> None:
    pool = stepmill.AsyncPool(partial(GateEnv, gate.path), num_envs=2)
    async with pool:
        first, second, *unused = (pool.lease() for _ in range(4))
        tasks: list[asyncio.Task[Any]] = []
        for lease in (first, second):
            await lease.__aenter__()
            await lease.reset()
            tasks.append(asyncio.create_task(lease.step(GATED_ACTION)))
        tasks.append(asyncio.create_task(pool.lease().__aenter__()))
        await asyncio.to_thread(gate.wait_arrivals, 2)
        closing = asyncio.create_task(pool.close())
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all("closed while this task used it" in str(error) for error in found)
        gate.open(2)
        await closing
        with pytest.raises(stepmill.ClosedPoolError):
            pool.lease()
        found += await asyncio.gather(*(each.__aenter__() for each in unused), return_exceptions=True)
        assert [type(error) for error in found] == [stepmill.ClosedPoolError] * 5
        assert len({id(error) for error in found}) == 5  # each task has the traceback of its own call
    with pytest.raises(stepmill.ClosedPoolError):
        pool.lease()


async def test_a_start_that_is_cancelled_leaves_nothing_behind(gate: Gate) -> None:
    pool = stepmill.AsyncPool(partial(GatedConstructor, str(gate.path)), num_envs=1)
    start = asyncio.create_task(pool.__aenter__())
    await asyncio.to_thread(gate.wait_arrivals)
    start.cancel()
    with suppress(asyncio.CancelledError):
        await start
    gate.open()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"num_envs": 2, "backend": "serial"}, "would block an event loop"),
        ({"num_envs": 2, "autoreset_mode": "NextStep"}, "leave autoreset_mode out"),
        ({"num_envs": 2, "num_episodes": 3}, "leave num_episodes out"),
        ({}, "a function and num_envs"),
        ({"num_envs": 0}, "must be a whole number, 1 or more"),
        ({"num_envs": 2, "nonsense": 3}, "nonsense"),
    ],
)
async def test_what_cannot_be_is_refused_with_the_reason(arguments: Any, why: str) -> None:
    with pytest.raises((stepmill.UsageError, TypeError), match=why):
        async with stepmill.AsyncPool(CountingEnv, **arguments):
            pass


async def test_an_env_that_cannot_be_built_is_an_error_of_the_start() -> None:
    with pytest.raises(stepmill.EnvError, match="nonsense"):
        async with stepmill.AsyncPool(partial(CountingEnv, nonsense=1), num_envs=1):
            pass


async def test_a_pool_is_used_inside_of_its_with_statement() -> None:
    pool = stepmill.AsyncPool(CountingEnv, num_envs=1)
    with pytest.raises(stepmill.ClosedPoolError, match="async with AsyncPool"):
        pool.lease()
    await pool.close()


async def test_a_pool_is_entered_once() -> None:
    pool = stepmill.AsyncPool(CountingEnv, num_envs=1, backend="thread")
    async with pool, pool.lease() as env:
        with pytest.raises(stepmill.UsageError, match="entered before"):
            await pool.__aenter__()
        await env.reset()
    with pytest.raises(stepmill.UsageError, match="entered before"):
        await pool.__aenter__()


async def test_tasks_that_give_up_waiting_for_an_env_leave_nothing_behind() -> None:
    def count_futures() -> int:
        return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())

    async with stepmill.AsyncPool(CountingEnv, num_envs=1, backend="thread") as pool, pool.lease():
        before = count_futures()
        for _ in range(100):
            waits = asyncio.create_task(pool.lease().__aenter__())
            await asyncio.sleep(0)
            waits.cancel()
            with suppress(asyncio.CancelledError):
                await waits
        assert count_futures() < before + 50


def test_a_failed_task_ends_the_program_with_its_error() -> None:
    async def main() -> None:
        async with chaos_pool() as pool, pool.lease() as env:
            await env.reset()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


PROGRAM = """
import asyncio, stepmill
from stepmill.testing.envs import SlowEnv
async def main():
    async with stepmill.AsyncPool(SlowEnv, num_envs=2) as pool, pool.lease() as env:
        await env.reset()
        print("steps", flush=True)
        while True:
            if (await env.step(1))[2]:
                await env.reset()
asyncio.run(main())
"""


def test_ctrl_c_ends_the_program() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "steps\n"
        program.send_signal(signal.SIGINT)
        _, error = program.communicate(timeout=HANG_GUARD_S)
    assert error.strip().endswith("KeyboardInterrupt"), error


async def test_a_bug_ends_the_wait_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, obs: object, row: int) -> None:
        raise ZeroDivisionError("planted")

    noted: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noted.append(context["exception"]))
    async with chaos_pool() as pool, pool.lease() as env:
        monkeypatch.setattr(PoolPort, "row_of", fail)
        with pytest.raises(stepmill.EngineBug, match="planted"):
            await env.reset()
    assert [type(error) for error in noted] == [ZeroDivisionError]
