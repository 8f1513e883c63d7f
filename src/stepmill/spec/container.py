"""A format for bytes that outlive their process: a header and a payload, with a checksum.

    magic, 8 bytes | checksum of all that follows, 16 | version, 2 | size of the header, 4 | header: JSON | payload

Numbers are little-endian. The header is text with line breaks, which any program for text files shows. The checksum detects
damage, but not forgery. The magic and the checksum have the same places in all versions, so that another version is not
mistaken for damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stepmill.spec.errors import UsageError

_MAGIC = b"stepmill"
_CHECKSUM_BYTES = 16
_VERSION = 1
_SIZES = struct.Struct("<HI")


def write(path: str, kind: str, header: Mapping[str, Any], payload: bytes) -> None:
    """Write a container as a file, as a whole or not at all.

    Raises:
        OSError: the file cannot be written. A file that was there before is not changed.
    """
    data = pack(kind, header, payload)
    partial = f"{path}.{secrets.token_hex(4)}.part"
    try:
        with open(partial, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(FileNotFoundError):
            os.remove(partial)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the rename, too, outlives a power cut
    finally:
        os.close(folder)


def read(path: str, kind: str, max_bytes: int = -1) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload of a file. No more is read of a file that does not begin as a container, or beyond `max_bytes`.

    Raises:
        UsageError: the file cannot be read, or `unpack` refuses it.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            data = file.read(len(_MAGIC))
            if data == _MAGIC:
                file.seek(0)
                data = file.read(max_bytes)  # the checksum of a part is wrong
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or exc}; give the path of a {kind}") from exc
    return unpack(kind, data)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # or else a named pipe waits for its writer


def pack(kind: str, header: Mapping[str, Any], payload: bytes) -> bytes:
    """Return a container of a kind. The values of the header must be values of JSON."""
    text = json.dumps({"kind": kind, **header}, indent=1).encode()
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
    try:
        header: dict[str, Any] = json.loads(content[_SIZES.size : end])
        found = header["kind"]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise UsageError(f"this is not a {kind}: its header is not one of stepmill; give an unchanged {kind}") from exc
    if found != kind:
        raise UsageError(f"it is a {found!s:.40}, but a {kind} is needed; give one")
    return header, content[end:]


def refuse_pickle(_: bytes) -> object:
    """Take the place of `pickle.loads` for a payload that has no pickles according to its header.

    Raises:
        UsageError: always.
    """
    raise UsageError("a pickled value is not named in the header, so that the file was changed; give another file")


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
