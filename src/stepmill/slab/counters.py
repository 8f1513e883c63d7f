"""Reads the counters of a pool from its slab, in the learner or in another process that attaches.

The counters are C++ structures (`_native/shared/statistics.hpp`, `protocol.hpp`), whose offsets native code returns. The slab has a
description as JSON (`Description`), which says where the structures are. The pool words at the beginning of the slab
say where the description is.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill._version import __version__
from stepmill.spec.errors import EngineBug
from stepmill.spec.stats import NS, Durations, LearnerStats, PoolStats, WorkerStats

NUMBER, WORD = "<u8", "<u4"
HEADER_BYTES = 64


class SlabBytes(Protocol):
    """The bytes of a slab. This is a memoryview of the memory, or an object that reads a file."""

    def __getitem__(self, part: slice, /) -> bytes | memoryview:
        """Return a part, which is shorter if the slab ends before."""


@dataclass(frozen=True)
class Description:
    """The facts about a pool that a program needs to attach to it.

    Attributes:
        version: the version of stepmill.
        pid: the pid of the learner.
        began_ns: when the pool was made, in nanoseconds on the clock of time.monotonic_ns().
        backend: the name of the backend.
        num_envs: N, without spares.
        servers: the servers of each worker.
        env_counters: the offset in bytes of the learner's counters of the envs.
        learner_words, worker_words: the offsets in bytes of the words of each worker.
    """

    version: str
    pid: int
    began_ns: int
    backend: str
    num_envs: int
    servers: list[list[int]]
    env_counters: int
    learner_words: list[int]
    worker_words: list[int]
    learner_trace: int
    worker_traces: list[int]

    @classmethod
    def of(cls, plan: Mapping[str, Any], backend: str) -> Description:
        """Describe a pool that this process has just made."""
        lists = ("servers", "learner_words", "worker_words", "worker_traces")
        places = {name: plan[name] for name in (*lists, "env_counters", "learner_trace")}
        return cls(
            version=__version__,
            pid=os.getpid(),
            began_ns=time.monotonic_ns(),
            backend=backend,
            num_envs=plan["num_rows"] // plan["batch_size"],
            **places,
        )

    def encode(self, limit_bytes: int) -> bytes:
        """Return the description as JSON of at most `limit_bytes` bytes."""
        text = json.dumps(vars(self), separators=(",", ":")).encode()
        if len(text) > limit_bytes:
            raise EngineBug(f"the description of a slab has {len(text)} bytes; please report this bug")
        return text

    @classmethod
    def decode(cls, text: bytes) -> Description:
        """Return the description that `encode` has written as `text`.

        Raises:
            ValueError: the text is not a description. Any program can make a memfd with the name of a slab.
        """
        try:
            found = cls(**json.loads(text))
            is_whole = found._is_whole()
        except (TypeError, RecursionError) as exc:
            raise ValueError("this is not the description of a slab") from exc
        if not is_whole:
            raise ValueError("the description of the slab contradicts itself")
        return found

    def _is_whole(self) -> bool:
        """Return whether all fields have their types, and agree with each other."""
        by_worker = (self.learner_words, self.worker_words, self.worker_traces, self.servers)
        owned = list(chain.from_iterable(self.servers))
        numbers = (self.pid, self.began_ns, self.num_envs, self.env_counters, self.learner_trace)
        return (
            all(type(each) is list for each in (*by_worker, *self.servers))
            and all(type(number) is int and 0 <= number < 1 << 62 for number in chain(numbers, *by_worker[:3], owned))
            and len({len(each) for each in by_worker}) == 1
            and sorted(owned) == list(range(len(owned)))
            and 0 < self.num_envs <= len(owned)
            and re.fullmatch("[a-z]*", self.backend) is not None
        )


def description_bytes(num_workers: int, num_servers: int) -> int:
    """Return how many bytes a description needs at most."""
    return 1024 + 64 * num_workers + 12 * num_servers


@cache
def _formats() -> dict[str, np.dtype[Any]]:
    """Return the structures that have counters, as NumPy types by name."""
    offsets = _native.counter_offsets()

    def make(name: str, special: Mapping[str, object]) -> np.dtype[Any]:
        size_bytes, fields = offsets[name]
        formats = [special.get(field, NUMBER) for field in fields]
        places = {"names": [*fields], "formats": formats, "offsets": [*fields.values()], "itemsize": size_bytes}
        return cast("np.dtype[Any]", np.dtype(cast("Any", places)))

    words = dict.fromkeys(
        ("version", "pid", "num_restarts", "num_deaths", "num_recycles", "dead", "current", "running", "num_spares"),
        WORD,
    )
    histogram = make("histogram", {"buckets": (NUMBER, (len(_native.bucket_stops_ns()),))})
    learner = make("learner", {})
    event = make("event", {"server": WORD, "kind": WORD})
    return {
        "pool": make("pool", {**words, "counters": learner}),
        "env": make("env", {**words, "num_faults": (WORD, (8,))}),
        "learner_words": make("learner_words", words),
        "worker": make("worker", words),
        "server": make("server", {"step": histogram, "reset": histogram}),
        "event": event,
        **{name: make(name, {"events": (event, (_ring_size(name),))}) for name in ("worker_trace", "learner_trace")},
    }


def _ring_size(name: str) -> int:
    size_bytes, fields = _native.counter_offsets()[name]
    return (size_bytes - fields["events"]) // _native.counter_offsets()["event"][0]


class TraceReader:
    """Reads the events from the rings of a pool's threads. Thread 0 is the learner, thread 1 + w is worker w."""

    def __init__(self, description: Description) -> None:
        offsets = (description.learner_trace, *description.worker_traces)
        self._rings = [("worker_trace" if thread else "learner_trace", offset) for thread, offset in enumerate(offsets)]
        self._num_read = [-1] * len(self._rings)
        self.num_lost = 0

    def read_new(self, memory: memoryview) -> list[NDArray[Any]]:
        """Return the events of each thread since the last call, or none at the first call. Overwritten events are lost."""
        return [self._read_ring(memory, thread) for thread in range(len(self._rings))]

    def _read_ring(self, memory: memoryview, thread: int) -> NDArray[Any]:
        name, offset = self._rings[thread]
        dtype = _formats()[name]
        ring = _view(memory, dtype, offset, 1)[0]
        capacity = len(ring["events"])
        stop, first = int(ring["num_events"]), self._num_read[thread]
        self._num_read[thread] = stop
        if first < 0:
            return np.empty(0, _formats()["event"])
        copied = ring["events"][np.arange(max(first, stop - capacity), stop) % capacity]
        # The thread continues to write. Events that it may have overwritten, or may be writing now, are dropped.
        overwritten = int(ring["num_events"]) - capacity + 1
        kept = copied[max(0, overwritten - max(first, stop - capacity)) :]
        self.num_lost += stop - first - len(kept)
        return cast("NDArray[Any]", kept)


def read_header(memory: bytes | memoryview) -> tuple[int, int, int, int, int]:
    """Return magic, layout version, size, and offset and size of the description, from the first HEADER_BYTES of a slab."""
    offsets = _native.counter_offsets()["pool"][1]

    def number(name: str, size: int) -> int:
        return int.from_bytes(memory[offsets[name] : offsets[name] + size], "little")

    fields = (("magic", 8), ("version", 4), ("size_bytes", 8), ("description_offset", 8), ("description_bytes", 8))
    magic, version, size_bytes, offset, num_bytes = (number(name, size) for name, size in fields)
    return magic, version, size_bytes, offset, num_bytes


class CounterReader:
    """Reads the counters of one slab. The memory must stay mapped while `read` runs."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._servers = np.concatenate([np.asarray(owned, np.int64) for owned in description.servers])
        self._stops_s = np.array(_native.bucket_stops_ns(), np.float64) * NS

    def read(self, memory: SlabBytes, *, leased_slots: int = 0, replay_log_bytes: int = 0) -> PoolStats:
        """Return the current statistics. The last two arguments have values that are not in the slab.

        Raises:
            ValueError: the slab is shorter than its description says.
        """
        about, formats = self._description, _formats()
        pool = _view(memory, formats["pool"], 0, 1)[0]
        envs = _view(memory, formats["env"], about.env_counters, about.num_envs)
        offsets = [
            start + _native.server_counters_offset(len(owned))
            for start, owned in zip(about.worker_words, about.servers, strict=True)
        ]
        servers = np.empty(len(self._servers), formats["server"])
        for offset, owned in zip(offsets, about.servers, strict=True):
            servers[owned] = _view(memory, formats["server"], offset, len(owned))
        workers = tuple(self._read_worker(memory, worker, servers) for worker in range(len(about.servers)))
        learner = pool["counters"]
        elapsed_s = (time.monotonic_ns() - about.began_ns) * NS
        return PoolStats(
            elapsed_s=elapsed_s,
            num_envs=about.num_envs,
            workers=workers,
            learner=_learner_stats(learner, elapsed_s),
            step=self._durations(servers["step"]),
            reset=self._durations(servers["reset"]),
            faults=envs["num_faults"].astype(np.int64),
            spilled=servers["num_spilled"].astype(np.int64),
            spares=envs["num_spares"].astype(np.int64),
            spares_used=int(learner["num_spares_used"]),
            spares_waited=int(learner["num_spares_waited"]),
            lease_copies=int(learner["num_lease_copies"]),
            leased_slots=leased_slots,
            replay_log_bytes=replay_log_bytes,
            backend=about.backend,
        )

    def _read_worker(self, memory: SlabBytes, worker: int, servers: NDArray[Any]) -> WorkerStats:
        about, formats = self._description, _formats()
        own = _view(memory, formats["worker"], about.worker_words[worker], 1)[0]
        learners = _view(memory, formats["learner_words"], about.learner_words[worker], 1)[0]
        owned = about.servers[worker]
        step_s = float(servers["step"]["total_ns"][owned].sum()) * NS
        reset_s = float(servers["reset"]["total_ns"][owned].sum()) * NS
        local = int(own["current"])
        return WorkerStats(
            worker=worker,
            pid=int(learners["pid"]),
            step_s=step_s,
            reset_s=reset_s,
            # The sums of durations are estimates, so the difference may be below 0.
            publish_s=max(0.0, float(own["busy_ns"]) * NS - step_s - reset_s),
            wait_s=float(own["wait_ns"]) * NS,
            steps=int(own["num_steps"]),
            resets=int(own["num_resets"]),
            reset_retries=int(own["num_retries"]),
            restarts=int(learners["num_restarts"]),
            deaths=int(learners["num_deaths"]),
            recycles=int(learners["num_recycles"]),
            current=owned[local] if local < len(owned) else None,
            is_dead=bool(learners["dead"]),
        )

    def _durations(self, histograms: NDArray[Any]) -> Durations:
        return Durations(
            counts=histograms["buckets"].astype(np.int64),
            stops_s=self._stops_s,
            total_s=histograms["total_ns"] * NS,
            max_s=histograms["max_ns"] * NS,
        )


def _learner_stats(counters: Any, elapsed_s: float) -> LearnerStats:
    send_s, wait_s, gather_s = (float(counters[name]) * NS for name in ("send_ns", "wait_ns", "gather_ns"))
    return LearnerStats(
        send_s=send_s,
        wait_s=wait_s,
        gather_s=gather_s,
        elsewhere_s=max(0.0, elapsed_s - send_s - wait_s - gather_s),
        sends=int(counters["num_sends"]),
        batches=int(counters["num_batches"]),
    )


def _view(memory: SlabBytes, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
    return np.frombuffer(memory[offset : offset + count * dtype.itemsize], dtype, count)
