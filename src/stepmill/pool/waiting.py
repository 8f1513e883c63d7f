"""Waits of a pool's thread: for results, while faults are dealt with, and until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from stepmill import _native
from stepmill.pool.fault_handler import FaultHandler
from stepmill.pool.faults import kind_of
from stepmill.pool.resets import ResetOrder
from stepmill.spec.errors import RecvTimeout
from stepmill.spec.notices import warn
from stepmill.spec.options import EnvState, PoolOptions
from stepmill.worker.signals import defer_signals

SLOW_S = 30.0  # after this long without a result a wait warns, once in a pool's life
MAX_LATE_ROUNDS = 2  # of faults that a wait deals with after its deadline, since the result may be there then
_READY, _FAULT, _TIMED_OUT = 0, 1, 2  # what a wait of the pool state returns; anything else is an event


class PoolWait:
    """Sends commands and waits for results. Faults are dealt with meanwhile, and signals are held back as long as that takes."""

    def __init__(self, state: _native.Ledger, faults: FaultHandler, options: PoolOptions) -> None:
        self._state = state
        self._faults = faults
        self._linger_s = options.linger_s
        self._has_spares = options.spare_envs > 0
        has_deadlines = options.step_timeout_s is not None and options.reset_timeout_s is not None
        self._slow_s: float | None = None if has_deadlines else SLOW_S

    def send(self, command: Callable[[], object]) -> None:
        """Carry out a command of the pool state; if it finds workers dead, deal with them first.

        Raises:
            WorkerDied: one stays dead. Nothing was sent.
        """
        while not self.try_send(command):
            pass

    def try_send(self, command: Callable[[], object]) -> bool:
        """The same, once; return whether it was sent."""
        try:
            command()
        except _native.DeadWorkers as found:
            with defer_signals():
                self._faults.handle_dead_workers(found.args[0])
            self._faults.raise_errors()
            return False
        return True

    def handle(self) -> None:
        """Deal with faults and events; raise errors of those that are not absorbed."""
        with defer_signals():
            self._faults.handle()
        self._faults.raise_errors()

    def wait(self, wait: Callable[[float | None], int], timeout_s: float | None) -> None:
        """Wait until `wait(seconds)` of the pool state is content.

        Raises:
            RecvTimeout: it is not at the deadline.
        """
        self._faults.raise_errors()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        num_late = 0
        while num_late <= MAX_LATE_ROUNDS:
            slice_s = self._slow_s if deadline is None else max(deadline - time.monotonic(), 0.0)
            outcome = wait(slice_s)
            if outcome == _READY:
                return
            if outcome != _TIMED_OUT:
                self.handle()
                num_late += slice_s == 0.0
            elif deadline is not None:
                self._raise_timeout(timeout_s)
            else:
                self._warn_slow()
        self._raise_timeout(timeout_s)

    def wait_for(self, env_ids: Sequence[int], timeout_s: float | None) -> None:
        """Wait for these envs."""
        self.wait(lambda slice_s: self._state.wait_for(env_ids, slice_s), timeout_s)

    def wait_any(self, num_envs: int, timeout_s: float | None) -> None:
        """Wait for so many of the pending envs."""
        self.wait(lambda slice_s: self._state.wait(num_envs, slice_s), timeout_s)

    def linger(self, num_envs: int) -> None:
        """Wait up to `linger_s` for so many of the pending envs."""
        if not self._linger_s:
            return
        deadline = time.monotonic() + self._linger_s
        while True:
            num_wanted = min(num_envs, self._state.num_pending())
            outcome = self._state.wait(num_wanted, max(0.0, deadline - time.monotonic()))
            if outcome in (_READY, _TIMED_OUT):
                return
            self.handle()

    def poll(self) -> None:
        """Deal with faults and events that are here; wait for nothing."""
        while self._state.num_pending():
            if self._state.wait(self._state.num_pending(), 0.0) in (_READY, _TIMED_OUT):
                return
            self.handle()

    def drain(self, env_ids: Sequence[int]) -> None:
        """Wait for what these envs are doing, and drop it, faults too: they are about to be reset."""
        while True:
            outcome = self._state.wait_for(env_ids, None)
            dropped = [fault for fault in self._state.take_faults() if fault[0] in env_ids] if outcome == _FAULT else []
            for env_id, number, *_ in dropped:
                kind = kind_of(number)
                what = "with a fault that cannot be read" if kind is None else kind.name.lower()
                warn(f"env {env_id} failed ({what}) before this reset, which drops its result")
            self._state.discard(env_ids)
            if outcome == _READY:
                return
            if outcome != _FAULT:
                with defer_signals():
                    self._faults.handle_events()
                self._faults.raise_errors()

    def prepare_reset(self, order: ResetOrder) -> None:
        """Wait for what the envs of a reset are doing, and bring back those that are lost."""
        self.drain(order.env_ids)
        self._faults.prepare_reset(order.env_ids)
        self._faults.raise_errors()
        if not self._has_spares:
            return
        while order.is_whole and self._faults.restart_all():  # before any env is given another object
            self.drain(order.env_ids)
        order.recall(self._state)
        self.drain(order.demanding)
        self._faults.prepare_reset(order.demanding, wait=not order.is_whole)
        self._faults.raise_errors()

    def _warn_slow(self) -> None:
        self._slow_s = None
        warn(
            f"envs {self._busy()} have not answered for {SLOW_S:g} s; the pool waits on, since no step_timeout_s or "
            "reset_timeout_s is set that would end them"
        )

    def _busy(self) -> list[int]:
        return [env_id for env_id, state in enumerate(self._state.states()) if state == EnvState.BUSY]

    def _raise_timeout(self, timeout_s: float | None) -> NoReturn:
        busy = self._busy()
        raise RecvTimeout(
            f"envs {busy} were not ready within {timeout_s} s; nothing is lost, wait again",
            env_ids=busy,
            timeout_s=timeout_s or 0.0,
        )
