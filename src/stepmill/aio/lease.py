"""`EnvLease`: one env, in the hands of one task."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stepmill import BusyEnvError, StepmillError, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from stepmill.aio.leases import Leases, Seat


class EnvLease:
    """An env of an AsyncPool for one task: `async with pool.lease() as env`.

    `reset` and `step` may be cancelled at any time, by `asyncio.timeout` for example. The command is then finished without the
    task, or ended by its deadline, and nobody gets its result; the env needs a reset.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
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
                await self._leases.result_of(seat)
        obs, _, _, _, info = await self._leases.reset(seat, seed, options)
        self._why_reset = ""
        return obs, info

    async def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env, and return observation, reward, terminated, truncated and info, as Gymnasium's envs do.

        Raises:
            EnvError, EnvTimeout, WorkerDied: the step failed, or the env was lost with its worker since the last one. With
                `on_fault="replay"` the env is rebuilt in its place; with "truncate" the step returns truncated=True and
                `info["fault"]`.
            UsageError: the env needs a reset, or the action is invalid. Nothing was sent.
        """
        seat = self._free_seat()
        if seat.fault is None and self._why_reset:
            raise UsageError(f"env {seat.env_id} cannot step: {self._why_reset}; call reset() first")
        awaited = self._leases.step(seat, action)
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
        self._seat = await self._leases.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        seat, self._seat = self._held(), None
        self._leases.release(seat)
