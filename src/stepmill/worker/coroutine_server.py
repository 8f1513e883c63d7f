"""The loop of a worker with coroutine envs, whose commands run at the same time in one event loop.

A command that exceeds its deadline is cancelled. If it still continues, or if an env blocks the event loop, the reaper
ends the worker, as with all other envs. A request to an env runs in the task of the env, after the commands that were
sent before. Commands that were sent later wait until the request is served. Other envs continue meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from stepmill import _native
from stepmill.worker import calls
from stepmill.worker.calls import SETTING_KINDS
from stepmill.worker.coroutines import CANCEL_GRACE_S, Cancelled, abandon, close, rename_task, run_here, task_of
from stepmill.worker.messages import Reply, Request, RequestKind, WorkerSettings

if TYPE_CHECKING:
    from stepmill.worker.env_host import Mailbox

_CLOSING_GRACE_S = 0.5  # how long a command that was cancelled may clean up when the pool ends
_LONGEST_TICK_S = 0.25
_TICKS_PER_LIMIT = 8
_FOREVER_S = float("inf")


class _Watched:
    """Awaits an awaitable, and records in the slab when its code runs."""

    def __init__(self, native: _native.CoroutineLoop, server: int, value: Awaitable[Any]) -> None:
        self._native, self._server, self._value = native, server, value

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine: Any = self._value.__await__()
        advance = resume = partial(next, coroutine)
        while True:
            self._native.enter(self._server)
            try:
                waits_for = resume()
            except StopIteration as stop:
                return stop.value
            finally:
                self._native.leave()
            resume = advance
            try:
                yield waits_for
            except BaseException as exc:
                resume = partial(coroutine.throw, exc)


class CoroutineServer(calls.ServingLoop):
    """The worker's loop for `env_host.serve`. It runs commands, and receives requests."""

    def __init__(
        self,
        native: _native.CoroutineLoop,
        envs: list[Any],
        settings: WorkerSettings,
        make_again: Callable[[int], object],
    ) -> None:
        self._native, self._envs, self._make_again = native, envs, make_again
        self._limits_s = settings.step_timeout_s or _FOREVER_S, settings.reset_timeout_s or _FOREVER_S
        self._tick_s = min(_LONGEST_TICK_S, min(self._limits_s) / _TICKS_PER_LIMIT)
        self._retry_wait_s = settings.reset_retry_wait_s
        self._tasks = [task_of(env) for env in envs]
        self._loop = self._tasks[0].loop
        self._deadlines: dict[int, float] = {}  # those of running commands
        self._cancelled: set[int] = set()
        self._stale: set[int] = set()  # servers with cancelled commands, whose envs are made again
        self._settings: defaultdict[int, dict[object, tuple[Request, int]]] = defaultdict(dict)
        self._mailbox: Mailbox  # the argument of `begin`
        self._requests: deque[Request | None] = deque()  # None if the learner has exited
        self._holds: defaultdict[int, deque[int]] = defaultdict(deque)  # by server: tickets after which requests come
        self._served: Request | None = None
        self._call_limit_s = settings.call_timeout_s or _FOREVER_S
        self._call_deadline = _FOREVER_S
        self._must_stop = False
        self._error: BaseException | None = None

    # ---- for env_host.serve ----------------------------------------------------------------------------------------------

    def begin(self, mailbox: Mailbox, num_requests: int) -> None:
        """Begin to receive commands, and to receive requests from a mailbox."""
        self._mailbox = mailbox
        self._native.requests_seen(num_requests)
        self._loop.add_reader(self._native.event_fd, self._guard, self._receive)
        self._ticked = self._loop.time()
        self._guard(self._tick)
        self._guard(self._receive)

    def run(self) -> int:
        """Run commands until there is a request or the worker must stop. Return LOOP_REQUEST or LOOP_STOP."""
        while not self._requests and not self._must_stop:
            self._loop.run_forever()
            if self._error is not None:
                raise self._error
        if self._must_stop:
            self._end()
        return _native.LOOP_STOP if self._must_stop else _native.LOOP_REQUEST

    def next(self) -> Request | None:
        """Return the next request."""
        self._served = request = self._requests.popleft()
        if request is None or request.kind is RequestKind.END:
            self._end()
        else:
            self.keep_settings(request)
            self._call_deadline = self._loop.time() + self._call_limit_s
        return request

    def keep_settings(self, request: Request) -> None:
        """Store the settings of a request, for envs that are made again."""
        if request.kind in SETTING_KINDS and isinstance(request.payload, tuple):
            for index, server in enumerate(request.servers):
                self._settings[server][request.kind, request.payload[0]] = request, index

    def reply(self, reply: Reply) -> None:
        """Send a reply through the mailbox."""
        self._mailbox.reply(reply)

    def requests_seen(self, _count: int) -> None:
        """End the service of a request."""
        request, self._served = self._served, None
        for server in () if request is None else request.servers:
            self._holds[server].popleft()
            self._hold(server)
        if not self._requests:
            self._native.end_request()
        self._guard(self._receive)

    def run_until(self, local: int, after_ticket: int) -> None:
        """Wait until the commands of an env that precede a request have ended."""
        done = self._loop.create_future()
        done.set_result(None)  # it cannot be cancelled
        run_here(done, self._envs[local])

    def restore(self, local: int, position: dict[str, Any]) -> None:
        self._native.restore(local, position)

    def set_default_options(self, local: int, options: bytes | None) -> None:
        """Set the options for resets that have no options."""
        self._native.set_default_options(local, options)

    def _end(self) -> None:
        """Cancel the running commands. Those that continue are abandoned."""
        self._must_stop = True
        self._timer.cancel()
        self._loop.remove_reader(self._native.event_fd)
        self._native.stop()
        for server in self._deadlines:
            self._tasks[server].cancel()
        until = self._loop.time() + _CLOSING_GRACE_S
        while self._deadlines and self._loop.time() < until:
            self._loop.run_until_complete(asyncio.sleep(_CLOSING_GRACE_S / 100))
        for server in tuple(self._deadlines):
            abandon(self._envs[server])

    def _guard(self, callback: Callable[[], None]) -> None:
        """Call a callback of the event loop. `run` raises its exceptions."""
        try:
            callback()
        except BaseException as exc:
            self._error = exc
        if self._error or self._requests or self._must_stop:
            self._return()

    def _return(self) -> None:
        """Stop the event loop if `run` runs it. Do nothing if a request is being served."""
        if self._loop.is_running() and self._served is None:
            self._loop.stop()

    # ---- commands -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Begin new commands, and read new requests."""
        exit_kind = _native.LOOP_REQUEST
        while exit_kind == _native.LOOP_REQUEST and None not in self._requests:
            exit_kind, new = self._native.receive_calls()
            for server, is_reset, arguments in new:
                self._tasks[server].begin(partial(self._begin_command, server, arguments, is_reset=is_reset))
            if exit_kind == _native.LOOP_REQUEST:
                self._read_request()
        self._must_stop |= exit_kind == _native.LOOP_STOP

    def _read_request(self) -> None:
        """Read a request, and hold the commands of its envs that come after it."""
        request = self._mailbox.next()
        self._requests.append(request)
        if request is None:
            return
        self._native.begin_request()
        for server, ticket in zip(request.servers, request.after, strict=True):
            self._holds[server].append(ticket)
            self._hold(server)

    def _hold(self, server: int) -> None:
        self._native.hold(server, self._holds[server][0] if self._holds[server] else None)

    async def _begin_command(self, server: int, arguments: Any, *, is_reset: bool) -> None:
        try:
            await self._run_command(server, arguments, is_reset=is_reset)
        except Exception as exc:  # a bug
            self._error = exc
            self._return()

    async def _run_command(self, server: int, arguments: Any, *, is_reset: bool) -> None:
        """Make the calls of one command."""
        limit_s = self._limits_s[is_reset]
        self._deadlines[server] = self._loop.time() + limit_s
        try:
            returned = await _Watched(self._native, server, self._call(server, arguments, is_reset=is_reset))
        except GeneratorExit:  # the thread ends, and this command does not
            raise
        except BaseException as exc:
            self._end_command(server)
            error: BaseException = exc
            if server in self._cancelled:
                error = Cancelled(limit_s).with_traceback(exc.__traceback__)
                self._stale.add(server)
            arguments = self._native.fail(server, error)
            wait_s = self._retry_wait_s
        else:
            self._end_command(server)
            arguments = self._native.accept(server, returned)
            wait_s = 0.0
        self._cancelled.discard(server)
        if arguments is not None and not self._must_stop:
            self._deadlines[server] = _FOREVER_S
            with suppress(asyncio.CancelledError):  # by `_end`, or by a task that the env has left behind
                await asyncio.sleep(wait_s)
            del self._deadlines[server]
        if arguments is not None and not self._must_stop:
            await self._run_command(server, arguments, is_reset=True)

    async def _call(self, server: int, arguments: Any, *, is_reset: bool) -> Any:
        if not is_reset:
            returned = self._envs[server].step(arguments)
        else:
            if server in self._stale:
                await self._renew(server)
            returned = self._envs[server].reset(**arguments)
        return await returned if inspect.isawaitable(returned) else returned

    async def _renew(self, server: int) -> None:
        """Make an env again, so that late replies on connections of the old object do not reach an episode."""
        old = self._envs[server]
        with suppress(Exception):
            await close(old)
        self._envs[server] = new = self._make_again(server)
        rename_task(old, new)
        for request, index in self._settings[server].values():
            value = calls.perform(self, new, request, index)
            if inspect.isawaitable(value):
                await value
        self._stale.discard(server)

    def _end_command(self, server: int) -> None:
        del self._deadlines[server]
        task: Any = asyncio.current_task()
        if server in self._cancelled and hasattr(task, "uncancel"):  # since Python 3.11
            task.uncancel()

    def _tick(self) -> None:
        """Cancel commands that are too late, and show the reaper that the event loop runs."""
        now = self._loop.time()
        self._native.leave()
        held_up_s = now - self._ticked - 2 * self._tick_s  # how long an env, or the machine, blocked the event loop
        for server, deadline in self._deadlines.items():
            if held_up_s > 0:
                self._deadlines[server] += held_up_s
            elif now < deadline:
                continue
            elif server in self._cancelled:
                self._native.give_up(server)
                self._must_stop = True
            else:
                self._cancelled.add(server)
                self._tasks[server].cancel()
                self._deadlines[server] = now + CANCEL_GRACE_S
        if self._served is not None and now > self._call_deadline:  # the caller no longer waits for it
            for server in self._served.servers:
                self._tasks[server].cancel_call(self._call_limit_s)
        self._ticked = now
        self._timer = self._loop.call_later(self._tick_s, self._guard, self._tick)
