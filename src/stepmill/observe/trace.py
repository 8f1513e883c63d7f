"""`stepmill.trace`: records what the threads of a pool do, as a trace that Perfetto (ui.perfetto.dev) loads.

    rings in the slab ──► Recorder (a thread that empties them every 20 ms) ──► Events ──► write_trace (JSON)

A trace has a track for the learner and one per worker, and arrows from a command's `send` to the env's step, and from there to
the `recv` that returned its result.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort
from stepmill.slab.counters import TraceReader
from stepmill.slab.memory import SharedSlab
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import ClosedPoolError, EngineBug, UsageError
from stepmill.spec.stats import FAULT_KINDS, PoolStats

TAKE_S = 0.02
MAX_EVENTS = 500_000  # 12 MB while they are recorded
LEARNER = 0  # the number of its track; worker w has 1 + w


class TraceKind(IntEnum):
    """The kind of an event; the numbers are those of `_native/shared/statistics.hpp`."""

    STEP = 1
    RESET = 2
    WAIT = 3
    SEND = 4
    GATHER = 5
    SENT = 6
    RECEIVED = 7


@dataclass
class Events:
    """The recorded events.

    Attributes:
        began_ns, ended_ns: the beginning and the end of the recording, on the clock of time.monotonic_ns().
        threads: by track, structured arrays with begin_ns, end_ns, server and kind, in the order of their ends.
        moments: (time in ns, track, text) of faults, deaths and restarts; exact within 20 ms.
        num_lost: the number of events that were overwritten before they could be read.
        is_full: whether the recording ended early, at its limit of events.
    """

    began_ns: int
    ended_ns: int
    threads: list[NDArray[Any]]
    moments: list[tuple[int, int, str]] = field(default_factory=list)
    num_lost: int = 0
    is_full: bool = False

    @property
    def num_events(self) -> int:
        """The number of events."""
        return sum(len(events) for events in self.threads)


class Recorder(CloseAtEnd):
    """Records a pool of this program from its construction to `close`. Use it as a context manager.

    The pool's threads write events to shared memory, and a thread of this program collects them every 20 ms. The recording
    ends early when it has `max_events` events of 24 bytes; the events of the last collection are kept even if they exceed this.
    """

    def __init__(self, slab: SharedSlab, path: str | Path | None, seconds: float | None, max_events: int) -> None:
        self._slab = slab
        self._path = path
        self._seconds = seconds
        self._max_events = max_events
        self._reader = TraceReader(slab.description)
        self._parts: list[list[NDArray[Any]]] = [[] for _ in range(1 + slab.num_lanes)]
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._num_events = 0
        with slab.view() as memory:
            self._reader.read_new(memory)
        self._last = slab.read_stats(leased_slots=0, replay_log_bytes=0)
        now_ns = time.monotonic_ns()
        self.events = Events(now_ns, now_ns, [])
        slab.native.set_tracing(True)
        self._thread = threading.Thread(target=self._run, name="stepmill-trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        until_s = None if self._seconds is None else time.monotonic() + self._seconds
        try:
            while not self._stop.is_set():
                left_s = TAKE_S if until_s is None else min(TAKE_S, until_s - time.monotonic())
                if left_s <= 0 or self.events.is_full:
                    break
                self._stop.wait(left_s)
                self._read_rings()
            self._slab.native.set_tracing(False)
            self._read_rings()
        except ClosedPoolError:
            pass
        except Exception as error:  # `close` raises it, after the events before it are written
            self._error = error
        finally:
            with suppress(ClosedPoolError):
                self._slab.native.set_tracing(False)
            self._finish()

    def _read_rings(self) -> None:
        with self._slab.view() as memory:
            taken = self._reader.read_new(memory)
        now_ns = time.monotonic_ns()
        for parts, events in zip(self._parts, taken, strict=True):
            if len(events):
                parts.append(events)
                self._num_events += len(events)
        self.events.is_full = self._num_events >= self._max_events
        stats = self._slab.read_stats(leased_slots=0, replay_log_bytes=0)
        self.events.moments += [(now_ns, track, text) for track, text in _moments(stats, self._last)]
        self._last = stats

    def _finish(self) -> None:
        self.events.ended_ns = time.monotonic_ns()
        empty = np.empty(0, [("begin_ns", "u8"), ("end_ns", "u8"), ("server", "u4"), ("kind", "u4")])
        self.events.threads = [np.concatenate(parts) if parts else empty for parts in self._parts]
        self.events.num_lost = self._reader.num_lost

    @property
    def is_done(self) -> bool:
        """Whether the recording has ended."""
        return not self._thread.is_alive()

    def close(self) -> Events:
        """End the recording, write it to the path, and return the events. Idempotent.

        Raises:
            UsageError: the file cannot be written.
            EngineBug: the thread that collects events raised an exception. The events before it are written.
        """
        self._stop.set()
        self._thread.join()
        path, self._path = self._path, None
        if path is not None:
            write_trace(self.events, path)
        error, self._error = self._error, None
        if error is not None:
            text = f"the trace ended after {self.events.num_events} events: {error!r}; please report this bug"
            raise EngineBug(text) from error
        return self.events

    def wait(self) -> Events:
        """Wait until the recording has ended by itself, then do the same as `close`."""
        self._thread.join()
        return self.close()


_recorders: WeakValueDictionary[int, Recorder] = WeakValueDictionary()  # the newest, by the id of its slab


def trace(
    pool: Pool, path: str | Path | None = None, *, seconds: float | None = None, max_events: int = MAX_EVENTS
) -> Recorder:
    """Record what all threads of a pool do until the returned context manager is closed, and write it to `path`.

    Args:
        pool: the pool.
        path: the path of the JSON file for Perfetto; None writes none.
        seconds: the recording ends by itself after this many seconds; None means no limit.
        max_events: the recording also ends when it has this many events.
    Raises:
        UsageError: a number is out of range, or another trace of the pool has not ended.
    """
    if seconds is not None and not seconds > 0:
        raise UsageError(f"seconds={seconds} must be above 0")
    if max_events < 1:
        raise UsageError(f"max_events={max_events} must be 1 or more")
    slab = PoolPort(pool).slab
    other = _recorders.get(id(slab))
    if other is not None and not other.is_done:  # its end would also end this one
        raise UsageError("another trace of this pool is being recorded; close it first")
    recorder = _recorders[id(slab)] = Recorder(slab, path, seconds, max_events)
    return recorder


def _moments(now: PoolStats, last: PoolStats) -> Iterator[tuple[int, str]]:
    """Yield (track, text) of each fault, death and restart between two readings."""
    for new, old in zip(now.workers, last.workers, strict=True):
        if new.deaths > old.deaths:
            yield 1 + new.worker, f"worker {new.worker} died"
        if new.restarts > old.restarts:
            yield 1 + new.worker, f"worker {new.worker} was restarted"
    for env_id, kind in np.argwhere(now.faults > last.faults).tolist():
        yield LEARNER, f"fault of env {env_id}: {FAULT_KINDS[kind]}"


def write_trace(events: Events, path: str | Path) -> None:
    """Write the JSON that Perfetto loads, event by event.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            _write_json(events, file)
    except OSError as exc:
        raise UsageError(f"cannot write the trace to {str(path)!r}: {exc.strerror}; choose another path") from exc


def _write_json(events: Events, file: TextIO) -> None:
    about = {"lost_events": events.num_lost, "is_full": events.is_full}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    separator = ""
    for event in trace_events(events):
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]}\n")


def trace_events(events: Events) -> Iterator[dict[str, object]]:
    """Yield the events of the Trace Event Format, with times in microseconds since the start of the recording."""
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "stepmill pool"}}
    for track in range(len(events.threads)):
        name = "learner" if track == LEARNER else f"worker {track - 1}"
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
    for track, recorded in enumerate(events.threads):
        for begin_ns, end_ns, server, number in recorded.tolist():
            if number >= TraceKind.SENT:
                continue
            name = TraceKind(number).name.lower()
            is_of_env = number in (TraceKind.STEP, TraceKind.RESET)
            yield {
                "ph": "X",
                "pid": 1,
                "tid": track,
                "name": f"{name} {server}" if is_of_env else name,
                "cat": name,
                "ts": _micros(events, max(begin_ns, events.began_ns)),
                "dur": (end_ns - max(begin_ns, events.began_ns)) / 1e3,
                **({"args": {"env": server}} if is_of_env else {}),
            }
    for when_ns, track, text in events.moments:
        yield {"ph": "i", "s": "t", "pid": 1, "tid": track, "name": text, "ts": _micros(events, when_ns)}
    yield from _arrows(events)


def _micros(events: Events, time_ns: int) -> float:
    return (time_ns - events.began_ns) / 1e3


@dataclass(frozen=True)
class Command:
    """One command of an env: when it was sent, when and where the env ran, and when its result was received. Times in ns."""

    server: int
    track: int
    sent_ns: int
    begin_ns: int
    end_ns: int
    received_ns: int


def commands(events: Events) -> Iterator[Command]:
    """Yield the commands of which all four times were recorded.

    An env has at most one command at a time. The events of an env, in the order of time, are therefore: sent, its steps and
    resets, received. Under SAME_STEP, a step and the reset after it belong to one command, and the first one is taken.
    """
    rows = [
        (end_ns if kind != TraceKind.SENT else begin_ns, kind, server, begin_ns, track)
        for track, recorded in enumerate(events.threads)
        for begin_ns, end_ns, server, kind in recorded.tolist()
        if kind in (TraceKind.STEP, TraceKind.RESET, TraceKind.SENT, TraceKind.RECEIVED)
    ]
    sent: dict[int, int] = {}
    ran: dict[int, tuple[int, int, int]] = {}
    for at_ns, kind, server, begin_ns, track in sorted(rows):
        if kind == TraceKind.SENT:
            sent[server] = at_ns
            ran.pop(server, None)
        elif kind == TraceKind.RECEIVED:
            if server in sent and server in ran:
                yield Command(server, ran[server][0], sent.pop(server), *ran.pop(server)[1:], at_ns)
        elif server in sent and begin_ns >= sent[server]:
            ran.setdefault(server, (track, begin_ns, at_ns))


def _arrows(events: Events) -> Iterator[dict[str, object]]:
    """Yield flow events: from the learner's send to the step of an env, and from there to the learner's gather."""
    for number, command in enumerate(commands(events)):
        arrow = {"pid": 1, "id": number, "name": "command", "cat": "command"}
        yield {**arrow, "ph": "s", "tid": LEARNER, "ts": _micros(events, command.sent_ns)}
        # In the middle, so that it certainly lies within the slice that it belongs to.
        middle_ns = (command.begin_ns + command.end_ns) // 2
        yield {**arrow, "ph": "t", "tid": command.track, "ts": _micros(events, middle_ns)}
        yield {**arrow, "ph": "f", "bp": "e", "tid": LEARNER, "ts": _micros(events, command.received_ns)}
