"""Unity envs that follow a script, of both generations of ML-Agents' API. They need no mlagents_envs.

A script says by behaviour which agents have news at each step, the first of them after a reset; the last one stays:

    {"walk": [[1, 2], [2], [2, 3]],       agent 1 ends its episode in the second step, agent 3 begins one in the third
     "fly": [None, [7], [7]]}             a behaviour that appears later

All numbers that an agent sees are its id; its reward is its id, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepmill.frontends.mlagents.messages import SideChannelManager
from stepmill.frontends.mlagents.specs import ActionSpec, AgentGroupSpec, BehaviorSpec, ObservationSpec
from stepmill.frontends.mlagents.steps import BatchedStepResult, DecisionSteps, TerminalSteps

Script = Mapping[str, Sequence["Sequence[int] | None"]]
Hook = Callable[[Any], None]
NUM_ACTIONS = 2
BRANCHES = (3, 2)


class _ScriptedEnv:
    """What both generations share.

    Args:
        script: which agents have news, by behaviour and step.
        shape: of the one observation that an agent has.
        side_channels: which are served: `sent` is what came for the env, `says` what it says at each step.
        hooks: by (phase, count from 1) what happens there; phases are "init", "reset", "step" and "close".
        says: by step, counted over all resets from 1, packed messages to the channels.
        interrupts: agents whose episode ends by a limit.
        is_discrete: whether actions are discrete, with a mask that forbids every agent the first choice.
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
        self.channels = SideChannelManager(side_channels)
        self.hooks = dict(hooks or {})
        self.says = dict(says or {})
        self.interrupts = set(interrupts)
        self.is_discrete = is_discrete
        self.counts = dict.fromkeys(("init", "reset", "step", "close"), 0)
        self.time = 0
        self.actions: dict[str, Any] = {}
        self.sent: list[bytes] = []
        self._pass("init")

    def _pass(self, phase: str) -> None:
        self.counts[phase] += 1
        hook = self.hooks.get((phase, self.counts[phase]))
        if hook is not None:
            hook(self)

    def reset(self) -> None:
        self.time = 0
        self._talk()
        self._pass("reset")

    def step(self) -> None:
        self.time += 1
        self._talk()
        self._pass("step")

    def close(self) -> None:
        self._pass("close")

    def _talk(self) -> None:
        self.sent.append(bytes(self.channels.generate_side_channel_messages()))
        self.channels.process_side_channel_message(self.says.get(self.counts["step"] + 1, b""))

    def _names(self) -> list[str]:
        return [name for name in self.script if self._agents_at(name, self.time) is not None]

    def _agents_at(self, name: str, time: int) -> list[int] | None:
        rows = self.script[name]
        agents = rows[min(time, len(rows) - 1)]
        return None if agents is None else list(agents)

    def _now(self, name: str) -> tuple[list[int], list[int]]:
        """Agents that decide, and agents that were there before and are not any more."""
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
