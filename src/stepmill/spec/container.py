"""A format for bytes that outlive their process: a header and a payload, with a checksum.

    magic, 8 bytes | checksum of all that follows, 16 | version, 2 | size of the header, 4 | header: JSON | payload

Numbers are little-endian. The checksum detects damage, but not forgery. The magic and the checksum have the same places
in all versions, so that another version is not mistaken for damage.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from stepmill.spec.errors import UsageError

_MAGIC = b"stepmill"
_CHECKSUM_BYTES = 16
_VERSION = 1
_SIZES = struct.Struct("<HI")


def pack(kind: str, header: Mapping[str, Any], payload: bytes) -> bytes:
    """Return a container of a kind. The values of the header must be values of JSON."""
    text = json.dumps({"kind": kind, **header}).encode()
    content = _SIZES.pack(_VERSION, len(text)) + text + payload
    return _MAGIC + _checksum(content) + content


def unpack(kind: str, container: object) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload of a container.

    Raises:
        UsageError: `container` is not a container, is damaged, or has another kind or version.
    """
    if not isinstance(container, bytes) or not container.startswith(_MAGIC):
        raise UsageError(f"this is not a {kind} of stepmill, or its beginning is damaged; give an unchanged {kind}")
    start = len(_MAGIC) + _CHECKSUM_BYTES
    content = container[start:]
    if len(content) < _SIZES.size or _checksum(content) != container[len(_MAGIC) : start]:
        raise UsageError(f"the {kind} of {len(container)} bytes is damaged: its checksum is wrong; take a new one")
    version, size = _SIZES.unpack_from(content)
    if version != _VERSION:
        raise UsageError(
            f"the {kind} has version {version} of the format, and this stepmill reads version {_VERSION}; take a new one"
        )
    end = _SIZES.size + size
    header: dict[str, Any] = json.loads(content[_SIZES.size : end])
    if header["kind"] != kind:
        raise UsageError(f"it is a {header['kind']}, but a {kind} is needed; give one")
    return header, content[end:]


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
