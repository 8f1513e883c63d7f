"""Side channels: messages to the env, sent with its next step or reset, and messages from the env.

`UnityEnvironment` of mlagents_envs uses three attributes of a channel: `channel_id`, `message_queue` and
`on_message_received`. These classes have them. If mlagents_envs is installed, workers use its channels instead, because
the bytes of one of them depend on its version. These are for programs without mlagents_envs, which is optional, and for channels of
users that work with both of its generations.

A message is its values one after the other, little-endian; a string is an int32 length and ASCII.
"""

from __future__ import annotations

import logging
import struct
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeVar

from stepmill.frontends.mlagents.failures import UnityCommunicationException, UnitySideChannelException, load

logger = logging.getLogger("stepmill.mlagents")
Value = TypeVar("Value")


class IncomingMessage:
    """A message from the env. Values are read in the order in which they were written."""

    def __init__(self, buffer: bytes, offset: int = 0) -> None:
        self.buffer = buffer
        self.offset = offset

    def _read(self, form: str, default: Value) -> Value:
        if self.offset >= len(self.buffer):
            return default
        value: Value = struct.unpack_from(form, self.buffer, self.offset)[0]
        self.offset += struct.calcsize(form)
        return value

    def read_bool(self, default_value: bool = False) -> bool:
        """Return the next bool, or the default at the end of the message."""
        return self._read("<?", default_value)

    def read_int32(self, default_value: int = 0) -> int:
        """Return the next int, or the default at the end of the message."""
        return self._read("<i", default_value)

    def read_float32(self, default_value: float = 0.0) -> float:
        """Return the next float, or the default at the end of the message."""
        return self._read("<f", default_value)

    def read_float32_list(self, default_value: list[float] | None = None) -> list[float]:
        """Return the next list of floats. At the end of the message, return the default or an empty list."""
        if self.offset >= len(self.buffer):
            return [] if default_value is None else default_value
        return [self.read_float32() for _ in range(self.read_int32())]

    def read_string(self, default_value: str = "") -> str:
        """Return the next string, or the default at the end of the message."""
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
    """A message to the env. Values are appended one by one."""

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
        """Replace the message with these bytes."""
        if self.buffer:
            logger.warning("set_raw_bytes replaces %d bytes that were written before", len(self.buffer))
        self.buffer = bytearray(buffer)


class SideChannel(ABC):
    """A channel to and from the env. Its UUID identifies it."""

    def __init__(self, channel_id: uuid.UUID) -> None:
        self._channel_id = channel_id
        self.message_queue: list[bytearray] = []

    @property
    def channel_id(self) -> uuid.UUID:
        """The channel's UUID, which is unique in an env."""
        return self._channel_id

    def queue_message_to_send(self, msg: Any) -> None:
        """Queue a message for the next step or reset."""
        self.message_queue.append(msg.buffer)

    def _queue_values(self, *values: str | float) -> None:
        """Queue a message of strings, ints and floats. A list of floats is written as its length and its values."""
        message = OutgoingMessage()
        for value in values:
            if isinstance(value, str):
                message.write_string(value)
            elif isinstance(value, int):
                message.write_int32(value)
            else:
                message.write_float32(value)
        self.queue_message_to_send(message)

    @abstractmethod
    def on_message_received(self, msg: Any) -> None:
        """Process one message from the env. This is called once per message."""


class _OutwardChannel(SideChannel):
    """A channel on which the env sends nothing."""

    def on_message_received(self, msg: Any) -> None:
        raise UnityCommunicationException(
            f"The {type(self).__name__} received a message from Unity, this should not have happened."
        )


class FloatPropertiesChannel(SideChannel):
    """Floats by name, which the learner and the env may set."""

    def __init__(self, channel_id: uuid.UUID | None = None) -> None:
        super().__init__(channel_id or uuid.UUID("60ccf7d0-4f7e-11ea-b238-784f4387d1f7"))
        self._values: dict[str, float] = {}

    def on_message_received(self, msg: Any) -> None:
        """Store a property that the env has set."""
        name = msg.read_string()
        self._values[name] = msg.read_float32()

    def set_property(self, key: str, value: float) -> None:
        """Set a property here at once, and in the env at its next step or reset."""
        self._values[key] = value
        self._queue_values(key, float(value))

    def get_property(self, key: str) -> float | None:
        """Return a property, or None if it was not set."""
        return self._values.get(key)

    def list_properties(self) -> list[str]:
        """Return the names of all properties."""
        return list(self._values)

    def get_property_dict_copy(self) -> dict[str, float]:
        """Return a copy of all properties."""
        return dict(self._values)


class EngineConfig(NamedTuple):
    """Settings of the engine. None leaves a setting unchanged. The first generation lacks capture_frame_rate."""

    width: int | None = 80
    height: int | None = 80
    quality_level: int | None = 1
    time_scale: float | None = 20.0
    target_frame_rate: int | None = -1
    capture_frame_rate: int | None = 60

    @staticmethod
    def default_config() -> EngineConfig:
        """Return the defaults."""
        return EngineConfig()


class EngineConfigurationChannel(_OutwardChannel):
    """Sends the window's size, quality, speed and frame rates."""

    class ConfigurationType(IntEnum):
        """The setting that a message changes."""

        SCREEN_RESOLUTION = 0
        QUALITY_LEVEL = 1
        TIME_SCALE = 2
        TARGET_FRAME_RATE = 3
        CAPTURE_FRAME_RATE = 4

    def __init__(self) -> None:
        super().__init__(uuid.UUID("e951342c-4f7e-11ea-b238-784f4387d1f7"))

    def set_configuration_parameters(
        self,
        width: int | None = None,
        height: int | None = None,
        quality_level: int | None = None,
        time_scale: float | None = None,
        target_frame_rate: int | None = None,
        capture_frame_rate: int | None = None,
    ) -> None:
        """Queue the settings that are not None.

        Raises:
            UnitySideChannelException: a width without a height, or the other way round.
        """
        check_resolution(width, height)
        if width is not None and height is not None:
            self._queue_values(self.ConfigurationType.SCREEN_RESOLUTION, int(width), int(height))
        others = quality_level, time_scale, target_frame_rate, capture_frame_rate
        for kind, value in zip(list(self.ConfigurationType)[1:], others, strict=True):
            if value is not None:
                is_float = kind is self.ConfigurationType.TIME_SCALE
                self._queue_values(kind, float(value) if is_float else int(value))

    def set_configuration(self, config: Any) -> None:
        """Queue an EngineConfig."""
        self.set_configuration_parameters(**config._asdict())


def check_resolution(width: int | None, height: int | None) -> None:
    """Raise UnitySideChannelException if only one of width and height is given."""
    if (width is None) is not (height is None):
        raise UnitySideChannelException(
            f"You cannot set the width/height of the screen resolution without also setting the height/width: "
            f"width={width}, height={height}"
        )


class EnvironmentParametersChannel(_OutwardChannel):
    """Sends parameters of the env: constants, or samplers from which the env draws values."""

    class EnvironmentDataTypes(IntEnum):
        """The kind of a parameter."""

        FLOAT = 0
        SAMPLER = 1

    class SamplerTypes(IntEnum):
        """The distribution of a sampler."""

        UNIFORM = 0
        GAUSSIAN = 1
        MULTIRANGEUNIFORM = 2

    def __init__(self) -> None:
        super().__init__(uuid.UUID("534c891e-810f-11ea-a9d0-822485860400"))

    def set_float_parameter(self, key: str, value: float) -> None:
        """Queue a constant."""
        self._queue_values(key, self.EnvironmentDataTypes.FLOAT, float(value))

    def set_uniform_sampler_parameters(self, key: str, min_value: float, max_value: float, seed: int) -> None:
        """Queue a sampler with a uniform distribution over a range."""
        self._queue_sampler(key, seed, self.SamplerTypes.UNIFORM, float(min_value), float(max_value))

    def set_gaussian_sampler_parameters(self, key: str, mean: float, st_dev: float, seed: int) -> None:
        """Queue a sampler with a normal distribution."""
        self._queue_sampler(key, seed, self.SamplerTypes.GAUSSIAN, float(mean), float(st_dev))

    def set_multirangeuniform_sampler_parameters(
        self, key: str, intervals: Sequence[tuple[float, float]], seed: int
    ) -> None:
        """Queue a sampler with a uniform distribution over several ranges."""
        bounds = [float(bound) for interval in intervals for bound in interval]
        self._queue_sampler(key, seed, self.SamplerTypes.MULTIRANGEUNIFORM, len(bounds), *bounds)

    def _queue_sampler(self, key: str, seed: int, kind: SamplerTypes, *values: float) -> None:
        self._queue_values(key, self.EnvironmentDataTypes.SAMPLER, int(seed), kind, *values)


class StatsAggregationMethod(Enum):
    """How several values of a name are aggregated."""

    AVERAGE = 0  #: The mean of all values.
    MOST_RECENT = 1  #: The last value.
    SUM = 2  #: The sum of all values.
    HISTOGRAM = 3  #: All values are kept.


class StatsSideChannel(SideChannel):
    """Receives numbers that the env reports."""

    def __init__(self) -> None:
        super().__init__(uuid.UUID("a1d8f7b7-cec8-50f9-b78b-d3e165a78520"))
        self.stats: defaultdict[str, list[tuple[float, Any]]] = defaultdict(list)

    def on_message_received(self, msg: Any) -> None:
        """Store a value and its aggregation method."""
        name, value = msg.read_string(), msg.read_float32()
        self.stats[name].append((value, StatsAggregationMethod(msg.read_int32())))

    def get_and_reset_stats(self) -> Mapping[str, list[tuple[float, Any]]]:
        """Return and clear the values that were received since the last call."""
        stats, self.stats = self.stats, defaultdict(list)
        return stats


def aggregate_stats(stats: Mapping[str, Sequence[tuple[float, Any]]]) -> dict[str, Any]:
    """Return one value per name: the mean, the newest or the sum, as the env chose, or the list of a histogram's values.

    Args:
        stats: `environment_stats` of a step, or values of many steps under the same names, oldest first.
    """
    return {name: _aggregate(values) for name, values in stats.items() if values}


def _aggregate(pairs: Sequence[tuple[float, Any]]) -> float | list[float]:
    values = [value for value, _ in pairs]
    method = StatsAggregationMethod(getattr(pairs[-1][1], "value", pairs[-1][1]))
    if method is StatsAggregationMethod.AVERAGE:
        return sum(values) / len(values)
    if method is StatsAggregationMethod.SUM:
        return sum(values)
    return values if method is StatsAggregationMethod.HISTOGRAM else values[-1]


def with_methods(stats: Mapping[str, Sequence[tuple[float, int]]]) -> defaultdict[str, list[tuple[float, Any]]]:
    """Return statistics with aggregation methods in place of their numbers. The methods are mlagents_envs' if installed."""
    methods: Any = load("side_channel.stats_side_channel", "StatsAggregationMethod") or StatsAggregationMethod
    named = {name: [(value, methods(number)) for value, number in values] for name, values in stats.items()}
    return defaultdict(list, named)


class RawBytesChannel(SideChannel):
    """Sends and receives bytes."""

    def __init__(self, channel_id: uuid.UUID) -> None:
        super().__init__(channel_id)
        self._received: list[bytes] = []

    def on_message_received(self, msg: Any) -> None:
        """Store a message."""
        self._received.append(msg.get_raw_bytes())

    def get_and_clear_received_messages(self) -> list[bytes]:
        """Return and clear the messages that were received since the last call."""
        received, self._received = self._received, []
        return received

    def send_raw_data(self, data: bytes | bytearray) -> None:
        """Queue bytes."""
        message = OutgoingMessage()
        message.set_raw_bytes(data)
        self.queue_message_to_send(message)
