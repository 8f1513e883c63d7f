"""`EnvLease`: one env, in the hands of one task."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepmill import BusyEnvError, StepmillError, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from stepmill.aio.async_pool import AsyncPool

Result = tuple[Any, Any, Any, Any, dict[str, Any]]


@dataclass(eq=False)
class Seat:
    """What an AsyncPool knows of one env.

    Attributes:
        env_id: the env.
        is_busy: it has a command whose result has not arrived.
        waiter: of the task that awaits the result; None: the task was cancelled, and the result is dropped.
        fault: why the env needs a reset before the next step; None if it has no fault.
        is_returned: its lease has ended, and the env is free once its command has ended.
    """

    env_id: int
    is_busy: bool = False
    waiter: asyncio.Future[Result] | None = None
    fault: StepmillError | None = None
    is_returned: bool = False

    def take_result(self, result: Result) -> None:
        """The result of its command has arrived."""
        self.is_busy = False
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(result)

    def take_fault(self, error: StepmillError) -> None:
        """The env has a fault, and no command any more. Tasks do not share an exception, which has one traceback."""
        self.is_busy = False
        self.fault = copy.copy(error)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(self.fault)


class EnvLease:
    """An env of an AsyncPool for one task: `async with pool.lease() as env`.

    `reset` and `step` may be cancelled at any time, by `asyncio.timeout` for example. The command is then finished without the
    task, or ended by its deadline, and nobody gets its result; the env needs a reset.
    """

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._seat: Seat | None = None
        self._why_reset = "it was not reset in this lease"  # empty: it can step

    @property
    def env_id(self) -> int:
        """The number of the env in the pool."""
        return self._held().env_id

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the env, and return observation and info.

        An env whose worker has ended is built again. A cancelled command is waited for.

        Args:
            seed, options: for the env's `reset`.
        Raises:
            EnvError, EnvTimeout, WorkerDied: the reset failed.
        """
        seat = self._free_seat()
        self._why_reset = "its reset has not ended"
        while seat.is_busy:
            with suppress(StepmillError):
                await self._pool.result_of(seat)
        obs, _, _, _, info = await self._pool.reset_env(seat, seed, options)
        self._why_reset = ""
        return obs, info

    async def step(self, action: Any) -> Result:
        """Step the env, and return observation, reward, terminated, truncated and info, as Gymnasium's envs do.

        Raises:
            EnvError, EnvTimeout, WorkerDied: the step failed, or the env was lost with its worker since the last one. With
                `on_fault="replay"` the env is rebuilt in its place; with "truncate" the step returns truncated=True and
                `info["fault"]`.
            UsageError: the env needs a reset, or the action is invalid. Nothing was sent.
        """
        seat = self._free_seat()
        if seat.fault is not None:
            raise seat.fault
        if self._why_reset:
            raise UsageError(f"env {seat.env_id} cannot step: {self._why_reset}; call reset() first")
        try:
            awaited = self._pool.step_env(seat, action)
        except UsageError:
            raise
        except StepmillError:
            self._why_reset = "its last step failed"
            raise
        self._why_reset = "its last step failed, or was cancelled"
        result = await awaited
        self._why_reset = "its episode has ended" if result[2] or result[3] else ""
        return result

    def _held(self) -> Seat:
        if self._seat is None:
            raise UsageError("this lease is not held: use the env inside of `async with pool.lease() as env`")
        return self._seat

    def _free_seat(self) -> Seat:
        seat = self._held()
        if seat.waiter is not None:
            raise BusyEnvError(
                f"env {seat.env_id} is stepping or resetting for another task; lease one env per task",
                env_ids=[seat.env_id],
            )
        return seat

    async def __aenter__(self) -> Self:
        self._seat = await self._pool.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        seat, self._seat = self._held(), None
        self._pool.release(seat)
