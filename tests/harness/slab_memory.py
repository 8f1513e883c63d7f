"""Writes to the slab by address, as a stray pointer would. For envs in a worker process."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple


class Mapped(NamedTuple):
    """A part of the slab's mapping: addresses start … stop-1 hold the slab's bytes from `offset` on."""

    start: int
    stop: int
    offset: int
    is_writable: bool


def slab_parts() -> list[Mapped]:
    """Return the parts of this process's mapping of its slab, in order."""
    parts = []
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            if "memfd:stepmill-slab" in line:
                addresses, permissions, offset = line.split()[:3]
                start, stop = (int(address, 16) for address in addresses.split("-"))
                parts.append(Mapped(start, stop, int(offset, 16), "w" in permissions))
    return parts


def write_slab(place: int, data: bytes) -> None:
    """Write bytes at an offset of the slab, as native code would: without a check."""
    ctypes.memmove(slab_address(place), data, len(data))


def fill_slab(start: int, stop: int, byte: int) -> None:
    """Fill the slab's bytes start … stop-1."""
    ctypes.memset(slab_address(start), byte, stop - start)


def slab_address(place: int) -> int:
    """Return where this process has a byte of the slab."""
    part = next(part for part in slab_parts() if part.offset <= place < part.offset + part.stop - part.start)
    return part.start + place - part.offset


def writable_ranges() -> Sequence[tuple[int, int]]:
    """Return the offsets of what this process can write of its slab."""
    return [(part.offset, part.offset + part.stop - part.start) for part in slab_parts() if part.is_writable]
