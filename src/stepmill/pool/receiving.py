"""Receiving: which envs a `recv` returns, and batches that Ctrl-C kept from the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.arguments import check_ids, check_timeout
from stepmill.pool.waiting import PoolWait
from stepmill.spec.batch import Batch
from stepmill.spec.errors import UsageError
from stepmill.spec.options import EnvState

EnvIds = Sequence[int] | NDArray[np.integer[Any]]


class Receiver:
    """Receives batches from the pool state. Used by the pool's thread."""

    def __init__(self, state: _native.Ledger, waits: PoolWait, num_envs: int, batch_size: int | None) -> None:
        self._state = state
        self._waits = waits
        self._num_envs = num_envs
        self._batch_size = batch_size
        self._unclaimed = state.unclaimed
        self._is_eager = False

    def recv(
        self,
        batch_size: int | None,
        min_envs: int | None,
        max_envs: int | None,
        env_ids: EnvIds | None,
        timeout_s: float | None,
        out: Any,
    ) -> Batch:
        """Do what `Pool.recv` says."""
        check_timeout(timeout_s)
        if env_ids is not None:
            if (batch_size, min_envs, max_envs) != (None, None, None):
                raise UsageError("recv() takes env_ids, or how many envs, not both")
            ids = self._pending(env_ids)
            self._set_eager(len(ids) < self._num_envs)
            self._waits.wait_for(ids, timeout_s)
            return self.collect(len(ids), len(ids), out, ids, timeout_s)
        least, most = self._bounds(batch_size, min_envs, max_envs)
        self._set_eager(least < self._num_envs)
        self._waits.wait_any(least, timeout_s)
        if most > least:
            self._waits.linger(most)
        return self.collect(least, most, out, None, timeout_s)

    def _bounds(self, batch_size: int | None, min_envs: int | None, max_envs: int | None) -> tuple[int, int]:
        if batch_size is not None and (min_envs is not None or max_envs is not None):
            raise UsageError("recv() takes batch_size, or min_envs and max_envs, not both")
        pending = self._state.num_pending()
        if pending == 0:
            over = "; all envs are exhausted" if self._are_exhausted() else ""
            raise UsageError(f"recv() with nothing pending would wait for ever; send() or reset_async() first{over}")
        if min_envs is not None or max_envs is not None:
            least = 1 if min_envs is None else min_envs
            most = max(least, self._num_envs) if max_envs is None else max_envs
        elif batch_size is not None:
            least = most = batch_size
        else:
            least = most = self._batch_size or pending
        if not 1 <= least <= most:
            raise UsageError(f"recv() of {least} to {most} envs makes no sense; ask for 1 to {self._num_envs}")
        return least, most

    def _pending(self, env_ids: EnvIds) -> list[int]:
        """Return these ids, if each is one of an env that is stepping or whose result waits to be received."""
        ids = sorted({int(env_id) for env_id in env_ids})
        check_ids(ids, self._num_envs)
        states = self._state.states()
        faulted = [fault[0] for fault in self._state.take_faults()]
        idle = [
            env_id for env_id in ids if states[env_id] not in (EnvState.BUSY, EnvState.READY) and env_id not in faulted
        ]
        if idle or not ids:
            raise UsageError(f"envs {idle} were sent nothing that recv() could wait for; send() or reset_async() first")
        return ids

    def _are_exhausted(self) -> bool:
        return all(state == EnvState.EXHAUSTED for state in self._state.states())

    def _set_eager(self, is_eager: bool) -> None:
        if is_eager is not self._is_eager:
            self._is_eager = is_eager
            self._state.set_eager(is_eager)

    def collect(
        self,
        least: int,
        most: int,
        out: Any = None,
        env_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Receive what is ready, at most so many envs, and of these if they are named; `least` are ready.

        Python raises KeyboardInterrupt at almost any point, also on the return of a native call, whose result is lost then.
        So native code marks in `_unclaimed` that it has received results, and what does not reach the caller is taken back.
        """
        fields = None
        try:
            while (fields := self._state.collect(most, out, env_ids)) is None:  # a result cannot be read: a fault
                if env_ids is not None:
                    self._waits.wait_for(env_ids, timeout_s)
                else:
                    self._waits.wait_any(least, timeout_s)
            self._unclaimed[0] = False
            return Batch(*fields)
        except BaseException:
            self.take_back(fields)
            raise

    def take_back(self, result: object) -> None:
        """Let the results of an interrupted call be received again, if it had received any."""
        if result is not None or self._unclaimed[0]:
            self._unclaimed[0] = False
            self._state.take_back()
