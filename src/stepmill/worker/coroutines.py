"""Runs envs whose `reset`, `step` and `close` are coroutines.

All coroutines of one env run in one task, because libraries bind connections and cancel scopes to the task that opened
them. The tasks of all envs of a thread run in one event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from stepmill.spec.errors import UsageError

Work = Callable[[], Coroutine[Any, Any, None]]
CANCEL_GRACE_S = 2.0  # how long a command or call that was cancelled at its deadline may clean up


class Cancelled(Exception):
    """A coroutine env exceeded its deadline, and was cancelled. The text is the deadline in seconds."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"{limit_s:g}")


class _Thread(threading.local):
    """The event loop of a thread's coroutine envs, and their tasks."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tasks: dict[int, EnvTask] = {}  # by the id() of the env


_HERE = _Thread()


class EnvTask:
    """The task of one env."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._work: asyncio.Queue[Work | None] = asyncio.Queue()
        self._coroutine = self._run()
        self._task = loop.create_task(self._coroutine)
        self._may_cancel_at = inf  # when the call that runs now may be cancelled
        self._late_s = 0.0  # the time limit for which it was cancelled

    def begin(self, work: Work | None) -> None:
        """Run `work` after all earlier work. It must not raise exceptions. None ends the task."""
        self._work.put_nowait(work)

    def run(self, value: Awaitable[Any]) -> asyncio.Future[Any]:
        """Await `value` after all earlier work, and return the future of its result."""
        done: asyncio.Future[Any] = self.loop.create_future()
        self.begin(partial(self._run_for, done, value))
        return done

    async def _run_for(self, done: asyncio.Future[Any], value: Awaitable[Any]) -> None:
        self._may_cancel_at = self._late_s = 0.0
        try:
            done.set_result(await value)
        except BaseException as exc:
            done.set_exception(Cancelled(self._late_s).with_traceback(exc.__traceback__) if self._late_s else exc)
        self._may_cancel_at = inf

    def cancel(self) -> None:
        """Cancel the work that runs now."""
        self._task.cancel()

    def cancel_call(self, limit_s: float) -> None:
        """Cancel the work that runs now if `run` began it, and again if it continues."""
        now = self.loop.time()
        if now >= self._may_cancel_at:
            self._may_cancel_at, self._late_s = now + CANCEL_GRACE_S, limit_s
            self.cancel()

    def drop(self) -> None:
        """End the work that runs now, without the event loop."""
        self._coroutine.close()

    def finish(self) -> None:
        """Run the event loop until the task has ended."""
        self.begin(None)
        self.loop.run_until_complete(self._task)

    async def _run(self) -> None:
        while True:
            try:
                work = await self._work.get()
            except asyncio.CancelledError:  # the cancellation was meant for work that has ended
                continue
            if work is None:
                return
            await work()
            if sys.version_info >= (3, 11):
                while self._task.cancelling():  # else a TaskGroup in later work may cancel the task again
                    self._task.uncancel()


def task_of(env: object) -> EnvTask:
    """Return the task of an env in this thread."""
    if _HERE.loop is None:
        _HERE.loop = asyncio.new_event_loop()
    if id(env) not in _HERE.tasks:
        _HERE.tasks[id(env)] = EnvTask(_HERE.loop)
    return _HERE.tasks[id(env)]


def check_thread() -> None:
    """Check that coroutines can be run to their end here.

    Raises:
        UsageError: this thread runs an event loop.
    """
    if _runs_event_loop():
        raise UsageError("envs with coroutines cannot run in a thread that runs an event loop; use backend='process'")


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_here(value: Awaitable[Any], env: object) -> Any:
    """Run an awaitable in the task of its env, and return its result. This thread must not run an event loop."""
    task = task_of(env)
    return task.loop.run_until_complete(task.run(value))


def abandon(env: object) -> None:
    """Drop the task of an env, which does not end. Later work of the env runs in a new task."""
    with suppress(RuntimeError):  # the coroutine ignores even this
        _HERE.tasks.pop(id(env)).drop()


def rename_task(old: object, new: object) -> None:
    """Give the task of an env to the env that replaces it."""
    _HERE.tasks[id(new)] = _HERE.tasks.pop(id(old))


def close_all(envs: Sequence[Any]) -> list[BaseException | None]:
    """Close coroutine envs at the same time, and end their tasks. Return the exception of each env, or None.

    The event loop of a thread ends with its last task. If the thread runs another event loop, another thread closes the
    envs.
    """
    if _runs_event_loop():
        with ThreadPoolExecutor(1) as other:
            return other.submit(close_all, envs).result()
    tasks = [task_of(env) for env in envs]
    loop = tasks[0].loop
    ends = [task.run(close(env)) for task, env in zip(tasks, envs, strict=True)]
    loop.run_until_complete(asyncio.wait(ends))
    for task, env in zip(tasks, envs, strict=True):
        task.finish()
        del _HERE.tasks[id(env)]
    if not _HERE.tasks:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        _HERE.loop = None
    return [end.exception() for end in ends]


async def close(env: Any) -> None:
    """Close an env, if it has a method `close`."""
    method = getattr(env, "close", None)
    value = None if method is None else method()
    if inspect.isawaitable(value):
        await value


class BlockingEnv:
    """A coroutine env for a loop that runs one command at a time."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self, **arguments: Any) -> Any:
        """Reset the env."""
        return run_here(self._env.reset(**arguments), self._env)

    def step(self, action: Any) -> Any:
        """Step the env."""
        return run_here(self._env.step(action), self._env)
