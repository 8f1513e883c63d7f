"""Places each field in a slab, and decides which parts each worker may write.

    | learner's: control words, reset options, actions | shared words | segment of worker 0 | segment 1 | … | whole arrays |

Each part begins on a new page. Only one worker writes a segment, which has the worker's control words, and its rows of
all data arrays that are copied out of the slab. Observations that are leased, and not copied, are in whole arrays,
where the rows of all workers follow each other. The rows of two workers may share the page where they meet. A worker
process can read the whole slab, and can write the shared words, its segment, and the pages of its rows in whole arrays.

The control words are C++ structures (`_native/shared/protocol.hpp`). This module places them and the data arrays; native code reads
their offsets from `Layout.plan`. Property tests check that no two fields share a byte, and which bytes each worker can
write.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmill import _native
from stepmill.slab.counters import description_bytes, formats
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Leaf, leaves

LINE_BYTES = 64
PAGE_BYTES = mmap.PAGESIZE
PRIVATE_SLOTS = 3  # two slots alternate; the third brings all envs into one slot again after a partial reset
LEASE_BYTES = 16 * 1024  # observation leaves of at least this size per batch are leased, and smaller leaves are copied
PAYLOAD_ROW_BYTES = 1024  # larger infos go to the worker's overflow memory, unless the env asks for larger rows
BLOB_ROW_BYTES = 256  # larger reset options and opaque actions go to the worker's command memory

Range = tuple[int, int]  # (start, stop): the bytes start … stop-1
# Offset, slot stride, bytes of a row, is_split. The offset of a split column is relative to each worker's segment.
Column = tuple[int, int, int, bool]


@dataclass(frozen=True)
class Span:
    """One field, which has the bytes start … stop-1."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class WritableParts:
    """The parts of a slab that workers may write.

    Attributes:
        shared: the parts that all workers may write.
        segments: for each worker, the part that only that worker may write.
        rows: for each worker, its first row and the row after its last.
        arrays: (offset, bytes of a row) for each slot of each whole array.
    """

    shared: tuple[Range, ...]
    segments: tuple[Range, ...]
    rows: tuple[Range, ...]
    arrays: tuple[tuple[int, int], ...]

    def ranges(self, worker: int) -> list[Range]:
        """Return the bytes that one worker may write, as ascending ranges of whole pages that do not touch each other."""
        first, stop = self.rows[worker]
        own = [(offset + first * row_bytes, offset + stop * row_bytes) for offset, row_bytes in self.arrays]
        return _merge_pages((*self.shared, self.segments[worker], *own))


def _merge_pages(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        pages = start // PAGE_BYTES * PAGE_BYTES, -(-stop // PAGE_BYTES) * PAGE_BYTES
        if merged and pages[0] <= merged[-1][1]:
            last = merged.pop()
            pages = last[0], max(pages[1], last[1])
        merged.append(pages)
    return merged


def _round_up(offset: int, align: int) -> int:
    return -(-offset // align) * align


@dataclass(frozen=True)
class Layout:
    """The size of a slab, its fields, and the plan that native code reads.

    Attributes:
        writable: the parts that workers may write. The plan, which is sent to workers, has them too.
    """

    size_bytes: int
    spans: tuple[Span, ...]
    plan: dict[str, object]
    writable: WritableParts


class _SpanPlacer:
    """Places aligned spans one after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.end = 0

    def place(self, name: str, size_bytes: int, align: int = LINE_BYTES) -> int:
        start = _round_up(self.end, align)
        self.end = start + size_bytes
        self.spans.append(Span(name, start, self.end))
        return start

    def place_column(
        self, name: str, row_bytes: int, num_rows: int, *, num_slots: int = 1, is_split: bool = False
    ) -> Column:
        """Place `num_slots` copies of [num_rows, ...]."""
        size_bytes = row_bytes * num_rows
        # Slots of large leaves begin on new pages, so that unused slots take no memory.
        align = PAGE_BYTES if size_bytes >= PAGE_BYTES else LINE_BYTES
        starts = [self.place(f"{name} slot {slot}", max(size_bytes, 1), align) for slot in range(num_slots)]
        return starts[0], starts[1] - starts[0] if num_slots > 1 else 0, row_bytes, is_split

    def begin_page(self) -> int:
        self.end = _round_up(self.end, PAGE_BYTES)
        return self.end


def lay_out(spec: EnvSpec, servers: Sequence[Sequence[int]], *, lease_slots: int, num_spares: int = 0) -> Layout:
    """Lay out a slab.

    Args:
        spec: the spec of the envs.
        servers: for each worker, the servers that it owns, in local order. Without spares, they are consecutive.
        lease_slots: D, the number of result slots that can be leased, in addition to the private slots.
        num_spares: how many of the servers are spares. If there are spares, each server has a staging row for each row
            of its env. Staging rows are numbered after the rows of the envs, and have the first observation of the next
            episode. A spare may serve envs of other workers, so every worker may then write all rows.
    """
    return _Builder(spec, servers, lease_slots, num_spares).lay_out()


class _Builder:
    """Places the fields of one slab, part by part."""

    def __init__(self, spec: EnvSpec, servers: Sequence[Sequence[int]], lease_slots: int, num_spares: int) -> None:
        num_servers = sum(len(owned) for owned in servers)
        self._spec = spec
        self._servers = servers
        self._is_split = num_spares == 0  # whether each row always belongs to the same worker
        self._num_rows = spec.batch_size * (num_servers - num_spares)
        self._num_staged = spec.batch_size * num_servers if num_spares else 0
        has_leased = any(self._is_leased(leaf) for _, leaf in leaves(spec.observation))
        self._num_slots = PRIVATE_SLOTS + (lease_slots if has_leased else 0)
        self._slab = _SpanPlacer()
        self._segment = _SpanPlacer()  # offsets in a segment, which are the same in all segments

    def _is_leased(self, leaf: Leaf) -> bool:
        return _row_bytes(leaf) * self._num_rows >= LEASE_BYTES

    def lay_out(self) -> Layout:
        plan = self._place_learners()
        shared = self._slab.begin_page()
        plan["shared_words"] = self._slab.place("shared words", _native.SHARED_WORDS_BYTES)
        num_local = max(len(owned) for owned in self._servers)
        self._segment.place("words", _native.worker_words_bytes(num_local))
        trace = self._segment.place("trace", formats()["worker_trace"].itemsize)
        split: dict[str, Column] = {}
        if self._is_split:
            plan.update(self._place_results(self._segment, self._spec.batch_size * num_local))
            split = self._place_observation(self._segment, self._spec.batch_size * num_local, is_leased=False)
        segments = self._place_segments()
        common = [(shared, segments[0][0])]
        begin = self._slab.begin_page()
        whole = self._place_observation(self._slab, self._num_rows, is_leased=True)
        if not self._is_split:
            plan.update(self._place_results(self._slab, self._num_rows + self._num_staged))
            whole.update(self._place_observation(self._slab, self._num_rows, is_leased=False))
            common.append((begin, self._slab.begin_page()))
        size_bytes = self._slab.begin_page()
        arrays = [(offset + slot * stride, size) for offset, stride, size, _ in whole.values() for slot in self._slots]
        writable = WritableParts(tuple(common), segments, self._rows, tuple(arrays) if self._is_split else ())
        starts = [start for start, _ in segments]
        observation = [(split | whole)[path] for path, _ in leaves(self._spec.observation)]
        plan.update(observation=observation, worker_words=starts, segments=starts, writable=writable)
        plan["worker_traces"] = [start + trace for start in starts]
        plan["size_bytes"] = size_bytes
        return Layout(size_bytes, tuple(self._slab.spans), plan, writable)

    @property
    def _slots(self) -> range:
        return range(self._num_slots)

    @property
    def _rows(self) -> tuple[Range, ...]:
        """For each worker, its first row and the row after its last. Not used with spares."""
        k = self._spec.batch_size
        return tuple((k * min(owned), k * (max(owned) + 1)) for owned in self._servers)

    def _place_learners(self) -> dict[str, object]:
        """Place the fields that only the learner writes."""
        placer = self._slab
        num_servers, num_envs = sum(len(owned) for owned in self._servers), self._num_rows // self._spec.batch_size
        room = description_bytes(len(self._servers), num_servers)
        return {
            "num_rows": self._num_rows,
            "batch_size": self._spec.batch_size,
            "num_slots": self._num_slots,
            "private_slots": PRIVATE_SLOTS,
            "lease_bytes": LEASE_BYTES,
            "servers": [list(owned) for owned in self._servers],
            "pool_words": placer.place("pool words", formats()["header"].itemsize),
            "description": (placer.place("description", room), room),
            "learner_trace": placer.place("learner's trace", formats()["learner_trace"].itemsize),
            "env_counters": placer.place("env counters", formats()["env"].itemsize * num_envs),
            "learner_words": [
                placer.place(f"learner's words of worker {worker}", _native.learner_words_bytes(len(owned)))
                for worker, owned in enumerate(self._servers)
            ],
            "blob": placer.place_column("blobs", BLOB_ROW_BYTES, sum(len(owned) for owned in self._servers)),
            "action": [
                placer.place_column(f"action{path}", _row_bytes(leaf), self._num_rows)
                for path, leaf in leaves(self._spec.action)
            ],
        }

    def _place_segments(self) -> tuple[Range, ...]:
        begin, stride = self._slab.begin_page(), self._segment.begin_page()
        segments = tuple((begin + i * stride, begin + (i + 1) * stride) for i in range(len(self._servers)))
        for worker, (start, stop) in enumerate(segments):
            for span in self._segment.spans:
                self._slab.spans.append(Span(f"worker {worker} {span.name}", start + span.start, start + span.stop))
            self._slab.end = stop
        return segments

    def _place_results(self, placer: _SpanPlacer, num_rows: int) -> dict[str, object]:
        """Place the fields that workers write, except newest observations, in a segment or for all workers together."""
        spec = self._spec
        num_agents, num_rewards = len(spec.agents), math.prod(spec.reward.shape)

        def place(name: str, row_bytes: int) -> Column:
            return placer.place_column(name, row_bytes, num_rows, is_split=self._is_split)

        def place_tree(name: str, sizes: dict[str, int], rows: int) -> list[Column]:
            return [
                placer.place_column(f"{name}{path}", size, rows, is_split=self._is_split)
                for path, size in sizes.items()
            ]

        observation = {path: _row_bytes(leaf) for path, leaf in leaves(spec.observation)}
        return {
            "num_agents": num_agents,
            "num_rewards": num_rewards,
            "has_scalar_reward": not spec.reward.shape,
            "has_float_reward": spec.reward.dtype.itemsize == 4,
            "is_open": spec.is_open,
            "reward": place("reward", spec.reward.dtype.itemsize * num_rewards),
            "terminated": place("terminated", num_agents or 1),
            "truncated": place("truncated", num_agents or 1),
            "alive": place("alive", num_agents),
            "over": place("over", 1),
            "episode_return": place("episode_return", 8 * num_rewards),
            "episode_length": place("episode_length", 8),
            "info": place_tree("info", {path: _row_bytes(leaf) for path, leaf in leaves(spec.info)}, num_rows),
            "payload": place("payload", _payload_row_bytes(spec)),
            "final_observation": place_tree("final observation", observation, min(num_rows, self._num_rows)),
            "staging": place_tree("staging", observation, self._num_staged) if self._num_staged else [],
        }

    def _place_observation(self, placer: _SpanPlacer, num_rows: int, *, is_leased: bool) -> dict[str, Column]:
        """Place the observation leaves that are leased, or, if not `is_leased`, the others."""
        return {
            path: placer.place_column(
                f"observation{path}",
                _row_bytes(leaf),
                num_rows,
                num_slots=self._num_slots,
                is_split=self._is_split and not is_leased,
            )
            for path, leaf in leaves(self._spec.observation)
            if self._is_leased(leaf) == is_leased
        }


def _payload_row_bytes(spec: EnvSpec) -> int:
    if spec.payload_bytes <= PAYLOAD_ROW_BYTES:
        return PAYLOAD_ROW_BYTES
    # A large row has whole pages, so that its unused part takes no memory and shares no page with the next row.
    return _round_up(spec.payload_bytes, PAGE_BYTES)


def _row_bytes(leaf: Leaf) -> int:
    return leaf.dtype.itemsize * math.prod(leaf.shape)
