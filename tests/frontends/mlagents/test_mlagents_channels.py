"""Side channels: their bytes, and their way between a manager and its envs."""

from __future__ import annotations

import importlib.util
import struct
import uuid
from typing import Any

import pytest

from stepmill.frontends.mlagents import (
    EngineConfig,
    EngineConfigurationChannel,
    EnvironmentParametersChannel,
    FloatPropertiesChannel,
    GaussianSettings,
    IncomingMessage,
    MultiRangeUniformSettings,
    OutgoingMessage,
    RawBytesChannel,
    RestartLimits,
    StatsAggregationMethod,
    StatsSideChannel,
    UniformSettings,
    UnityCommunicationException,
    UnitySideChannelException,
    aggregate_stats,
)
from stepmill.frontends.mlagents.settings import ConstantSettings
from tests.frontends.mlagents.parts import WALK, walking
from tests.harness.unity_envs import ScriptedBehaviors, pack_message

OWN_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def text(value: str) -> bytes:
    return struct.pack("<i", len(value)) + value.encode("ascii")


def messages_of(channel: Any) -> list[bytes]:
    return [bytes(message) for message in channel.message_queue]


# ---- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.covers("U-8")
def test_values_are_read_in_the_order_in_which_they_were_written():
    out = OutgoingMessage()
    out.write_bool(True)
    out.write_int32(-5)
    out.write_float32(1.5)
    out.write_float32_list([0.5, 2.0])
    out.write_string("name")

    message = IncomingMessage(bytes(out.buffer))
    read = (message.read_bool(), message.read_int32(), message.read_float32(), message.read_float32_list())
    assert read == (True, -5, 1.5, [0.5, 2.0])
    assert message.read_string() == "name"
    ends = (message.read_bool(True), message.read_int32(7), message.read_float32(0.5), message.read_string("end"))
    assert ends == (True, 7, 0.5, "end")
    assert message.read_float32_list() == []


@pytest.mark.covers("U-2")
def test_engine_settings_are_one_message_each_and_the_defaults_are_the_originals():
    channel = EngineConfigurationChannel()
    channel.set_configuration(EngineConfig.default_config())
    assert messages_of(channel) == [
        struct.pack("<iii", 0, 80, 80),
        struct.pack("<ii", 1, 1),
        struct.pack("<if", 2, 20.0),
        struct.pack("<ii", 3, -1),
        struct.pack("<ii", 4, 60),
    ]


@pytest.mark.covers("U-2")
@pytest.mark.parametrize("half", [{"width": 80}, {"height": 80}])
def test_half_a_resolution_is_refused(half, manager_of):
    with pytest.raises(UnitySideChannelException, match="without also setting"):
        EngineConfigurationChannel().set_configuration_parameters(**half)
    config = EngineConfig(width=None, height=None)._replace(**half)
    with pytest.raises(UnitySideChannelException, match="without also setting"):
        manager_of(walking(ScriptedBehaviors), 1, config)


@pytest.mark.covers("U-7", "U-8")
def test_parameters_are_constants_or_samplers_with_a_seed():
    channel = EnvironmentParametersChannel()
    settings: list[Any] = [
        ConstantSettings(2.0),
        UniformSettings(0.5, 1.0, seed=3),
        GaussianSettings(1.0, 0.25, seed=4),
        MultiRangeUniformSettings([(0.0, 1.0), (2.0, 3.0)], seed=5),
    ]
    for each in settings:
        each.apply("mass", channel)
    assert messages_of(channel) == [
        text("mass") + struct.pack("<if", 0, 2.0),
        text("mass") + struct.pack("<iiiff", 1, 3, 0, 0.5, 1.0),
        text("mass") + struct.pack("<iiiff", 1, 4, 1, 1.0, 0.25),
        text("mass") + struct.pack("<iiiiffff", 1, 5, 2, 4, 0.0, 1.0, 2.0, 3.0),
    ]


@pytest.mark.covers("U-8")
def test_channels_on_which_the_env_has_nothing_to_say_refuse_its_messages():
    for channel in (EngineConfigurationChannel(), EnvironmentParametersChannel()):
        with pytest.raises(UnityCommunicationException, match="should not have happened"):
            channel.on_message_received(IncomingMessage(b""))


@pytest.mark.covers("U-8")
def test_float_properties_are_set_by_both_sides():
    channel = FloatPropertiesChannel()
    channel.set_property("gravity", 9.5)
    channel.on_message_received(IncomingMessage(text("wind") + struct.pack("<f", 0.5)))

    assert messages_of(channel) == [text("gravity") + struct.pack("<f", 9.5)]
    assert channel.get_property("wind") == 0.5
    assert channel.get_property("rain") is None
    assert channel.list_properties() == ["gravity", "wind"]
    copied = channel.get_property_dict_copy()
    copied.clear()
    assert channel.get_property_dict_copy() == {"gravity": 9.5, "wind": 0.5}


@pytest.mark.covers("U-8")
def test_raw_bytes_are_sent_as_they_are_and_received_once():
    channel = RawBytesChannel(OWN_ID)
    channel.send_raw_data(b"abc")
    channel.send_raw_data(b"")
    assert messages_of(channel) == [b"abc", b""]
    for message in messages_of(channel):
        channel.on_message_received(IncomingMessage(message))
    assert channel.get_and_clear_received_messages() == [b"abc", b""]
    assert channel.get_and_clear_received_messages() == []


@pytest.mark.covers("U-8")
def test_stats_are_taken_once_and_aggregated_as_the_env_asks():
    channel = StatsSideChannel()
    for value, method in ((1.0, 0), (2.0, 0)):
        channel.on_message_received(IncomingMessage(text("mean") + struct.pack("<fi", value, method)))
    for name, method in (("newest", 1), ("sum", 2), ("all", 3)):
        for value in (3.0, 4.0):
            channel.on_message_received(IncomingMessage(text(name) + struct.pack("<fi", value, method)))

    stats = channel.get_and_reset_stats()
    assert channel.get_and_reset_stats() == {}
    assert stats["mean"] == [(1.0, StatsAggregationMethod.AVERAGE), (2.0, StatsAggregationMethod.AVERAGE)]
    assert aggregate_stats(stats) == {"mean": 1.5, "newest": 4.0, "sum": 7.0, "all": [3.0, 4.0]}


# ---- between a manager and its envs ---------------------------------------------------------------------------------------


@pytest.mark.covers("U-2")
def test_the_engine_is_configured_before_the_env_is_made(manager_of, script):
    def factory(worker_id, channels):
        env = script(WALK, side_channels=channels)
        env.queued = [len(channel.message_queue) for channel in channels]
        return env

    manager = manager_of(factory, 1, EngineConfig(time_scale=7.0, capture_frame_rate=None))
    assert sum(manager._pool.get_attr("queued")[0]) == 4
    manager.reset()
    (sent,) = manager._pool.get_attr("sent")[0]
    assert struct.pack("<f", 7.0) in sent
    assert EngineConfigurationChannel().channel_id.bytes_le in sent


class RunOptions:
    """As ML-Agents' trainers have them."""

    class engine_settings:  # noqa: N801 - an attribute of theirs
        width, height, quality_level, time_scale, target_frame_rate, capture_frame_rate = 10, 20, 3, 4.0, 5, 6

    class env_settings:  # noqa: N801
        max_lifetime_restarts, restarts_rate_limit_n, restarts_rate_limit_period_s = 3, 2, 7


@pytest.mark.covers("U-1/processes", "U-2", "U-14")
def test_run_options_are_read_for_engine_settings_and_quotas(started_of):
    manager = started_of(walking(ScriptedBehaviors), 1, RunOptions())
    assert struct.pack("<iii", 0, 10, 20) in manager._pool.get_attr("sent")[0][0]
    limits = manager._driver.quota.limits
    assert limits == RestartLimits(3, 2, 7)


@pytest.mark.covers("U-7")
def test_samplers_and_numbers_are_sent_with_the_next_step_and_never_twice(started_of):
    manager = started_of(walking(ScriptedBehaviors), 2, is_deterministic=True)
    manager.set_env_parameters({"mass": UniformSettings(1.0, 2.0, seed=3), "size": 2.0})
    manager.get_steps()
    manager.get_steps()

    for sent in manager._pool.get_attr("sent"):
        assert [b"mass" in each for each in sent] == [False, True, False]
        assert struct.pack("<iiiff", 1, 3, 0, 1.0, 2.0) in sent[1]
    assert manager.get_properties == {"size": 2.0}


@pytest.mark.covers("U-8")
def test_what_the_env_says_is_in_its_step_and_in_the_properties(started_of, script):
    stat = pack_message(StatsSideChannel().channel_id, text("speed") + struct.pack("<fi", 1.5, 2))
    told = pack_message(FloatPropertiesChannel().channel_id, text("wind") + struct.pack("<f", 0.5))
    manager = started_of(walking(script, says={2: stat + stat, 3: told}))
    first, second, third = (manager.get_steps()[0].environment_stats for _ in range(3))

    assert (first, third) == ({}, {})
    assert [(value, method.name) for value, method in second["speed"]] == [(1.5, "SUM")] * 2
    assert manager.get_properties == {"wind": 0.5}


@pytest.mark.covers("U-1/channels", "U-19/channels")
@pytest.mark.skipif(importlib.util.find_spec("mlagents_envs") is not None, reason="for a program without mlagents_envs")
def test_without_mlagents_envs_a_factory_gets_the_channels_of_both_generations(manager_of, script, tmp_path):
    def factory(worker_id, side_channels):
        (tmp_path / "names").write_text(" ".join(type(each).__name__ for each in side_channels))
        return script(WALK, side_channels=side_channels)

    manager_of(factory)
    names = ["EnvironmentParametersChannel", "EngineConfigurationChannel", "StatsSideChannel", "FloatPropertiesChannel"]
    assert (tmp_path / "names").read_text().split() == names


@pytest.mark.covers("U-8")
def test_channels_of_ones_own_are_made_in_the_workers_and_can_be_called(manager_of, script):
    says = {1: pack_message(OWN_ID, b"hello")}
    manager = manager_of(walking(script, says=says), 2, channel_factory=lambda worker_id: [RawBytesChannel(OWN_ID)])
    manager.call_channel(OWN_ID, "send_raw_data", b"question", worker_ids=[1])
    manager.reset()

    assert [b"question" in sent[0] for sent in manager._pool.get_attr("sent")] == [False, True]
    assert manager.call_channel("RawBytesChannel", "get_and_clear_received_messages") == ([b"hello"],) * 2
