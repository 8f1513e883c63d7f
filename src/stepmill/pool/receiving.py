"""Sends commands, waits for results and receives them, in the pool's thread.

`PoolWait` sends commands, has the only loop in which a pool's thread waits, and lets `Recovery` handle faults and events
meanwhile. `Receiver` decides which envs `recv` and `receive` return, and keeps results that an interrupted call could not
return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.arguments import check_timeouts, checked_ids, select_rows
from stepmill.pool.events import EnvFailed
from stepmill.pool.faults import describe_fault
from stepmill.pool.recovery import News, Recovery
from stepmill.spec.batch import Batch
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import RecvTimeout, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.options import EnvState, PoolOptions
from stepmill.spec.received import Received
from stepmill.worker.signals import defer_signals

T = TypeVar("T")
EnvIds = Sequence[int] | NDArray[np.integer[Any]]
SLOW_S = 30.0  # after this time without a result, a wait warns once per pool
# How many further rounds of events a wait handles after its deadline, because these may bring the awaited result.
MAX_LATE_ROUNDS = 2
READY, FAULT, TIMED_OUT, EVENT = range(4)  # what a wait of the core returns

Wait = Callable[[float | None], int]
"""Waits at most this many seconds, or without a limit; returns READY if what is awaited is there."""


class PoolWait:
    """Sends commands, and waits for results and for the end of restarts and replays. Only the pool's thread uses it.

    Faults and events are handled meanwhile, with signals deferred.
    """

    def __init__(self, state: _native.PoolState, recovery: Recovery, options: PoolOptions, spec: EnvSpec) -> None:
        self._state = state
        self._num_envs = len(state.states())
        self._action, self._env_rows = spec.action, spec.batch_size
        self._recovery = recovery
        self._news = recovery.news
        has_deadlines = options.step_timeout_s is not None and options.reset_timeout_s is not None
        self._slow_s: float | None = None if has_deadlines else SLOW_S

    def send(self, actions: Any, env_ids: EnvIds | None, *, skips_exhausted: bool = False) -> EnvIds:
        """Send actions to these envs, except to those that are lost. Return the ids of the envs to which they were sent.

        An env is lost if this call finds its worker dead, or if it has a fault that was not received yet.
        """
        while True:
            named = range(self._num_envs) if env_ids is None else env_ids
            try:
                self._state.send(actions, env_ids, skips_exhausted)
                return named
            except _native.DeadWorkers as found:
                self._recovery.handle_dead_workers(found.args[0])
            except UsageError:
                lost = self._news.lost_envs()
                if not lost or lost.isdisjoint(checked_ids(named, self._num_envs)):
                    raise
            lost, ids = self._news.lost_envs(), checked_ids(named, self._num_envs)
            kept = [place for place, env_id in enumerate(ids) if env_id not in lost]
            if len(kept) == len(ids):
                continue
            rows = [place * self._env_rows + row for place in kept for row in range(self._env_rows)]
            actions = select_rows(self._action, actions, rows, len(ids) * self._env_rows)
            env_ids = [ids[place] for place in kept]
            if not env_ids:
                return env_ids

    def try_send(self, command: Callable[[], object]) -> bool:
        """Call a command of the pool state. Return False if it finds dead workers, whose deaths are then handled."""
        try:
            command()
        except _native.DeadWorkers as found:
            self._recovery.handle_dead_workers(found.args[0])
            return False
        return True

    def wait(self, timeout_s: float | None, num_envs: int | None = None, env_ids: Sequence[int] | None = None) -> None:
        """Wait for `num_envs` of the pending envs, or for the envs `env_ids`, or raise RecvTimeout."""
        if self._news.faults or self._news.notices:
            self._news.raise_errors()

        def wait(slice_s: float | None) -> int:
            return self._state.wait(slice_s, num_envs=num_envs, env_ids=env_ids)

        if not self._run(wait, timeout_s, self._news.raise_errors):
            busy = self._busy_envs()
            raise RecvTimeout(
                f"envs {busy} were not ready within {timeout_s} s; nothing is lost: call recv() again",
                env_ids=busy,
                timeout_s=timeout_s or 0.0,
            )

    def linger(self, num_envs: int, linger_s: float) -> None:
        """Wait up to `linger_s` for this many of the pending envs. 0 handles faults and events that have arrived."""
        self._run(lambda slice_s: self._wait_at_most(num_envs, slice_s), linger_s, self._news.raise_errors)

    def wait_for_news(self, least: int | None, most: int, timeout_s: float | None, linger_s: float = 0.0) -> bool:
        """Wait until `least` envs have a result or a fault, or until the deadline, then up to `linger_s` for `most` envs.

        Return whether `least` envs were there; None means all that are stepping. This raises no faults. If `least` is 0, it
        handles what has arrived.
        """
        warn_user = self._news.warn
        warn_user()

        def wait(slice_s: float | None) -> int:
            num_left = least - len(self._news.by_env()) if least else self._state.num_pending()
            if least == 0 and not num_left:  # a restart may have ended since
                return self._state.wait(slice_s)
            return self._wait_at_most(num_left, slice_s)

        is_there = self._run(wait, 0.0 if least == 0 else timeout_s, warn_user)
        if is_there and least and least < most and linger_s and not self._news.by_env():
            self._run(lambda slice_s: self._wait_at_most(most, slice_s), linger_s, warn_user)
        return is_there

    def _wait_at_most(self, num_envs: int, slice_s: float | None) -> int:
        num_wanted = min(num_envs, self._state.num_pending())
        return self._state.wait(slice_s, num_envs=num_wanted) if num_wanted > 0 else READY

    def drain(self, env_ids: Sequence[int]) -> None:
        """Wait for these envs, which are about to be reset, and drop their results and faults."""

        def wait_and_drop(slice_s: float | None) -> int:
            outcome = self._state.wait(slice_s, env_ids=env_ids)
            for fault in self._state.drain(acknowledge=False) if outcome == FAULT else ():
                if isinstance(fault, EnvFailed) and fault.env_id in env_ids and not self._recovery.is_known_loss(fault):
                    warn(f"{describe_fault(fault)}; this reset drops its result")
            self._state.discard_results(env_ids)
            return outcome

        self._run(wait_and_drop, None, self._news.warn, has_faults=False)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _run(
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
        while True:
            slice_s = self._slow_s if deadline is None else max(deadline - time.monotonic(), 0.0)
            outcome = wait(slice_s)
            if outcome == READY:
                return True
            if num_late_rounds > MAX_LATE_ROUNDS or (outcome == TIMED_OUT and deadline is not None):
                return False  # a later call handles the events, if there are any
            if outcome == TIMED_OUT:
                self._warn_slow()
                continue
            with defer_signals():
                self._recovery.handle(has_faults=has_faults)
            on_event()
            num_late_rounds += slice_s == 0.0

    def run_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for the end of a restart or replay. Return whether it came before the deadline."""

        def wait(slice_s: float | None) -> int:
            if is_over():
                return READY
            return TIMED_OUT if self._state.wait(slice_s) == TIMED_OUT else EVENT

        return self._run(wait, timeout_s, lambda: None, has_faults=False)

    def _busy_envs(self) -> list[int]:
        """Return the envs that are stepping or resetting."""
        return [env_id for env_id, state in enumerate(self._state.states()) if state == EnvState.BUSY]

    def _warn_slow(self) -> None:
        busy = self._busy_envs()
        if busy:  # if no env is busy, a restart is slow, about which no warning is needed
            self._slow_s = None
            warn(
                f"envs {busy} have not answered for {SLOW_S:g} s, and the pool still waits for them; set step_timeout_s and "
                "reset_timeout_s to end envs that hang"
            )


class Receiver:
    """Receives batches from the pool state. Only the pool's thread uses it."""

    def __init__(
        self, state: _native.PoolState, waits: PoolWait, news: News, num_envs: int, batch_size: int | None
    ) -> None:
        self._state = state
        self._waits = waits
        self._news = news
        self._num_envs = num_envs
        self._batch_size = batch_size
        self._unclaimed = state.unclaimed

    def recv(
        self,
        batch_size: int | None,
        min_envs: int | None,
        max_envs: int | None,
        env_ids: EnvIds | None,
        timeout_s: float | None,
        linger_s: float,
        out: Any,
    ) -> Batch:
        """Implement `Pool.recv`."""
        check_timeouts(timeout_s=timeout_s, linger_s=linger_s)
        self._news.raise_errors()
        if env_ids is not None:
            if (batch_size, min_envs, max_envs) != (None, None, None):
                raise UsageError("recv() takes env_ids or a number of envs, not both")
            return self.recv_envs(self._pending(env_ids), timeout_s, out)
        least, most = self._bounds(batch_size, min_envs, max_envs)

        def wait() -> None:
            if not least:
                self._waits.linger(self._num_envs, 0.0)
                return
            self._waits.wait(timeout_s, least)
            if linger_s:
                self._waits.linger(most, linger_s)

        return self.wait_and_collect(wait, partial(self._collect, most, out, None))

    def recv_envs(self, env_ids: Sequence[int], timeout_s: float | None = None, out: Any = None) -> Batch:
        """Receive these envs, which are pending."""
        wait = partial(self._waits.wait, timeout_s, env_ids=env_ids)
        return self.wait_and_collect(wait, partial(self._collect, len(env_ids), out, env_ids))

    def receive(self, min_envs: int | None, max_envs: int | None, timeout_s: float | None, linger_s: float) -> Received:
        """Implement `Pool.receive`."""
        check_timeouts(timeout_s=timeout_s, linger_s=linger_s)
        most = self._most(min_envs, max_envs)
        wait = partial(self._waits.wait_for_news, min_envs, most, timeout_s, linger_s)
        kept = self._news.faults, self._news.raised  # for the case that the result does not reach the caller
        try:
            return self.wait_and_collect(wait, partial(self._collect_with_faults, most))
        except BaseException:
            self._news.set_faults(*kept)
            raise

    def has_news(self, min_envs: int | None, max_envs: int | None) -> bool:
        """Return whether `receive` would return now."""
        most = self._most(min_envs, max_envs)
        return self._waits.wait_for_news(min_envs, most, 0.0) or min_envs == 0

    def _most(self, min_envs: int | None, max_envs: int | None) -> int:
        """Return how many results `receive` returns at most. Refuse numbers of envs for which it cannot wait."""
        most = self._num_envs if max_envs is None else max_envs
        num_there = self._state.num_pending() + len(self._news.by_env())
        least = min(most, num_there) or 1 if min_envs is None else min_envs
        if not 0 <= least <= min(most, num_there):
            raise UsageError(
                f"receive() cannot wait for {least} to {most} envs: {num_there} are stepping or have a fault; send() to more envs first"
            )
        return most

    def wait_and_collect(self, wait: Callable[[], object], collect: Callable[[], T | None]) -> T:
        """Call `wait` and `collect` until `collect` returns a result, and return it.

        `collect` returns None if a result is unreadable, and `wait` must then wait again. Python may raise
        KeyboardInterrupt almost anywhere, also when a native call returns, and the result of the call is then lost.
        Therefore native code marks in `_unclaimed` that it has received results, and results that do not reach the
        caller can be received again.
        """
        wait()
        result = None
        try:
            while (result := collect()) is None:
                wait()
            self._unclaimed[0] = False
            return result
        except BaseException:
            self.restore_unclaimed(result)
            raise

    def _collect(self, most: int, out: Any, env_ids: Sequence[int] | None) -> Batch | None:
        fields = self._state.collect(most, out, env_ids)
        return None if fields is None else Batch(*fields)

    def _collect_with_faults(self, most: int) -> Received | None:
        batch = self._collect(most, None, None)
        if batch is None:
            return None
        received = Received(batch if batch.num_rows else None, self._news.by_env())
        self._news.set_faults([], {})
        return received

    def _bounds(self, batch_size: int | None, min_envs: int | None, max_envs: int | None) -> tuple[int, int]:
        if batch_size is not None and (min_envs is not None or max_envs is not None):
            raise UsageError("recv() takes batch_size, or min_envs and max_envs, not both")
        pending = self._state.num_pending()
        if pending == 0 and min_envs != 0:
            over = "; all envs are exhausted" if {*self._state.states()} == {EnvState.EXHAUSTED} else ""
            raise UsageError(
                f"recv() with nothing pending would wait forever; call send() or reset_async() first{over}"
            )
        if min_envs is not None or max_envs is not None:
            least = 1 if min_envs is None else min_envs
            most = max(least, self._num_envs) if max_envs is None else max_envs
        elif batch_size is not None:
            least = most = batch_size
        else:
            least = most = self._batch_size or pending
        if not 1 <= least <= most and not (min_envs == 0 <= most):
            asked = f"{least}" if least == most else f"{least} to {most}"
            raise UsageError(f"recv() cannot return {asked} envs; ask for 1 to {self._num_envs}")
        return least, most

    def _pending(self, env_ids: EnvIds) -> list[int]:
        """Return these ids, sorted. Each env must be stepping or have a result to be received."""
        ids = sorted({*checked_ids(env_ids, self._num_envs)})
        states = self._state.states()
        faulted = [event.env_id for event in self._state.drain(acknowledge=False) if isinstance(event, EnvFailed)]
        idle = [
            env_id for env_id in ids if states[env_id] not in (EnvState.BUSY, EnvState.READY) and env_id not in faulted
        ]
        if idle or not ids:
            raise UsageError(
                f"recv() cannot wait for envs {idle}, because they have no command; call send() or reset_async() first"
            )
        return ids

    def restore_unclaimed(self, result: object) -> None:
        """Make the results of an interrupted call receivable again, if it had received any."""
        if result is not None or self._unclaimed[0]:
            self._unclaimed[0] = False
            self._state.restore_unclaimed()
