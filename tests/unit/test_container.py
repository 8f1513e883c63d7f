"""A container is returned as it was packed, or refused with the reason."""

from __future__ import annotations

import hashlib

import pytest

from stepmill.spec import container
from stepmill.spec.errors import UsageError

PACKED = container.pack("kernel snapshot", {"kernel": "walk", "count": 3}, b"\x00payload\xff")


def test_header_and_payload_come_back() -> None:
    header, payload = container.unpack("kernel snapshot", PACKED)
    assert (header["kernel"], header["count"], payload) == ("walk", 3, b"\x00payload\xff")
    assert container.unpack("empty", container.pack("empty", {}, b""))[1] == b""


def test_each_flipped_bit_is_found() -> None:
    for place in range(len(PACKED)):
        for bit in range(8):
            damaged = bytearray(PACKED)
            damaged[place] ^= 1 << bit
            with pytest.raises(UsageError, match="damaged"):
                container.unpack("kernel snapshot", bytes(damaged))


def test_missing_and_added_bytes_are_found() -> None:
    for size in range(len(PACKED)):
        with pytest.raises(UsageError, match="damaged"):
            container.unpack("kernel snapshot", PACKED[:size])
    for more in (b"\x00", PACKED):
        with pytest.raises(UsageError, match="damaged"):
            container.unpack("kernel snapshot", PACKED + more)
    for other in (None, 7, "text", [PACKED]):
        with pytest.raises(UsageError, match="not a kernel snapshot of stepmill"):
            container.unpack("kernel snapshot", other)


def test_another_kind_and_another_version_are_not_taken_for_damage() -> None:
    with pytest.raises(UsageError, match=r"it is a kernel snapshot, but a checkpoint is needed"):
        container.unpack("checkpoint", PACKED)
    content = b"\x02\x00" + PACKED[26:]
    newer = b"stepmill" + hashlib.blake2b(content, digest_size=16).digest() + content
    with pytest.raises(UsageError, match="version 2 of the format, and this stepmill reads version 1"):
        container.unpack("kernel snapshot", newer)
    nothing = b"stepmill" + hashlib.blake2b(b"", digest_size=16).digest()
    with pytest.raises(UsageError, match="damaged"):
        container.unpack("kernel snapshot", nothing)
    for header in (b"[]", b"{}", b"\xff", b"[" * 100_000):
        content = b"\x01\x00" + len(header).to_bytes(4, "little") + header
        forged = b"stepmill" + hashlib.blake2b(content, digest_size=16).digest() + content
        with pytest.raises(UsageError, match="its header is not one of stepmill"):
            container.unpack("kernel snapshot", forged)
