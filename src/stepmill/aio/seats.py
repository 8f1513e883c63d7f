"""The envs that tasks lease: `Seat` is the state of one env, and `IdleSeats` chooses the env that the next task gets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from stepmill import EnvFault


@dataclass(eq=False)
class Thread:
    """A thread that runs envs.

    Attributes:
        index: its place; of threads that are equally busy, the first is chosen.
        num_busy: how many of its envs are not idle.
        idle: its idle envs, first those that are not built, and then those that are. The last one is taken first.
        entries: the entries that `IdleSeats` has of this thread.
    """

    index: int
    num_busy: int
    idle: tuple[dict[Seat, None], dict[Seat, None]] = field(default_factory=lambda: ({}, {}))
    entries: set[tuple[bool, int]] = field(default_factory=set)


@dataclass(eq=False)
class Seat:
    """The state of one env.

    Attributes:
        env_id: the env.
        thread: the thread that runs it.
        is_busy: whether it has a command whose result has not arrived.
        is_returned: whether its lease has ended, so that the env is free once its command has ended.
        waiter: the future that gets the outcome of the command. If its task was cancelled, the outcome is dropped.
        fault: why the env needs a reset before the next step; None if it has no fault.
        is_built, is_first: whether an env on demand is built, and whether its thread builds it at each start.
        timer: closes the env when it has been idle for too long.
    """

    env_id: int
    thread: Thread
    is_busy: bool = False
    is_returned: bool = False
    waiter: asyncio.Future[Any] | None = None
    fault: EnvFault | None = None
    is_built: bool = True
    is_first: bool = False
    timer: asyncio.TimerHandle | None = None


class IdleSeats:
    """The idle envs. Envs that are built are taken first, and of these the envs of the threads that are least busy.

    Taking and returning an env take logarithmic time. The heap has entries that are no longer true; they are dropped when they are first.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, Thread]] = []  # not built, num_busy, index and thread

    def put(self, seat: Seat) -> None:
        """Add an env."""
        seat.thread.num_busy -= 1
        seat.thread.idle[seat.is_built][seat] = None
        self._add_entries(seat.thread)

    def remove(self, seat: Seat) -> Seat:
        """Remove an env, and return it."""
        del seat.thread.idle[seat.is_built][seat]
        seat.thread.num_busy += 1
        self._add_entries(seat.thread)
        return seat

    def take(self) -> Seat | None:
        """Remove an env, and return it; or None if no env is idle."""
        while self._heap:
            is_unbuilt, num_busy, _, thread = self._heap[0]
            idle = thread.idle[not is_unbuilt]
            if idle and num_busy == thread.num_busy:
                return self.remove(next(reversed(idle)))
            heappop(self._heap)
            thread.entries.remove((is_unbuilt, num_busy))
        return None

    def mark_unbuilt(self, seat: Seat) -> None:
        """Record that an env, which may be idle, is not built any more."""
        is_idle = seat in seat.thread.idle[seat.is_built]
        if is_idle:
            self.remove(seat)
        seat.is_built = False
        if is_idle:
            self.put(seat)

    def _add_entries(self, thread: Thread) -> None:
        for is_unbuilt in (False, True):
            entry = (is_unbuilt, thread.num_busy)
            if thread.idle[not is_unbuilt] and entry not in thread.entries:
                thread.entries.add(entry)
                heappush(self._heap, (*entry, thread.index, thread))
