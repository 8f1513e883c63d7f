"""A Unity player with a task to learn: agents observe which of two actions is right, and get a reward of 1 for it.

UnityEnvironment starts it as its executable. Episodes have ten steps: a random policy's return is 5, the best is 10.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import grpc
from mlagents_envs.communicator_objects import unity_message_pb2
from mlagents_envs.communicator_objects.agent_info_pb2 import AgentInfoProto
from mlagents_envs.communicator_objects.brain_parameters_pb2 import BrainParametersProto

sys.path.insert(0, str(Path(__file__).parents[3]))  # it is run as a program

from tests.frontends.mlagents.player import Player, play

BEHAVIOR = "choose"
NUM_AGENTS = 8
EPISODE = 10


class Game(Player):
    """The state of the game: the right action and the age of each agent, and the agents that need a decision."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.random = random.Random(arguments.port)
        self.right = dict.fromkeys(range(NUM_AGENTS), 0)
        self.age = dict.fromkeys(range(NUM_AGENTS), 0)
        self.deciding: list[int] = []

    def answer(self, rl_input: Any) -> Any:
        """Apply the actions of a command, and return the message with all agents."""
        rewards = dict.fromkeys(range(NUM_AGENTS), 0.0)
        actions = rl_input.agent_actions[BEHAVIOR].value
        for agent, action in zip(self.deciding, actions, strict=False):
            rewards[agent] = float(action.discrete_actions[0] == self.right[agent])
            self.age[agent] += 1
        message = unity_message_pb2.UnityMessageProto()
        message.header.status = 200
        output = message.unity_output
        output.rl_initialization_output.brain_parameters.append(describe_behavior())
        self.deciding = []
        for agent in range(NUM_AGENTS):
            output.rl_output.agentInfos[BEHAVIOR].value.append(self._describe_agent(agent, rewards[agent]))
        return message

    def _describe_agent(self, agent: int, reward: float) -> AgentInfoProto:
        is_over = self.age[agent] == EPISODE
        if is_over:
            self.age[agent] = 0
        else:
            self.deciding.append(agent)
        self.right[agent] = self.random.randrange(2)
        info = AgentInfoProto(id=agent, reward=reward, done=is_over)
        observation = info.observations.add(shape=[2], compression_type=0)
        observation.float_data.data.extend([float(self.right[agent]), 1.0 - self.right[agent]])
        return info


def describe_behavior() -> BrainParametersProto:
    """Return the trainer's description of the behaviour."""
    brain = BrainParametersProto(brain_name=BEHAVIOR, is_training=True)
    brain.action_spec.num_discrete_actions = 1
    brain.action_spec.discrete_branch_sizes.append(2)
    return brain


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlagents-port", dest="port", type=int)
    try:
        play(parser.parse_known_args()[0], Game)
    except grpc.RpcError:
        pass  # the trainer has ended
