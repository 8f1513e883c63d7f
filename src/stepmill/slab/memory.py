"""The memory of a slab: memfds, which have no name in a file system and can be passed to another process."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import cast

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.slab.counters import CounterReader, Description
from stepmill.slab.layout import Layout, WritableParts
from stepmill.spec.errors import ClosedPoolError
from stepmill.spec.stats import NodeStats, PoolStats


class SharedSlab:
    """A slab, which owns its memory and the descriptors of this memory."""

    def __init__(self, layout: Layout, num_lanes: int, *, backend: str = "") -> None:
        """Make the memory, filled with zeros, and write its header.

        Args:
            layout: the layout of the slab.
            num_lanes: the number of lanes of the pool.
            backend: the name of the backend, for programs that attach.
        Raises:
            OSError: no memory or no descriptor is left.
        """
        self.plan: Mapping[str, object] = layout.plan  # sent to the workers
        self.num_lanes = num_lanes
        self._memory = OwnedFd.memfd("stepmill-slab", can_be_sealed=True)
        os.ftruncate(self._memory.fileno(), layout.size_bytes)
        # If the mapped file could shrink, access to it could end the learner by SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._memory.fileno(), fcntl.F_ADD_SEALS, seals)
        commands = [OwnedFd.memfd(f"stepmill-commands-{worker}") for worker in range(num_lanes)]
        results = [OwnedFd.memfd(f"stepmill-results-{worker}") for worker in range(num_lanes)]
        mapping = _native.Slab(
            self._memory.fileno(), dict(layout.plan), commands, results, OwnedFd.eventfd(), _whole_range(layout.plan)
        )
        mapping.format()
        offset, room = cast("tuple[int, int]", layout.plan["description"])
        text = Description.of(layout.plan, backend).encode(room)
        os.pwrite(self._memory.fileno(), text, offset)
        mapping.set_description(offset, len(text))
        self.description = Description.decode(text)
        self._counters = CounterReader(self.description)
        self._mapping: _native.Slab | None = mapping

    @property
    def native(self) -> _native.Slab:
        """The mapping in this process, which owns the command and result memfds of all workers, and the pool's eventfd."""
        if self._mapping is None:
            raise ClosedPoolError("the pool is closed and its memory is released; make a new pool")
        return self._mapping

    @property
    def fds(self) -> list[int]:
        """The slab's memfd, and then the command memfd and result memfd of each lane. The slab owns them."""
        return self.fds_of(range(self.num_lanes))[:-1]

    @property
    def event(self) -> int:
        """The descriptor of the pool's eventfd, for the event loop that waits for it."""
        return self.native.event_fd

    def fds_of(self, lanes: Iterable[int]) -> list[int]:
        """Return the descriptors that a worker with these lanes needs.

        They are the slab's memfd, the command memfd and result memfd of each lane, and the pool's eventfd.
        """
        native = self.native
        return [self._memory.fileno(), *chain.from_iterable(map(native.fds_of, lanes)), native.event_fd]

    def plan_for(self, lanes: Iterable[int]) -> Mapping[str, object]:
        """Return the plan for one worker process. "writable" has the ranges of bytes that each of its lanes may write."""
        writable = cast("WritableParts", self.plan["writable"])
        return {**self.plan, "writable": {lane: writable.ranges(lane) for lane in lanes}}

    def read_stats(self, *, leased_slots: int, replay_log_bytes: int, nodes: tuple[NodeStats, ...] = ()) -> PoolStats:
        """Return the current statistics."""
        with self.view() as memory:
            stats = self._counters.read(memory, leased_slots=leased_slots, replay_log_bytes=replay_log_bytes)
        return replace(stats, nodes=nodes)

    @contextmanager
    def view(self) -> Iterator[memoryview]:
        """Yield the whole memory, which is read-only and stays mapped during the block."""
        native = self.native  # keeps the memory mapped
        address, size_bytes = native.place()
        with memoryview((ctypes.c_char * size_bytes).from_address(address)) as memory:
            yield memory.cast("B").toreadonly()
        del native

    def close(self) -> None:
        """Release the memory. It stays mapped until the last array that uses it is freed."""
        self._mapping = None
        self._memory.close()


def _whole_range(plan: Mapping[str, object]) -> list[tuple[int, int]]:
    return [(0, cast("int", plan["size_bytes"]))]
