"""`Batches`: one task of an event loop sends commands to any envs of a pool, and awaits batches of results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from stepmill import EnvState, Pool, Received, StepmillError, UsageError
from stepmill.pool.port import PoolPort

SLICE_S = 0.1  # an env could read the eventfd empty: while envs are stepping the pool also looks by itself


class Batches:
    """Waits for a pool in an event loop, which stays free for other tasks. It has no results of its own."""

    use = "send() and receive()"

    def __init__(self, pool: Pool) -> None:
        self._pool, self._port = pool, PoolPort(pool)
        self._waiter: asyncio.Future[None] | None = None

    def end(self, error: StepmillError) -> None:
        """Fail the task that waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def revive(self, env_ids: Sequence[int] | None) -> None:
        """Revive those of these envs, or of all, that have a fault. A reset alone would wait until their workers have started."""
        states = self._pool.states
        ids = range(len(states)) if env_ids is None else env_ids
        lost = [env_id for env_id in ids if states[env_id] is EnvState.FAULTED]
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
        """Wait for the pool's event, at most for a while."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        loop.add_reader(self._port.event_fd, self._wake)
        try:
            await self._waiter
        finally:
            loop.remove_reader(self._port.event_fd)
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
