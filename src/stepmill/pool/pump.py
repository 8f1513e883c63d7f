"""The only loop in which a pool's thread waits.

It waits for results and for the end of restarts and replays, also before a reset and before a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stepmill.pool.recovery import Recovery
from stepmill.spec.notices import warn
from stepmill.spec.options import EnvState, PoolOptions
from stepmill.worker.signals import defer_signals

SLOW_S = 30.0  # after this time without a result, a wait warns once per pool
# How many rounds of events a wait handles after its deadline, because these may bring the awaited result.
MAX_LATE_ROUNDS = 2
READY, FAULT, TIMED_OUT, EVENT = range(4)  # what a wait of the core returns

Wait = Callable[[float | None], int]
"""Waits at most this many seconds, or without a limit; returns READY if what is awaited is there."""


class Pump:
    """Waits, and lets faults and events be handled meanwhile. Only the pool's thread uses it."""

    def __init__(self, recovery: Recovery, options: PoolOptions) -> None:
        self._recovery = recovery
        has_deadlines = options.step_timeout_s is not None and options.reset_timeout_s is not None
        self._slow_s: float | None = None if has_deadlines else SLOW_S

    def run(
        self, wait: Wait, timeout_s: float | None, on_event: Callable[[], object], *, has_faults: bool = True
    ) -> bool:
        """Wait until `wait` returns READY. Return whether it did so before the deadline.

        Args:
            wait: a wait of the core, which is called again after each event.
            timeout_s: seconds from now; None waits without a limit.
            on_event: called after events were handled. Its exceptions end the wait.
            has_faults: whether faults of pending commands are handled, too.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        num_late_rounds = 0
        while num_late_rounds <= MAX_LATE_ROUNDS:
            slice_s = self._slow_s if deadline is None else max(deadline - time.monotonic(), 0.0)
            outcome = wait(slice_s)
            if outcome == READY:
                return True
            if outcome != TIMED_OUT:
                with defer_signals():
                    self._recovery.handle(has_faults=has_faults)
                on_event()
                num_late_rounds += slice_s == 0.0
            elif deadline is not None:
                return False
            else:
                self._warn_slow()
        return False

    def run_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for the end of a restart or replay. Return whether it came before the deadline."""

        def wait(slice_s: float | None) -> int:
            if is_over():
                return READY
            return TIMED_OUT if self._recovery.workers.state.wait(slice_s) == TIMED_OUT else EVENT

        return self.run(wait, timeout_s, lambda: None, has_faults=False)

    def busy_envs(self) -> list[int]:
        """Return the envs that are stepping or resetting."""
        return [env_id for env_id, state in enumerate(self._recovery.workers.state.states()) if state == EnvState.BUSY]

    def _warn_slow(self) -> None:
        busy = self.busy_envs()
        if busy:  # if no env is busy, a restart is slow, about which no warning is needed
            self._slow_s = None
            warn(
                f"envs {busy} have not answered for {SLOW_S:g} s, and the pool still waits for them; set step_timeout_s and "
                "reset_timeout_s to end envs that hang"
            )
