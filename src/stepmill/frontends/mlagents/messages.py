"""The bytes of side channels: what one message holds, and how messages of several channels are packed into one.

packed   for each message: 16 bytes of the channel's UUID (little-endian fields), int32 length, the message
message  values one after the other, little-endian; a string is an int32 length and ASCII
"""

from __future__ import annotations

import logging
import struct
import uuid
from collections.abc import Iterable
from typing import Any

from stepmill.frontends.mlagents.failures import UnityEnvironmentException

logger = logging.getLogger("stepmill.mlagents")


class IncomingMessage:
    """A message of the env, read value by value in the order in which they were written."""

    def __init__(self, buffer: bytes, offset: int = 0) -> None:
        self.buffer = buffer
        self.offset = offset

    def _take(self, form: str, default: Any) -> Any:
        if self.offset >= len(self.buffer):
            return default
        (value,) = struct.unpack_from(form, self.buffer, self.offset)
        self.offset += struct.calcsize(form)
        return value

    def read_bool(self, default_value: bool = False) -> bool:
        """Return the next bool; the default at the end of the message."""
        value: bool = self._take("<?", default_value)
        return value

    def read_int32(self, default_value: int = 0) -> int:
        """Return the next int; the default at the end of the message."""
        value: int = self._take("<i", default_value)
        return value

    def read_float32(self, default_value: float = 0.0) -> float:
        """Return the next float; the default at the end of the message."""
        value: float = self._take("<f", default_value)
        return value

    def read_float32_list(self, default_value: list[float] | None = None) -> list[float]:
        """Return the next list of floats; the default, or an empty one, at the end of the message."""
        if self.offset >= len(self.buffer):
            return [] if default_value is None else default_value
        return [self.read_float32() for _ in range(self.read_int32())]

    def read_string(self, default_value: str = "") -> str:
        """Return the next string; the default at the end of the message."""
        if self.offset >= len(self.buffer):
            return default_value
        size = self.read_int32()
        text = bytes(self.buffer[self.offset : self.offset + size]).decode("ascii")
        self.offset += size
        return text

    def get_raw_bytes(self) -> bytes:
        """Return a copy of the whole message."""
        return bytes(self.buffer)


class OutgoingMessage:
    """A message to the env, written value by value."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def write_bool(self, b: bool) -> None:
        """Append a bool."""
        self.buffer += struct.pack("<?", b)

    def write_int32(self, i: int) -> None:
        """Append an int."""
        self.buffer += struct.pack("<i", i)

    def write_float32(self, f: float) -> None:
        """Append a float, in 32 bits."""
        self.buffer += struct.pack("<f", f)

    def write_float32_list(self, float_list: Iterable[float]) -> None:
        """Append a list of floats."""
        values = list(float_list)
        self.buffer += struct.pack(f"<i{len(values)}f", len(values), *values)

    def write_string(self, s: str) -> None:
        """Append a string of ASCII."""
        data = s.encode("ascii")
        self.buffer += struct.pack("<i", len(data)) + data

    def set_raw_bytes(self, buffer: bytes | bytearray) -> None:
        """Make the message these bytes, whatever was written before."""
        if self.buffer:
            logger.warning("set_raw_bytes replaces %d bytes that were written before", len(self.buffer))
        self.buffer = bytearray(buffer)


class SideChannelManager:
    """Packs what channels have queued, and hands messages of the env to the channel that each is for.

    `UnityEnvironment` has a manager of its own; this one is for envs that have none.
    """

    def __init__(self, side_channels: Iterable[Any] = ()) -> None:
        """Take channels.

        Raises:
            UnityEnvironmentException: two have the same id.
        """
        self._channels: dict[uuid.UUID, Any] = {}
        for channel in side_channels:
            if channel.channel_id in self._channels:
                raise UnityEnvironmentException(
                    f"There cannot be two side channels with the same channel id {channel.channel_id}."
                )
            self._channels[channel.channel_id] = channel

    def generate_side_channel_messages(self) -> bytearray:
        """Return all queued messages, packed, and empty the queues."""
        packed = bytearray()
        for channel_id, channel in self._channels.items():
            for message in channel.message_queue:
                packed += channel_id.bytes_le + struct.pack("<i", len(message)) + message
            channel.message_queue = []
        return packed

    def process_side_channel_message(self, data: bytes) -> None:
        """Hand out packed messages; one for an unknown channel is dropped with a warning.

        Raises:
            UnityEnvironmentException: the bytes end within a message.
        """
        offset = 0
        while offset < len(data):
            channel_id, message, offset = _unpack_one(data, offset)
            channel = self._channels.get(channel_id)
            if channel is None:
                logger.warning("Unknown side channel data received. Channel type: %s.", channel_id)
            else:
                channel.on_message_received(IncomingMessage(message))


def _unpack_one(data: bytes, offset: int) -> tuple[uuid.UUID, bytes, int]:
    if len(data) - offset < 20:
        raise UnityEnvironmentException(
            f"side channel data end {len(data) - offset} bytes into a message's head; let Unity and Python be of "
            "compatible versions"
        )
    channel_id = uuid.UUID(bytes_le=bytes(data[offset : offset + 16]))
    (size,) = struct.unpack_from("<i", data, offset + 16)
    begin = offset + 20
    if not 0 <= size <= len(data) - begin:
        raise UnityEnvironmentException(
            f"The message received by the side channel {channel_id} was unexpectedly short: {len(data) - begin} of {size} "
            "bytes; correct the env's side channel"
        )
    return channel_id, bytes(data[begin : begin + size]), begin + size
