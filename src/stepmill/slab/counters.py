"""Reads the counters of a pool from its slab, in the learner or in another process that attaches.

The counters are C++ structures (`_native/shared/statistics.def`, `protocol.hpp`), whose formats native code returns. The slab has a
description as JSON (`Description`), which says where the structures are. The pool words at the beginning of the slab
say where the description is.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill._version import __version__
from stepmill.spec.errors import EngineBug
from stepmill.spec.stats import NS, Durations, LearnerStats, PoolStats, WorkerStats

_PLACES: dict[type[Any], dict[str, list[str]]] = {
    kind: {each.name: each.metadata["at"].split(".") for each in fields(kind) if each.metadata["at"]}
    for kind in (PoolStats, LearnerStats, WorkerStats)
}


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
def formats() -> dict[str, np.dtype[Any]]:
    """Return the structures of the slab that are read from Python, by name."""
    return {name: np.dtype(cast("Any", fields)) for name, fields in _native.counter_formats().items()}


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
        ring = _view(memory, name, offset)[0]
        capacity = len(ring["events"])
        stop, first = int(ring["num_events"]), self._num_read[thread]
        self._num_read[thread] = stop
        if first < 0:
            return np.empty(0, formats()["event"])
        copied = ring["events"][np.arange(max(first, stop - capacity), stop) % capacity]
        # The thread continues to write. Events that it may have overwritten, or may be writing now, are dropped.
        overwritten = int(ring["num_events"]) - capacity + 1
        kept = copied[max(0, overwritten - max(first, stop - capacity)) :]
        self.num_lost += stop - first - len(kept)
        return cast("NDArray[Any]", kept)


def read_header(memory: SlabBytes) -> tuple[int, int, int, int]:
    """Return magic, layout version, and offset and size of the description.

    Raises:
        ValueError: the memory is too short.
    """
    header = _view(memory, "header", 0)[0]
    magic, version, offset, size_bytes = (
        int(header[name]) for name in ("magic", "version", "description_offset", "description_bytes")
    )
    return magic, version, offset, size_bytes


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
        about = self._description
        servers = np.empty(len(self._servers), formats()["server"])
        for start, owned in zip(about.worker_words, about.servers, strict=True):
            offset = start + _native.server_word_offsets(len(owned))["counters"]
            servers[owned] = _view(memory, "server", offset, len(owned))
        workers = tuple(self._read_worker(memory, worker, servers) for worker in range(len(about.servers)))
        learner = _view(memory, "learner", 0)[0]
        elapsed_s = (time.monotonic_ns() - about.began_ns) * NS
        parts = self._read_numbers(LearnerStats, learner=learner)
        elsewhere_s = max(0.0, elapsed_s - parts["send_s"] - parts["wait_s"] - parts["gather_s"])
        return PoolStats(
            elapsed_s=elapsed_s,
            num_envs=about.num_envs,
            workers=workers,
            learner=LearnerStats(elsewhere_s=elsewhere_s, **parts),
            **self._read_numbers(
                PoolStats, learner=learner, server=servers, env=_view(memory, "env", about.env_counters, about.num_envs)
            ),
            leased_slots=leased_slots,
            replay_log_bytes=replay_log_bytes,
            backend=about.backend,
        )

    def _read_worker(self, memory: SlabBytes, worker: int, servers: NDArray[Any]) -> WorkerStats:
        about = self._description
        own = _view(memory, "worker", about.worker_words[worker])[0]
        process = _view(memory, "process", about.learner_words[worker])[0]
        owned = about.servers[worker]
        step_s, reset_s = (float(servers[name]["total_ns"][owned].sum()) * NS for name in ("step", "reset"))
        local = int(own["current"])
        return WorkerStats(
            worker=worker,
            pid=int(process["pid"]),
            step_s=step_s,
            reset_s=reset_s,
            # The sums of durations are estimates, so the difference may be below 0.
            publish_s=max(0.0, float(own["busy_ns"]) * NS - step_s - reset_s),
            current=owned[local] if local < len(owned) else None,
            is_dead=bool(process["dead"]),
            **self._read_numbers(WorkerStats, worker=own, process=process),
        )

    def _read_numbers(self, kind: type[Any], **structures: NDArray[Any]) -> dict[str, Any]:
        """Return the fields of a class of statistics that are numbers in these structures."""
        return {field: self._read_number(name, structures[of][name]) for field, (of, name) in _PLACES[kind].items()}

    def _read_number(self, name: str, found: Any) -> Any:
        if found.dtype.names:
            counts, total_s, max_s = found["buckets"].astype(np.int64), found["total_ns"] * NS, found["max_ns"] * NS
            return Durations(counts=counts, stops_s=self._stops_s, total_s=total_s, max_s=max_s)
        if found.ndim:
            return found.astype(np.int64)
        return float(found) * NS if name.endswith("_ns") else int(found)


def _view(memory: SlabBytes, structure: str, offset: int, count: int = 1) -> NDArray[Any]:
    dtype = formats()[structure]
    return np.frombuffer(memory[offset : offset + count * dtype.itemsize], dtype, count)
