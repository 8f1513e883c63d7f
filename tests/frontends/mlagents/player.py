"""A Unity player for tests: a program that speaks ML-Agents' protocol as a built game does, over gRPC.

UnityEnvironment starts it as its executable, `player.x86_64 --mlagents-port PORT …`. It has two behaviours: "walk" with two
agents, of which agent 1 ends its episode at every third step and agent 2 at none, and "see" with one that sees an image.

    --trouble die | hang | stop    at step --at N, once: only if the file --flag is not there yet
    --log FILE                     appends every side channel message it gets, as hex
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import grpc
from mlagents_envs.communicator_objects import command_pb2, unity_message_pb2, unity_to_external_pb2_grpc
from mlagents_envs.communicator_objects.agent_info_pb2 import AgentInfoProto
from mlagents_envs.communicator_objects.brain_parameters_pb2 import BrainParametersProto

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program

from tests.frontends.mlagents.protocol import FLOATS_ID, IMAGE, STATS_ID, UNKNOWN_ID

IS_OLD = not hasattr(BrainParametersProto(), "action_spec")


class Player:
    """The game: its state, and what it says of it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.time = 0
        self.num_steps = 0
        self.actions: list[float] = []

    def answer(self, rl_input: Any) -> Any:
        """Do a command, and return the message that tells of it."""
        self._log(rl_input.side_channel)
        if rl_input.command == command_pb2.RESET:
            self.time = 0
        else:
            self.time += 1
            self.num_steps += 1
            self._get_into_trouble()
        self.actions = [_first(action) for action in rl_input.agent_actions["walk"].value]
        message = unity_message_pb2.UnityMessageProto()
        message.header.status = 400 if self._is_in("stop") else 200
        output = message.unity_output
        for name in ("walk", "see"):
            output.rl_initialization_output.brain_parameters.add().CopyFrom(_brain(name))
        for name, agents in (("walk", [self._walker(1), self._walker(2)]), ("see", [self._seer()])):
            output.rl_output.agentInfos[name].value.extend(agents)
        output.rl_output.side_channel = self._say()
        return message

    def _walker(self, agent: int) -> AgentInfoProto:
        info = AgentInfoProto(id=agent, reward=float(agent), done=agent == 1 and self.time % 3 == 2)
        info.max_step_reached = info.done
        observation = info.observations.add(shape=[3], compression_type=0)
        # The observation shows the action that it got.
        observation.float_data.data.extend([agent, self.time, sum(self.actions)])
        return info

    def _seer(self) -> AgentInfoProto:
        info = AgentInfoProto(id=7, reward=0.5)
        observation = info.observations.add(shape=IMAGE, compression_type=0)
        observation.float_data.data.extend([self.time / 100] * (IMAGE[0] * IMAGE[1] * IMAGE[2]))
        return info

    def _say(self) -> bytes:
        stat = _string("speed") + struct.pack("<fi", self.time, 1)
        told = _string("wind") + struct.pack("<f", 0.5)
        return (
            _packed(STATS_ID, stat) + _packed(FLOATS_ID, told) + (_packed(UNKNOWN_ID, b"??") if self.time == 1 else b"")
        )

    def _is_in(self, trouble: str) -> bool:
        return self.arguments.trouble == trouble and self.num_steps == self.arguments.at

    def _get_into_trouble(self) -> None:
        if not self.arguments.trouble or self.num_steps != self.arguments.at:
            return
        if self.arguments.flag:
            if Path(self.arguments.flag).exists():
                self.arguments.trouble = ""
                return
            Path(self.arguments.flag).touch()
        if self.arguments.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.arguments.trouble == "hang":
            threading.Event().wait()

    def _log(self, data: bytes) -> None:
        if self.arguments.log and data:
            with Path(self.arguments.log).open("a") as log:
                log.write(data.hex() + "\n")


def _first(action: Any) -> float:
    return float((action.vector_actions if IS_OLD else action.continuous_actions)[0])


def _brain(name: str) -> BrainParametersProto:
    if IS_OLD:
        return BrainParametersProto(
            brain_name=name, is_training=True, vector_action_size=[2], vector_action_space_type=1
        )
    brain = BrainParametersProto(brain_name=name, is_training=True)
    brain.action_spec.num_continuous_actions = 2
    return brain


def _string(text: str) -> bytes:
    return struct.pack("<i", len(text)) + text.encode("ascii")


def _packed(channel_id: uuid.UUID, message: bytes) -> bytes:
    return channel_id.bytes_le + struct.pack("<i", len(message)) + message


def play(arguments: argparse.Namespace, make: type[Player] = Player) -> None:
    """Connect to the trainer and do what it says, until it or the connection ends."""
    with grpc.insecure_channel(f"localhost:{arguments.port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        trainer = unity_to_external_pb2_grpc.UnityToExternalProtoStub(channel)
        hello = unity_message_pb2.UnityMessageProto()
        hello.header.status = 200
        greeting = hello.unity_output.rl_initialization_output
        greeting.name = "player"
        greeting.communication_version = "0.15.0" if IS_OLD else "1.5.0"
        greeting.package_version = "0.0"
        if not IS_OLD:
            greeting.capabilities.baseRLCapabilities = True
        trainer.Exchange(hello)
        player = make(arguments)
        message = unity_message_pb2.UnityMessageProto()
        message.header.status = 200
        while True:
            order = trainer.Exchange(message)
            if order.header.status != 200:
                return
            message = player.answer(order.unity_input.rl_input)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlagents-port", dest="port", type=int)
    parser.add_argument("--trouble", default="")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--flag", default="")
    parser.add_argument("--log", default="")
    try:
        play(parser.parse_known_args()[0])
    except grpc.RpcError:
        pass  # the trainer is gone
