"""`Batches`: one task of an event loop sends commands to any envs of a pool, and awaits batches of results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from stepmill import EnvState, Pool, Received, StepmillError, UsageError
from stepmill.pool.port import PoolPort

# How often the event loop looks for results while envs step. The pool's eventfd announces them, but an env in the same process could
# read it, and the announcement would be lost.
SLICE_S = 0.1


class Batches:
    """Waits for a pool in an event loop, which stays free for other tasks. It stores no results."""

    use = "send() and receive()"

    def __init__(self, pool: Pool, idle_s: float | None) -> None:
        if idle_s is not None:
            raise UsageError("idle_s is for envs that are leased; leave it out for send() and receive()")
        self._pool, self._port = pool, PoolPort(pool)
        self._waiter: asyncio.Future[None] | None = None

    def end(self, error: StepmillError) -> None:
        """Raise an error in the task that waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def revive(self, env_ids: Sequence[int] | None) -> None:
        """Revive the envs with a fault, among these or all. A reset alone would wait until their workers have started."""
        faulted = [env_id for env_id, state in enumerate(self._pool.states) if state is EnvState.FAULTED]
        lost = [env_id for env_id in faulted if env_ids is None or env_id in env_ids]
        if lost:
            self._pool.revive(lost, wait=False)

    async def receive(self, min_envs: int | None, max_envs: int | None, timeout_s: float | None) -> Received:
        """Implement `AsyncPool.receive`."""
        if self._waiter is not None:
            raise UsageError("another task waits in receive(); one task receives, and gives work to the others")
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._port.has_news(min_envs, max_envs) and (left_s := deadline - time.monotonic()) > 0:
            if self._port.watch(min_envs or self._pool.num_envs):
                await self._wait(min(SLICE_S, left_s))
        return self._pool.receive(0, max_envs)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for the pool's event, for at most `timeout_s` seconds."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await wait_readable(self._port.event_fd, self._waiter, timeout_s)
        finally:
            self._waiter = None


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Check that the event loop that runs is the one in which a pool was entered.

    Raises:
        UsageError: it is another one, or none runs.
    """
    if asyncio._get_running_loop() is not loop:
        raise UsageError(
            "an AsyncPool, and its leases, are used in the event loop in which the pool was entered; make a pool in each event loop"
        )


async def wait_readable(fd: int, waiter: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until a descriptor, if it is not -1, is readable, or the waiter has a result or an exception, which is raised."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(timeout_s, wake, waiter)
    if fd >= 0:
        loop.add_reader(fd, wake, waiter)
    try:
        await waiter
    finally:
        timer.cancel()
        if fd >= 0:
            loop.remove_reader(fd)
        if not waiter.cancelled() and waiter.done():  # asyncio warns about exceptions that are never read
            waiter.exception()


def wake(waiter: asyncio.Future[Any]) -> None:
    """End a wait."""
    if not waiter.done():
        waiter.set_result(None)
