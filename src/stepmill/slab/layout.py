"""Where everything lies in a slab.

    | pool control | worker 0: control, server words | worker 1: … | data arrays, each from a cache line of its own |

The control words are C++ structures (`_native/protocol.hpp`); this file places them and the data arrays, and native code
takes the places from `Layout.plan`. No two fields share a byte, which a property test checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stepmill import _native
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Leaf, Node, leaves

LINE_BYTES = 64
PAGE_BYTES = 4096
PRIVATE_SLOTS = 3  # two that alternate, and one more that makes all envs meet in one slot again after a partial reset
LEASE_BYTES = 16 * 1024  # an observation leaf of at least so many bytes a batch is lent, a smaller one copied
PAYLOAD_ROW_BYTES = (
    1024  # an info that is larger goes to the worker's overflow memory, unless the env asks for more room
)
BLOB_ROW_BYTES = 256  # a reset's options or an opaque action that are larger go to the worker's command memory


@dataclass(frozen=True)
class Span:
    """One field: its bytes are start … stop-1."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """A slab's size, its fields, and the plan that native code reads."""

    size_bytes: int
    spans: tuple[Span, ...]
    plan: dict[str, object]


class _Ruler:
    """Hands out aligned spans, one after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.end = 0

    def place(self, name: str, size_bytes: int, align: int = LINE_BYTES) -> int:
        start = -(-self.end // align) * align
        self.end = start + size_bytes
        self.spans.append(Span(name, start, self.end))
        return start


def lay_out(spec: EnvSpec, servers: Sequence[Sequence[int]], *, lease_slots: int, num_spares: int = 0) -> Layout:
    """Lay out a slab.

    Args:
        spec: of the envs.
        servers: of each worker, the servers it owns, in local order.
        lease_slots: D, result slots that can be lent, beside the private ones.
        num_spares: how many of the servers are spares. With any, each server has a staging row (one per row of its
            env), where the first observation of its next episode waits; they are numbered behind the envs' rows.
    """
    num_servers = sum(len(owned) for owned in servers)
    num_rows = spec.batch_size * (num_servers - num_spares)
    num_staged = spec.batch_size * num_servers if num_spares else 0
    num_leased = lease_slots if _is_any_leased(spec.observation, num_rows) else 0
    num_slots = PRIVATE_SLOTS + num_leased
    payload_row_bytes = _payload_row_bytes(spec)
    ruler = _Ruler()
    ruler.place("pool control", _native.POOL_CONTROL_BYTES)
    control = [
        ruler.place(f"worker {worker} control", _native.worker_control_bytes(len(owned)))
        for worker, owned in enumerate(servers)
    ]
    plan: dict[str, object] = {
        "num_rows": num_rows,
        "batch_size": spec.batch_size,
        "num_slots": num_slots,
        "private_slots": PRIVATE_SLOTS,
        "worker_control": control,
        "servers": [list(owned) for owned in servers],
        "observation": _columns(ruler, "observation", spec.observation, num_rows, num_slots),
        "final_observation": _columns(ruler, "final observation", spec.observation, num_rows, 1),
        "action": _columns(ruler, "action", spec.action, num_rows, 1),
        "staging": _columns(ruler, "staging", spec.observation, num_staged, 1) if num_spares else [],
        "payload_row_bytes": payload_row_bytes,
        "blob": ruler.place("blobs", BLOB_ROW_BYTES * num_servers),
        "blob_row_bytes": BLOB_ROW_BYTES,
    }
    plan["info"] = _columns(ruler, "info", spec.info, num_rows + num_staged, 1)
    plan.update(_place_outcome(ruler, spec, num_rows + num_staged))
    for name, item_bytes in _ROW_FIELDS.items():
        plan[name] = ruler.place(name, item_bytes * (num_rows + num_staged))
    align = PAGE_BYTES if payload_row_bytes > PAYLOAD_ROW_BYTES else LINE_BYTES
    plan["payload"] = ruler.place("payload", payload_row_bytes * (num_rows + num_staged), align)
    plan["size_bytes"] = -(-ruler.end // PAGE_BYTES) * PAGE_BYTES
    return Layout(-(-ruler.end // PAGE_BYTES) * PAGE_BYTES, tuple(ruler.spans), plan)


def _place_outcome(ruler: _Ruler, spec: EnvSpec, num_rows: int) -> dict[str, object]:
    """Place what a row's result says beside its observation: (offset, 0, row bytes) each, and how it is to be read."""
    num_agents, num_rewards = len(spec.agents), math.prod(spec.reward.shape)
    sizes = {
        "reward": spec.reward.dtype.itemsize * num_rewards,
        "terminated": num_agents or 1,
        "truncated": num_agents or 1,
        "alive": num_agents,
        "episode_return": 8 * num_rewards,
    }
    places: dict[str, object] = {
        name: (ruler.place(name, max(row_bytes * num_rows, 1)), 0, row_bytes) for name, row_bytes in sizes.items()
    }
    return {
        **places,
        "num_agents": num_agents,
        "num_rewards": num_rewards,
        "has_scalar_reward": not spec.reward.shape,
        "has_float_reward": spec.reward.dtype.itemsize == 4,
        "is_open": spec.is_open,
    }


_ROW_FIELDS = {
    "over": 1,
    "episode_length": 8,
}


def _payload_row_bytes(spec: EnvSpec) -> int:
    if spec.payload_bytes <= PAYLOAD_ROW_BYTES:
        return PAYLOAD_ROW_BYTES
    # Whole pages: what a row does not use is never resident, nor shared with the next.
    return -(-spec.payload_bytes // PAGE_BYTES) * PAGE_BYTES


def _row_bytes(leaf: Leaf) -> int:
    return leaf.dtype.itemsize * math.prod(leaf.shape)


def _is_any_leased(node: Node, num_rows: int) -> bool:
    return any(_row_bytes(leaf) * num_rows >= LEASE_BYTES for _, leaf in leaves(node))


def _columns(ruler: _Ruler, name: str, node: Node, num_rows: int, num_slots: int) -> list[tuple[int, int, int]]:
    """Place each leaf's `num_slots` copies of [num_rows, ...]; return (offset, slot stride, row bytes) of each."""
    columns = []
    for path, leaf in leaves(node):
        row_bytes = _row_bytes(leaf)
        # Slots of large leaves begin on pages of their own: what is never used is never resident.
        align = PAGE_BYTES if row_bytes * num_rows >= PAGE_BYTES else LINE_BYTES
        starts = [
            ruler.place(f"{name}{path} slot {slot}", max(row_bytes * num_rows, 1), align) for slot in range(num_slots)
        ]
        stride = starts[1] - starts[0] if num_slots > 1 else 0
        columns.append((starts[0], stride, row_bytes))
    return columns
