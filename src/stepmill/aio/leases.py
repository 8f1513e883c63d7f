"""`Leases` gives idle envs to tasks of an event loop, and each result to the task that awaits it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stepmill import EngineBug, EnvTimeout, Pool, Received, StepmillError, UsageError
from stepmill.aio.batches import SLICE_S, wait_readable, wake
from stepmill.aio.on_demand import CLOSE
from stepmill.pool.port import PoolPort, rows_of

Result = tuple[Any, Any, Any, Any, dict[str, Any]]
T = TypeVar("T")
logger = logging.getLogger("stepmill")

_MAX_REFUSALS = 100  # a command that is refused more often, without a fault, would be refused without end
# How many tasks get results in one turn of the event loop, before it looks at timers and descriptors. One that gets a fault counts as
# several: it is likely to reset its env.
_MAX_WOKEN, _FAULT_COUNTS = 16, 4


@dataclass(eq=False)
class Seat:
    """The state of one env.

    Attributes:
        env_id: the env.
        is_busy: whether it has a command whose result has not arrived.
        is_returned: whether its lease has ended, so that the env is free once its command has ended.
        waiter: the future of the task that awaits the result or a call. It is None if the task was cancelled; the
            result is then dropped.
        fault: why the env needs a reset before the next step; None if it has no fault.
        is_built, is_first: whether an env on demand is built, and whether its thread builds it at each start.
        timer: closes the env when it has been idle for too long.
        load: how many envs of its thread are taken by tasks. All envs of the thread share the list.
    """

    env_id: int
    is_busy: bool = False
    is_returned: bool = False
    waiter: asyncio.Future[Any] | None = None
    fault: StepmillError | None = None
    is_built: bool = False
    is_first: bool = False
    timer: asyncio.TimerHandle | None = None
    load: list[int] = field(default_factory=lambda: [0])


def _cost(seat: Seat) -> tuple[bool, int]:
    return not seat.is_built, seat.load[0]


class Leases:
    """Records which task has which env of a pool, and which task waits for what. It never blocks its event loop."""

    use = "leases"

    def __init__(self, pool: Pool, idle_s: float | None) -> None:
        if pool.num_rows != pool.num_envs or pool.spec.agents:
            raise UsageError(
                "only envs with one row and one agent each can be leased; await batches of these envs with receive()"
            )
        if pool.options.resets.spare_envs:
            raise UsageError(
                "leases have no use for resets.spare_envs; leave the option out, and all envs can be leased"
            )
        self._pool, self._port = pool, PoolPort(pool)
        self._loop = asyncio.get_running_loop()
        self._seats = [Seat(env_id) for env_id in range(pool.num_envs)]
        self._idle_s = idle_s
        self._free: deque[Seat] = deque()
        self._queue: deque[asyncio.Future[Seat]] = deque()  # tasks that wait for an env
        self._outcomes: deque[tuple[asyncio.Future[Result], Result | StepmillError]] = deque()  # to give to tasks
        self._timer: asyncio.TimerHandle | None = None
        self._error: StepmillError | None = None
        self._loop.add_reader(self._port.event_fd, self._advance)
        self._next = self._loop.call_soon(self._advance)
        self._free_in_turns()

    def _free_in_turns(self) -> None:
        """Free all seats, so that neighbours are of different workers if possible, or else of different threads."""
        places = []
        for worker, thread, env_ids in self._port.threads:
            load = [len(env_ids)]
            for turn, env_id in enumerate(env_ids):
                self._seats[env_id].is_first, self._seats[env_id].load = turn == 0, load
                places.append((turn, thread, worker, env_id))
        for *_, env_id in sorted(places):
            self._put_back(self._seats[env_id])

    def end(self, error: StepmillError) -> None:
        """Raise an error in all tasks that wait, and in every later call."""
        self._error = error
        self._loop.remove_reader(self._port.event_fd)
        if self._timer is not None:
            self._timer.cancel()
        waiters: list[asyncio.Future[Any]] = [
            *self._queue,
            *(seat.waiter for seat in self._seats if seat.waiter is not None),
        ]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
        for seat in self._seats:
            seat.is_busy = False
            if seat.timer is not None:
                seat.timer.cancel()

    # ---- envs and their tasks ----------------------------------------------------------------------------------------

    async def acquire(self) -> Seat:
        """Return an idle env; wait if there is none."""
        if self._error is not None:
            raise self._error
        if self._free:
            return self._take(self._free[0] if self._idle_s is None else min(self._free, key=_cost))
        waiter: asyncio.Future[Seat] = self._loop.create_future()
        self._queue.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            with suppress(ValueError):
                self._queue.remove(waiter)
            if not waiter.cancelled() and waiter.exception() is None:  # the env came at the same time
                self.release(waiter.result())
            raise

    def release(self, seat: Seat) -> None:
        """Give an env to the next task that waits. A busy env is given when its result has arrived."""
        seat.is_returned = seat.is_busy
        if seat.is_busy:
            return
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(seat)
                return
        self._put_back(seat)

    def _take(self, seat: Seat) -> Seat:
        self._free.remove(seat)
        seat.load[0] += 1
        if seat.timer is not None:
            seat.timer.cancel()
        return seat

    def _put_back(self, seat: Seat) -> None:
        """Let an idle env wait for a task. Envs that were used last are taken first, so that the others are closed."""
        seat.load[0] -= 1
        if self._idle_s is None or not seat.is_built:
            self._free.append(seat)
        else:
            self._free.appendleft(seat)
        if self._idle_s is not None and (seat.is_built or seat.is_first) and self._error is None:
            seat.timer = self._loop.call_later(self._idle_s, self._close, seat)

    def _close(self, seat: Seat) -> None:
        """Close an idle env. It is busy meanwhile."""
        self._take(seat).is_built = False
        with suppress(StepmillError):
            if not self._port.is_lost(seat.env_id):  # otherwise there is nothing to close
                seat.is_returned = self._send_reset(seat, None, CLOSE)
                if seat.is_returned:
                    return
                seat.is_built = True  # it is being rebuilt, and is closed later
        self._put_back(seat)

    # ---- commands -----------------------------------------------------------------------------------------------------

    def step(self, seat: Seat, action: Any) -> None:
        """Send an action."""
        send = partial(self._pool.send, self._port.as_batch(action), [seat.env_id])
        self._send(seat, send, is_step=True)
        self._begin(seat)

    async def reset(self, seat: Seat, seed: int | None, options: Mapping[str, Any] | None) -> None:
        """Send a reset, once a replay has rebuilt the env. Revive the env if it has a fault."""
        while not self._send_reset(seat, seed, options):
            await self._wait(seat, self._loop.create_future(), -1)
        seat.is_built = True

    def _send_reset(self, seat: Seat, seed: int | None, options: Mapping[str, Any] | None) -> bool:
        """Send a reset, or return False if a replay is rebuilding the env."""
        env_id = seat.env_id
        seeds = None if seed is None else {env_id: seed}
        settings = None if options is None else {env_id: options}

        def send() -> bool:
            if not self._port.is_rebuilt(env_id):
                return False
            if seat.fault is not None or self._port.is_lost(env_id):
                self._pool.revive([env_id], wait=False)  # a reset alone would wait until the worker has started
            self._pool.reset_async(env_ids=[env_id], seed=seeds, options=settings)
            return True

        is_sent = self._send(seat, send)
        if is_sent:
            seat.fault = None
            self._begin(seat)
        return is_sent

    def _send(self, seat: Seat, send: Callable[[], T], *, is_step: bool = False) -> T:
        """Send a command. If dead workers are found, send it again, except a step of an env that is lost with one of them."""
        for _ in range(_MAX_REFUSALS):
            if self._error is not None:
                raise self._error
            if seat.fault is not None and is_step:
                raise copy.copy(seat.fault)
            try:
                return send()
            except UsageError:
                raise
            except StepmillError as error:
                refusal = error
                self._advance()
        raise refusal

    def _begin(self, seat: Seat) -> None:
        """Record that a command was sent."""
        seat.is_busy = True
        if self._timer is None:
            self._timer = self._loop.call_later(SLICE_S, self._tick)

    async def result_of(self, seat: Seat) -> Result:
        """Wait for the result of the env's command."""
        waiter: asyncio.Future[Result] = self._loop.create_future()
        seat.waiter = waiter
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # asyncio warns about exceptions that are never read
                waiter.exception()
            raise
        finally:
            seat.waiter = None

    async def call(self, seat: Seat, name: str | Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of an env that is idle, and return what it returns."""
        send = partial(self._port.call_now, seat.env_id, name, args, kwargs)
        while (future := self._send(seat, send)) is None:
            await self._wait(seat, self._loop.create_future(), -1)
        while True:
            waiter: asyncio.Future[None] = self._loop.create_future()
            descriptor = self._port.watch_call(future, partial(self._wake_soon, waiter))
            try:
                await self._wait(seat, waiter, descriptor.fileno())  # even if it is done: other tasks run in between
            finally:
                descriptor.close()
            try:
                return future.result(0.0)[0]
            except EnvTimeout as error:
                if error.timeout_s:  # not 0, so the call is too late
                    raise

    async def _wait(self, seat: Seat, waiter: asyncio.Future[None], fd: int) -> None:
        seat.waiter = waiter
        try:
            await wait_readable(fd, waiter, SLICE_S)
        finally:
            seat.waiter = None

    def _wake_soon(self, waiter: asyncio.Future[None]) -> None:
        """End a wait, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(wake, waiter)

    # ---- results ------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Look for results that no event has announced, as long as there are busy envs."""
        self._timer = None
        if any(seat.is_busy for seat in self._seats):
            self._timer = self._loop.call_later(SLICE_S, self._tick)
            self._advance()

    def _advance(self) -> None:
        """Give the available results and faults to tasks, and let the event loop wait for the next."""
        if self._error is not None:
            return
        self._next.cancel()
        try:
            self._give_out(self._pool.receive(0))
            self._wake_tasks()
            if not self._port.watch(1) or self._outcomes:
                self._next = self._loop.call_soon(self._advance)
        except StepmillError as error:
            self.end(error)
        except Exception as error:  # tasks must not wait forever
            self.end(EngineBug(f"results cannot be given out: {error!r}; please report this bug"))
            raise

    def _give_out(self, received: Received) -> None:
        seats = self._seats
        env_ids: list[int] = []
        if (batch := received.batch) is not None:
            env_ids = batch.env_id.tolist()
            infos = dict(rows_of(batch.info))
            columns: Any = batch.reward, batch.terminated, batch.truncated
            # Numbers of Python, as envs return them, or vectors of rewards.
            outcomes = [column.tolist() if column.ndim == 1 else column for column in columns]
            for row, (env_id, *outcome) in enumerate(zip(env_ids, *outcomes, strict=True)):
                self._end_command(seats[env_id], (self._port.row_of(batch.obs, row), *outcome, infos.get(row, {})))
        for env_id, fault in received.faults.items():
            seat = seats[env_id]
            is_closing = seat.is_returned and not seat.is_built
            if is_closing and getattr(fault.error, "env_id", None) == env_id:
                logger.warning("closing the idle env %d failed: %s", env_id, fault.error)
            seat.is_built &= not fault.is_loss
            seat.fault = fault.error
            self._end_command(seat, fault.error)
        for env_id in {*env_ids, *received.faults}:
            if seats[env_id].is_returned:
                self.release(seats[env_id])

    def _end_command(self, seat: Seat, outcome: Result | StepmillError) -> None:
        seat.is_busy = False
        if seat.waiter is not None:
            self._outcomes.append((seat.waiter, outcome))

    def _wake_tasks(self) -> None:
        """Give some tasks what they await. If all continued at once, they would delay the event loop's other tasks."""
        num_woken = 0
        while self._outcomes and num_woken < _MAX_WOKEN:
            waiter, outcome = self._outcomes.popleft()
            if waiter.done():
                continue
            if isinstance(outcome, StepmillError):
                waiter.set_exception(copy.copy(outcome))  # an exception has one traceback, so it is not shared
                num_woken += _FAULT_COUNTS
            else:
                waiter.set_result(outcome)
                num_woken += 1
