"""Unity envs that follow a script, for both generations of ML-Agents' API. They do not need mlagents_envs.

For each behaviour a script lists the agents that need a decision after the reset and after each step. The last entry repeats:

    {"walk": [[1, 2], [2], [2, 3]],       agent 1 ends its episode in the first step, agent 3 begins one in the second
     "fly": [None, [7], [7]]}             a behaviour that appears later

Every number in an agent's observation is its id, and so is its reward.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepmill.frontends.mlagents.channels import IncomingMessage
from stepmill.frontends.mlagents.steps import BatchedStepResult, DecisionSteps, TerminalSteps

Script = Mapping[str, Sequence["Sequence[int] | None"]]
Hook = Callable[[Any], None]
NUM_ACTIONS = 2
BRANCHES = (3, 2)


class ActionSpec(NamedTuple):
    """As in mlagents-envs 0.28."""

    continuous_size: int
    discrete_branches: tuple[int, ...]


class ObservationSpec(NamedTuple):
    """As in mlagents-envs 0.28, which has more fields."""

    shape: tuple[int, ...]


class BehaviorSpec(NamedTuple):
    """As in mlagents-envs 0.28."""

    observation_specs: list[ObservationSpec]
    action_spec: ActionSpec


class AgentGroupSpec(NamedTuple):
    """As in mlagents-envs 0.15, whose action_type is an enum."""

    observation_shapes: list[tuple[int, ...]]
    action_type: int
    action_shape: Any

    def is_action_discrete(self) -> bool:
        return self.action_type == 0

    @property
    def discrete_action_branches(self) -> Any:
        return self.action_shape if self.is_action_discrete() else None

    @property
    def action_size(self) -> int:
        return len(self.action_shape) if self.is_action_discrete() else int(self.action_shape)


def pack_message(channel_id: uuid.UUID, message: bytes) -> bytes:
    """Return a message of a channel as it is sent to or from an env."""
    return channel_id.bytes_le + struct.pack("<i", len(message)) + message


class _ScriptedEnv:
    """The base of the envs of both generations.

    Args:
        script: the agents that need a decision, by behaviour and step.
        shape: the shape of the one observation of each agent.
        side_channels: the channels that the env serves. Messages to the env are recorded in `sent`.
        hooks: functions to call, by (phase, count from 1). Phases are "init", "reset", "step" and "close".
        says: packed messages of the env to the channels, by step. Steps are counted from 1, over all resets.
        interrupts: agents whose episodes end because of a limit.
        is_discrete: whether actions are discrete, with a mask that forbids the first choice to every agent.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        shape: tuple[int, ...] = (3,),
        side_channels: Sequence[Any] = (),
        hooks: Mapping[tuple[str, int], Hook] | None = None,
        says: Mapping[int, bytes] | None = None,
        interrupts: Sequence[int] = (),
        is_discrete: bool = False,
    ) -> None:
        self.script = dict(script or {"walk": [[1]]})
        self.shape = shape
        self.channels = {channel.channel_id: channel for channel in side_channels}
        self.hooks = dict(hooks or {})
        self.says = dict(says or {})
        self.interrupts = set(interrupts)
        self.is_discrete = is_discrete
        self.counts = dict.fromkeys(("init", "reset", "step", "close"), 0)
        self.time = 0
        self.actions: dict[str, Any] = {}
        self.sent: list[bytes] = []
        self._enter_phase("init")

    def _enter_phase(self, phase: str) -> None:
        self.counts[phase] += 1
        hook = self.hooks.get((phase, self.counts[phase]))
        if hook is not None:
            hook(self)

    def reset(self) -> None:
        self.time = 0
        self._exchange_messages()
        self._enter_phase("reset")

    def step(self) -> None:
        self.time += 1
        self._exchange_messages()
        self._enter_phase("step")

    def close(self) -> None:
        self._enter_phase("close")

    def _exchange_messages(self) -> None:
        sent = b""
        for channel in self.channels.values():
            sent += b"".join(pack_message(channel.channel_id, each) for each in channel.message_queue)
            channel.message_queue = []
        self.sent.append(sent)
        said = self.says.get(self.counts["step"] + 1, b"")
        while said:
            channel_id, (size,) = uuid.UUID(bytes_le=said[:16]), struct.unpack_from("<i", said, 16)
            if channel_id in self.channels:
                self.channels[channel_id].on_message_received(IncomingMessage(said[20 : 20 + size]))
            said = said[20 + size :]

    def _names(self) -> list[str]:
        return [name for name in self.script if self._agents_at(name, self.time) is not None]

    def _agents_at(self, name: str, time: int) -> list[int] | None:
        rows = self.script[name]
        agents = rows[min(time, len(rows) - 1)]
        return None if agents is None else list(agents)

    def _now(self, name: str) -> tuple[list[int], list[int]]:
        """Return the agents that need a decision, and the agents whose episode just ended."""
        now = self._agents_at(name, self.time) or []
        before = (self._agents_at(name, self.time - 1) if self.time else None) or []
        return now, [agent for agent in before if agent not in now]

    def _obs(self, agents: Sequence[int]) -> list[Any]:
        ids = np.array(agents, np.float32).reshape(-1, *(1,) * len(self.shape))
        return [np.ascontiguousarray(np.broadcast_to(ids, (len(agents), *self.shape)))]

    def _mask(self, num_agents: int) -> list[Any] | None:
        if not self.is_discrete:
            return None
        masks = [np.zeros((num_agents, size), np.bool_) for size in BRANCHES]
        masks[0][:, 0] = True
        return masks


class ScriptedBehaviors(_ScriptedEnv):
    """An env of the second generation: mlagents-envs 0.28."""

    @property
    def behavior_specs(self) -> dict[str, BehaviorSpec]:
        action = ActionSpec(0, BRANCHES) if self.is_discrete else ActionSpec(NUM_ACTIONS, ())
        return {name: BehaviorSpec([ObservationSpec(self.shape)], action) for name in self._names()}

    def get_steps(self, name: str) -> tuple[DecisionSteps, TerminalSteps]:
        now, gone = self._now(name)
        decision = DecisionSteps(
            self._obs(now),
            np.array(now, np.float32),
            np.array(now, np.int32),
            self._mask(len(now)),
            [agent % 2 for agent in now],
        )
        interrupted = np.array([agent in self.interrupts for agent in gone], np.bool_)
        return decision, TerminalSteps(
            self._obs(gone),
            np.array(gone, np.float32),
            interrupted,
            np.array(gone, np.int32),
            [agent % 2 for agent in gone],
        )

    def set_actions(self, name: str, action: Any) -> None:
        self.actions[name] = (action.continuous.tolist(), action.discrete.tolist())


class ScriptedGroups(_ScriptedEnv):
    """An env of the first generation: mlagents-envs 0.15."""

    def get_agent_groups(self) -> list[str]:
        return self._names()

    def get_agent_group_spec(self, name: str) -> AgentGroupSpec:
        return AgentGroupSpec([self.shape], *((0, BRANCHES) if self.is_discrete else (1, NUM_ACTIONS)))

    def get_step_result(self, name: str) -> BatchedStepResult:
        now, gone = self._now(name)
        agents = now + gone
        return BatchedStepResult(
            self._obs(agents),
            np.array(agents, np.float32),
            np.array([agent in gone for agent in agents], np.bool_),
            np.array([agent in gone and agent in self.interrupts for agent in agents], np.bool_),
            np.array(agents, np.int32),
            self._mask(len(agents)),
        )

    def set_actions(self, name: str, action: Any) -> None:
        self.actions[name] = np.asarray(action).tolist()
