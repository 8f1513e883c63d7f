"""`EnvLease`: one env that one task uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stepmill import BusyEnvError, StepmillError, UsageError
from stepmill.aio.batches import check_loop

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from stepmill.aio.leases import Leases, Result
    from stepmill.aio.seats import Seat


class EnvLease:
    """An env of an AsyncPool for one task: `async with pool.lease() as env`.

    `reset`, `step` and `call` may be cancelled at any time, for example by `asyncio.timeout`. The env then finishes the command, or the
    deadline ends it, and its result is dropped. After a cancelled step or reset, the env needs a reset.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._seat: Seat | None = None
        self._is_entered = False
        self._is_waiting = False  # whether a task waits for a command of this lease
        self._why_reset = ""  # empty if it can step

    @property
    def env_id(self) -> int:
        """The number of the env in the pool."""
        return self._held().env_id

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the env, and return (observation, info).

        An env whose worker has ended is rebuilt. If a cancelled command is still running, the reset waits for it.

        Args:
            seed, options: passed to the env's `reset`.
        Raises:
            EnvError, EnvTimeout, WorkerDied: the reset failed.
        """
        seat = self._begin()
        try:
            self._why_reset = "its reset has not ended"
            await self._wait_idle(seat)
            while (waiter := self._leases.reset(seat, seed, options)) is None:
                await self._leases.pause()
                self._check_held(seat)
            outcome = await waiter
        finally:
            self._is_waiting = False
        if isinstance(outcome, StepmillError):
            raise outcome
        self._why_reset = ""
        return outcome[0], outcome[4]

    async def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env, and return observation, reward, terminated, truncated and info, as Gymnasium's envs do.

        Raises:
            EnvError, EnvTimeout, WorkerDied: the step failed, or the env was lost with its worker since the last step. With
                `on_fault="replay"` the env is rebuilt instead; with "truncate" the step returns truncated=True and
                `info["fault"]`.
            UsageError: the env needs a reset, or the action is invalid. Nothing was sent.
        """
        seat = self._begin()
        try:
            if seat.fault is None and self._why_reset:
                raise UsageError(f"env {seat.env_id} cannot step: {self._why_reset}; call reset() first")
            waiter = self._leases.step(seat, action)
            self._why_reset = "its last step failed, or was cancelled"
            outcome: Any = await waiter
        finally:
            self._is_waiting = False
        if isinstance(outcome, StepmillError):
            raise outcome
        result: Result = outcome
        self._why_reset = "its episode has ended" if result[2] or result[3] else ""
        return result

    async def call(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env, or a function with the env, as `Pool.call` does, and return the result.

        If a cancelled command is still running, the call waits for it. If the call is cancelled, the env finishes it and the result is
        dropped; the next command runs after it.

        Args:
            name: the name of a method, or of an attribute, whose value is returned; or a function, which gets the env, then `args`.
            *args, **kwargs: passed to the method; sent by cloudpickle.
        Raises:
            EnvError: the call raised.
            EnvTimeout: the call took longer than `workers.call_timeout_s`; the env continues it.
            WorkerDied: the worker died before or during the call, or the env was lost with its worker and not reset since.
        """
        seat = self._begin()
        try:
            await self._wait_idle(seat)
            return await self._leases.call(seat, name, args, kwargs, self._check_held)
        finally:
            self._is_waiting = False

    async def _wait_idle(self, seat: Seat) -> None:
        while seat.is_busy:
            await self._leases.outcome_of(seat)
            self._check_held(seat)

    def _held(self) -> Seat:
        if self._seat is None:
            raise UsageError("this lease is not held: use the env inside of `async with pool.lease() as env`")
        return self._seat

    def _check_held(self, seat: Seat) -> None:
        """Raise an error if the lease has ended while a task waited, because the env may be another task's now."""
        if self._seat is not seat:
            raise UsageError(f"this lease of env {seat.env_id} has ended while a task used it; end the task first")

    def _begin(self) -> Seat:
        """Return the env for a command of this task, which ends with `_is_waiting = False`. Hot path."""
        seat = self._seat
        if seat is None:
            seat = self._held()
        if self._is_waiting:
            text = f"env {seat.env_id} has a command of another task; lease one env per task"
            raise BusyEnvError(text, env_ids=[seat.env_id])
        if asyncio._get_running_loop() is not self._leases.loop:
            check_loop(self._leases.loop)
        self._is_waiting = True
        return seat

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise UsageError("this lease is used already; call pool.lease() once for each env")
        self._is_entered = True
        self._why_reset = "it was not reset in this lease"
        try:
            self._seat = await self._leases.acquire()
        finally:
            self._is_entered = self._seat is not None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        seat, self._seat, self._is_entered = self._held(), None, False
        self._leases.release(seat)
