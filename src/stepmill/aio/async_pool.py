"""`AsyncPool`: starts a pool, waits for it in an event loop, and gives each result to the task that awaits it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stepmill import ClosedPoolError, EnvState, Pool, Received, StepmillError, UsageError
from stepmill.aio.lease import EnvLease, Result, Seat
from stepmill.pool.infos import rows_of
from stepmill.pool.port import PoolPort

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from stepmill.spec.options import OptionKeywords

SLICE_S = 0.1  # an env could read the eventfd empty: while envs are stepping the pool also looks by itself
_MAX_REFUSALS = 100  # a command that is refused more often, without a fault, would be refused without end


class AsyncPool:
    """Runs N envs for the tasks of an asyncio event loop.

    Either tasks lease envs, each for an episode or more, and await `reset` and `step` of the lease. Or one task awaits `receive` for
    batches of results, after `reset_async` and `send`. One pool is used in one of the two ways, in one event loop. Envs are reset by the
    caller only. Waiting takes no thread: the event loop waits for a descriptor that workers write to.

    Args:
        make_env: a function without arguments that makes an env, called in the workers; or a list of them, one per env.
        num_envs: how many envs, if `make_env` is one function.
        **keywords: options of a pool, such as `num_workers`, `step_timeout_s` and `on_fault`; not `autoreset_mode`. The default of
            `backend` is "process".
    Raises:
        UsageError: an argument is wrong. `async with` starts the envs, and raises what `Pool` raises.
    """

    def __init__(
        self,
        make_env: Callable[[], object] | Sequence[Callable[[], object]],
        num_envs: int | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        if callable(make_env) == (num_envs is None):
            raise UsageError("AsyncPool() takes a function and num_envs, or a list of functions, one per env")
        for name in {"autoreset_mode", "num_episodes"} & keywords.keys():
            raise UsageError(f"the tasks of an AsyncPool decide when an env is reset; leave {name} out")
        env_fns = [make_env] * (num_envs or 0) if callable(make_env) else make_env
        options: dict[str, Any] = {"backend": "process", **keywords, "autoreset_mode": "Disabled"}
        self._make_pool = partial(Pool, env_fns, **options)
        self._start_lock = threading.Lock()
        self._is_closed = False
        self._started: Pool | None = None
        self._error: StepmillError | None = None
        self._free: deque[Seat] = deque()
        self._queue: deque[asyncio.Future[Seat]] = deque()  # tasks that wait for a lease
        self._use = ""  # "leases" or "batches"
        self._receiver: asyncio.Future[None] | None = None  # of `receive`, while it waits
        self._timer: asyncio.TimerHandle | None = None

    # ---- the start and the end ----------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            await self._loop.run_in_executor(None, self._start)
        except asyncio.CancelledError:
            with self._start_lock:
                self._is_closed = True  # the thread closes what it has started
            raise
        self._port = PoolPort(self.pool)
        self._seats = [Seat(env_id) for env_id in range(self.pool.num_envs)]
        self._free.extend(self._in_turns())
        self._loop.add_reader(self._port.event_fd, self._on_event)
        self._advance()
        return self

    def _start(self) -> None:
        pool = self._make_pool()
        try:
            PoolPort(pool).check_event_loop()
            with self._start_lock:
                if not self._is_closed:
                    self._started = pool
        finally:
            if self._started is None:
                pool.close()

    def _in_turns(self) -> list[Seat]:
        """Return all seats so that those that follow each other are of different workers."""
        worker_of = self._port.worker_of
        seats_of: dict[int, list[Seat]] = {}
        for seat in self._seats:
            seats_of.setdefault(worker_of[seat.env_id], []).append(seat)
        turn = {seat.env_id: place for seats in seats_of.values() for place, seat in enumerate(seats)}
        return sorted(self._seats, key=lambda seat: turn[seat.env_id])

    async def close(self) -> None:
        """Close the envs and end the workers. Tasks that wait get ClosedPoolError. Idempotent."""
        pool, self._started = self._started, None
        if pool is None:
            return
        self._end(
            ClosedPoolError("the AsyncPool was closed while this task waited; close it after its tasks have ended")
        )
        self._loop.remove_reader(self._port.event_fd)
        await self._loop.run_in_executor(None, pool.close)

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def pool(self) -> Pool:
        """The Pool, for its facts: `spec`, `options`, `states`, `stats()`, spaces. Do not wait in it."""
        if self._error is not None:
            raise self._error
        if self._started is None:
            raise ClosedPoolError("the AsyncPool does not run; use it inside of `async with AsyncPool(...) as pool`")
        return self._started

    @property
    def num_envs(self) -> int:
        """The number of envs, N."""
        return self.pool.num_envs

    # ---- leases -------------------------------------------------------------------------------------------------------

    def lease(self) -> EnvLease:
        """Return a lease of an idle env, for `async with`, which waits if there is none. First come, first served."""
        self._begin_use("leases")
        return EnvLease(self)

    async def acquire(self) -> Seat:
        """Wait for an idle env."""
        self._begin_use("leases")
        if self._free:
            seat = self._free.popleft()
        else:
            waiter: asyncio.Future[Seat] = self._loop.create_future()
            self._queue.append(waiter)
            try:
                seat = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self.release(waiter.result())
                raise
        return seat

    def release(self, seat: Seat) -> None:
        """Give an env to the next task that waits; if it is busy, when its result has arrived."""
        seat.is_returned = seat.is_busy
        if seat.is_busy:
            return
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(seat)
                return
        self._free.append(seat)

    def step_env(self, seat: Seat, action: Any) -> Awaitable[Result]:
        """Send an action, and return what awaits the result."""
        send = partial(self.pool.send, self._port.as_batch(action), [seat.env_id])
        self._send(seat, send, can_have_fault=False)
        return self.result_of(seat)

    def reset_env(self, seat: Seat, seed: int | None, options: Mapping[str, Any] | None) -> Awaitable[Result]:
        """Send a reset, and return what awaits the result. Revive the env if it has a fault."""
        ids = [seat.env_id]
        seeds = None if seed is None else {seat.env_id: seed}
        settings = None if options is None else {seat.env_id: options}

        def send() -> None:
            if seat.fault is not None:
                self.pool.revive(ids, wait=False)  # a reset alone would wait until a worker has started
            self.pool.reset_async(env_ids=ids, seed=seeds, options=settings)

        self._send(seat, send, can_have_fault=True)
        seat.fault = None
        return self.result_of(seat)

    def _send(self, seat: Seat, send: Callable[[], None], *, can_have_fault: bool) -> None:
        """Send a command. If dead workers are found, send it again unless the env is lost with one of them."""
        for _ in range(_MAX_REFUSALS):
            try:
                send()
            except UsageError:
                raise
            except StepmillError as error:
                refusal = error
            else:
                seat.is_busy = True
                if self._timer is None:
                    self._timer = self._loop.call_later(SLICE_S, self._tick)
                return
            self._advance()
            if seat.fault is not None and not can_have_fault:
                raise seat.fault
        raise refusal

    async def result_of(self, seat: Seat) -> Result:
        """Wait for the result of the env's command."""
        waiter: asyncio.Future[Result] = self._loop.create_future()
        seat.waiter = waiter
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it came too late; nobody reads the exception, of which asyncio would complain
                waiter.exception()
            raise
        finally:
            seat.waiter = None

    # ---- batches ------------------------------------------------------------------------------------------------------

    def reset_async(self, **arguments: Any) -> list[int]:
        """Send resets, as `Pool.reset_async` does. Envs that have a fault are revived first, without waiting."""
        pool = self._begin_use("batches")
        ids, states = arguments.get("env_ids"), pool.states
        lost = [env_id for env_id in (range(len(states)) if ids is None else ids) if states[env_id] is EnvState.FAULTED]
        if lost:
            pool.revive(lost, wait=False)
        return pool.reset_async(**arguments)

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Send actions to some envs, or all, as `Pool.send` does."""
        self._begin_use("batches").send(actions, env_ids)

    async def receive(
        self, min_envs: int | None = 1, max_envs: int | None = None, timeout_s: float | None = None
    ) -> Received:
        """Wait for results and faults, and return them, as `Pool.receive` does. If it is cancelled, nothing is lost.

        Args:
            min_envs: wait for this many envs, each with a result or a fault; 0 does not wait; None is all that are pending.
            max_envs: return at most this many results; None is all that are ready.
            timeout_s: seconds, after which the call returns what there is, possibly nothing; None has no limit.
        """
        pool = self._begin_use("batches")
        if self._receiver is not None:
            raise UsageError("another task waits in receive(); one task receives, and gives work to the others")
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not self._port.has_news(min_envs, max_envs) and (left_s := deadline - time.monotonic()) > 0:
            if self._port.watch(min_envs or pool.num_envs):
                self._receiver = self._loop.create_future()
                try:
                    await asyncio.wait([self._receiver], timeout=min(SLICE_S, left_s))
                finally:
                    self._receiver = None
        return pool.receive(0, max_envs)

    def _begin_use(self, use: str) -> Pool:
        if self._use not in ("", use):
            raise UsageError(f"this AsyncPool is used with {self._use}; make another one for {use}")
        self._use = use
        return self.pool

    # ---- the event loop -----------------------------------------------------------------------------------------------

    def _on_event(self) -> None:
        if self._receiver is None:
            self._advance()
        elif not self._receiver.done():
            self._receiver.set_result(None)

    def _tick(self) -> None:
        """Look for results that no event has announced, while there are busy envs."""
        self._timer = None
        if self._error is None and any(seat.is_busy for seat in self._seats):
            self._timer = self._loop.call_later(SLICE_S, self._tick)
            self._advance()

    def _advance(self) -> None:
        """Give out the results and faults that are there, and have the event loop wait for the next."""
        if self._use == "batches" or self._error is not None:
            return
        try:
            self._deliver(self.pool.receive(0))
            if not self._port.watch(1):
                self._loop.call_soon(self._advance)
        except StepmillError as error:
            self._end(error)

    def _deliver(self, received: Received) -> None:
        batch = received.batch
        done: list[int] = []
        if batch is not None:
            infos = dict(rows_of(batch.info))
            reward, terminated, truncated = batch.reward, batch.terminated, batch.truncated
            if reward.ndim == 1:  # Python's numbers, as envs return them
                reward, terminated, truncated = reward.tolist(), terminated.tolist(), truncated.tolist()
            done = batch.env_id.tolist()
            for row, env_id in enumerate(done):
                obs = self._port.row_of(batch.obs, row)
                result = obs, reward[row], terminated[row], truncated[row], infos.get(row, {})
                self._seats[env_id].take_result(result)
        for env_id, fault in received.faults.items():
            self._seats[env_id].take_fault(fault.error)
        for env_id in {*done, *received.faults}:
            seat = self._seats[env_id]
            if seat.is_returned:
                self.release(seat)

    def _end(self, error: StepmillError) -> None:
        """Fail all tasks that wait, and every later call."""
        self._error = error
        if self._timer is not None:
            self._timer.cancel()
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)  # it then finds the error by itself
        for waiter in (*self._queue, *(seat.waiter for seat in self._seats)):
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
