"""`Leases` gives idle envs to tasks of an event loop, and each result to the task that awaits it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

from stepmill import Batch, EngineBug, EnvFault, EnvTimeout, Pool, StepmillError, UsageError
from stepmill.aio.batches import SLICE_S, wake
from stepmill.aio.on_demand import CLOSE
from stepmill.aio.seats import IdleSeats, Seat, Thread
from stepmill.pool.port import PoolFuture, PoolPort, SentPart, rows_of

Result = tuple[Any, Any, Any, Any, dict[str, Any]]
logger = logging.getLogger("stepmill")

# How many tasks get results in one turn of the event loop, before it looks at timers and descriptors. One that gets a fault counts as
# several: it is likely to reset its env.
_MAX_WOKEN, _FAULT_COUNTS = 16, 4


class Replies:
    """Receives the replies of a worker to the calls of tasks, whenever its descriptor is readable.

    Attributes:
        generation: how often the worker had been restarted.
        waiting: the calls that may have no reply yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, part: SentPart) -> None:
        self.generation = part.generation
        self.waiting: deque[SentPart] = deque()
        self._loop = loop
        self._descriptor = part.future.descriptor()  # empty if another thread receives the replies
        self._is_watched = False
        self.watch()

    def watch(self) -> None:
        """Begin to receive, if that has ended."""
        if not self._is_watched and self._descriptor.fileno() >= 0:
            self._loop.add_reader(self._descriptor.fileno(), self._receive)
            self._is_watched = True

    def _receive(self) -> None:
        while self.waiting and self.waiting[0].future.is_done:
            self.waiting.popleft()
        if self.waiting:
            self.waiting[0].future.receive()
        else:  # what has arrived is not for a task
            self._loop.remove_reader(self._descriptor.fileno())
            self._is_watched = False

    def close(self) -> None:
        """Stop receiving."""
        if self._is_watched:
            self._loop.remove_reader(self._descriptor.fileno())
            self._is_watched = False
        self._descriptor.close()


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
        self.loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._idle = IdleSeats()
        self._seats: dict[int, Seat] = {}
        threads = sorted(
            self._port.threads, key=itemgetter(1, 0)
        )  # so that neighbours are of different workers if possible
        for index, (_, _, env_ids) in enumerate(threads):
            thread = Thread(index, len(env_ids))
            for env_id in reversed(env_ids):
                is_first = env_id == env_ids[0]
                self._seats[env_id] = Seat(env_id, thread, is_built=idle_s is None, is_first=is_first)
        self._queue: OrderedDict[asyncio.Future[Seat], None] = OrderedDict()  # tasks that wait for an env
        self._outcomes: deque[tuple[asyncio.Future[Any], Result | StepmillError]] = deque()  # to give to tasks
        self._pauses: set[asyncio.Future[None]] = set()  # of calls, and of resets during replays
        self._replies: dict[int, Replies] = {}  # by worker
        self._timer: asyncio.TimerHandle | None = None
        self._error: StepmillError | None = None
        self.loop.add_reader(self._port.event_fd, self._advance)
        self._next = self.loop.call_soon(self._advance)
        for seat in self._seats.values():
            self._put_back(seat)

    def end(self, error: StepmillError) -> None:
        """Raise an error in all tasks that wait, and in every later call."""
        self._error = error
        if self.loop.is_closed():
            return
        self.loop.remove_reader(self._port.event_fd)
        if self._timer is not None:
            self._timer.cancel()
        for queued in self._queue:
            if not queued.done():
                queued.set_exception(copy.copy(error))
        self._wake_all()
        for replies in self._replies.values():
            replies.close()
        for seat in self._seats.values():
            if seat.is_busy:
                self._end_command(seat, error)
            if seat.timer is not None:
                seat.timer.cancel()
        while self._outcomes:
            self._wake_tasks()

    # ---- envs and their tasks ----------------------------------------------------------------------------------------

    async def acquire(self) -> Seat:
        """Return an idle env; wait if there is none."""
        if self._error is not None:
            raise copy.copy(self._error)
        if (seat := self._idle.take()) is not None:
            if seat.timer is not None:
                seat.timer.cancel()
            return seat
        waiter: asyncio.Future[Seat] = self.loop.create_future()
        self._queue[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            self._queue.pop(waiter, None)
            if not waiter.cancelled() and waiter.exception() is None:  # the env came at the same time
                self.release(waiter.result())
            raise

    def release(self, seat: Seat) -> None:
        """Give an env to the next task that waits. A busy env is given when its result has arrived."""
        seat.is_returned = seat.is_busy
        if seat.is_busy:
            return
        while self._queue:
            waiter, _ = self._queue.popitem(last=False)
            if not waiter.done():
                waiter.set_result(seat)
                return
        self._put_back(seat)

    def _put_back(self, seat: Seat) -> None:
        """Let an idle env wait for a task."""
        self._idle.put(seat)
        if self._idle_s is not None and (seat.is_built or seat.is_first) and self._error is None:
            seat.timer = self.loop.call_later(self._idle_s, self._close, seat)

    def _close(self, seat: Seat) -> None:
        """Close an idle env. It is busy meanwhile."""
        self._idle.remove(seat).is_built = False
        with suppress(StepmillError):
            if not self._port.is_lost(seat.env_id):  # otherwise there is nothing to close
                seat.is_returned = self.send_reset(seat, None, CLOSE)
                if seat.is_returned:
                    return
                seat.is_built = True  # it is being rebuilt, and is closed later
        self._put_back(seat)

    # ---- commands -----------------------------------------------------------------------------------------------------

    def step(self, seat: Seat, action: Any) -> asyncio.Future[Any]:
        """Send an action, and return the future of its outcome."""
        self._check(seat, is_step=True)
        if not self._port.send_one(seat.env_id, action):
            self._next = self.loop.call_soon(self._advance)  # the fault of the env is the outcome
        return self._begin(seat)

    def reset(self, seat: Seat, seed: int | None, options: Mapping[str, Any] | None) -> asyncio.Future[Any] | None:
        """Send a reset, and return the future of its outcome, or None if a replay is rebuilding the env."""
        if not self.send_reset(seat, seed, options):
            return None
        seat.is_built = True
        return seat.waiter

    def send_reset(self, seat: Seat, seed: int | None, options: Mapping[str, Any] | None) -> bool:
        """Send a reset, or return False if a replay is rebuilding the env. Revive the env if it has a fault."""
        env_id = seat.env_id
        arguments: dict[str, Any] = {"env_ids": [env_id], "seed": None if seed is None else {env_id: seed}}
        arguments["options"] = None if options is None else {env_id: options}
        for _ in range(2):  # the first one may find a death, whose fault is then received
            self._check(seat)
            if not self._port.is_rebuilt(env_id):
                return False
            if seat.fault is not None or self._port.is_lost(env_id):
                with suppress(StepmillError):  # of a neighbour; it is received later
                    self._pool.revive([env_id], wait=False)  # a reset alone would wait until the worker has started
            if self._pool.reset_async(**arguments):
                seat.fault = None
                self._begin(seat)
                return True
            self._advance()
        raise copy.copy(seat.fault.error) if seat.fault is not None else EngineBug(f"env {env_id} takes no reset")

    def _check(self, seat: Seat, *, is_step: bool = False) -> None:
        """Raise the error of the pool, or the fault of an env that is to step or to be called."""
        if self._error is not None:
            raise copy.copy(self._error)
        if is_step and seat.fault is not None:
            raise copy.copy(seat.fault.error)

    def _begin(self, seat: Seat) -> asyncio.Future[Any]:
        """Record that a command was sent, and return the future of its outcome."""
        seat.is_busy = True
        self._begin_ticks()
        return self.outcome_of(seat)

    def outcome_of(self, seat: Seat) -> asyncio.Future[Any]:
        """Return the future of the outcome of the env's command: a Result, or an error to be raised."""
        seat.waiter = self.loop.create_future()
        return seat.waiter

    # ---- calls --------------------------------------------------------------------------------------------------------

    async def call(
        self, seat: Seat, name: str | Callable[..., Any], args: Any, kwargs: Any, check: Callable[[Seat], object]
    ) -> Any:
        """Call a method of an env that is idle, and return what it returns. `check` raises if the lease has ended before."""
        while (future := self._call_now(seat, name, args, kwargs)) is None:
            await self.pause()
            check(seat)
        while True:
            waiter: asyncio.Future[None] = self.loop.create_future()
            part = self._port.watch_call(future, partial(self._wake_soon, waiter))
            if part is not None and not waiter.done():
                self._await_reply(part)
            if waiter.done():
                await asyncio.sleep(0)  # other tasks run in between
            await self.pause(waiter)
            try:
                return future.result(0.0)[0]
            except EnvTimeout as error:
                if error.timeout_s:  # not 0, so the call is too late
                    raise

    def _call_now(self, seat: Seat, name: str | Callable[..., Any], args: Any, kwargs: Any) -> PoolFuture | None:
        for is_last in (False, True):
            self._check(seat, is_step=seat.fault is not None and seat.fault.is_loss)
            try:
                return self._port.call_now(seat.env_id, name, args, kwargs)
            except UsageError:
                raise
            except StepmillError:  # the fault of the env or of a neighbour, which is received now
                if is_last:
                    raise
                self._advance()
        return None

    def _await_reply(self, part: SentPart) -> None:
        """Let the event loop receive the replies of a worker."""
        worker = part.future.worker
        replies = self._replies.get(worker)
        if replies is None or replies.generation != part.generation:
            if replies is not None:
                replies.close()
            self._replies[worker] = replies = Replies(self.loop, part)
        replies.waiting.append(part)
        replies.watch()

    async def pause(self, waiter: asyncio.Future[None] | None = None) -> None:
        """Wait until the waiter is woken, or a slice of time has passed."""
        waiter = self.loop.create_future() if waiter is None else waiter
        self._pauses.add(waiter)
        self._begin_ticks()
        try:
            await waiter
        finally:
            self._pauses.discard(waiter)
        if self._error is not None:
            raise copy.copy(self._error)

    def _wake_soon(self, waiter: asyncio.Future[None]) -> None:
        """End a wait, from any thread."""
        if asyncio._get_running_loop() is self.loop:
            wake(waiter)
            return
        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(wake, waiter)

    def _wake_all(self) -> None:
        for waiter in self._pauses:
            wake(waiter)

    # ---- results ------------------------------------------------------------------------------------------------------

    def _begin_ticks(self) -> None:
        if self._timer is None and self._error is None:
            self._timer = self.loop.call_later(SLICE_S, self._tick)

    def _tick(self) -> None:
        """Look for results and replies that no event has announced, as long as there are busy envs or calls."""
        self._timer = None
        self._wake_all()
        if any(seat.is_busy for seat in self._seats.values()):
            self._begin_ticks()
            self._advance()

    def _advance(self) -> None:
        """Give the available results and faults to tasks, and let the event loop wait for the next. Hot path."""
        if self._error is not None:
            return
        self._next.cancel()
        try:
            batch, faults = self._port.poll()
            if batch is not None:
                self._give_results(batch)
            if faults:
                self._give_faults(faults)
            self._wake_tasks()
            if not self._port.watch(1) or self._outcomes:
                self._next = self.loop.call_soon(self._advance)
        except StepmillError as error:
            self.end(error)
        except Exception as error:  # tasks must not wait forever
            self.end(EngineBug(f"results cannot be given out: {error!r}; please report this bug"))
            raise

    def _give_results(self, batch: Batch) -> None:
        # Numbers of Python, as envs return them, or vectors of rewards.
        rewards = batch.reward.tolist() if batch.reward.ndim == 1 else batch.reward
        columns: Any = rewards, batch.terminated.tolist(), batch.truncated.tolist()
        infos = dict(rows_of(batch.info))
        for row, (env_id, *outcome) in enumerate(zip(batch.env_id.tolist(), *columns, strict=True)):
            result = self._port.row_of(batch.obs, row), *outcome, infos.get(row, {})
            self._end_command(self._seats[env_id], result)

    def _give_faults(self, faults: Mapping[int, EnvFault]) -> None:
        for env_id, fault in faults.items():
            seat = self._seats[env_id]
            is_closing = seat.is_returned and not seat.is_built
            if is_closing and getattr(fault.error, "env_id", None) == env_id:
                logger.warning("closing the idle env %d failed: %s", env_id, fault.error)
            seat.fault = fault
            if fault.is_loss and self._idle_s is not None:
                self._idle.mark_unbuilt(seat)
            self._end_command(seat, fault.error)

    def _end_command(self, seat: Seat, outcome: Result | StepmillError) -> None:
        """Give the outcome of an env's command to the task that awaits it, and the env to the next task if its lease has ended."""
        waiter, seat.waiter = seat.waiter, None
        seat.is_busy = False
        if waiter is not None:
            self._outcomes.append((waiter, outcome))
        if seat.is_returned:
            self.release(seat)

    def _wake_tasks(self) -> None:
        """Give some tasks what they await. If all continued at once, they would delay the event loop's other tasks."""
        num_woken = 0
        while self._outcomes and num_woken < _MAX_WOKEN:
            waiter, outcome = self._outcomes.popleft()
            if waiter.done():  # its task was cancelled
                continue
            if isinstance(outcome, StepmillError):
                waiter.set_result(copy.copy(outcome))  # an exception has one traceback, so it is not shared
                num_woken += _FAULT_COUNTS
            else:
                waiter.set_result(outcome)
                num_woken += 1
