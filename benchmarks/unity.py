"""A Unity env and a policy that do nothing, to measure the managers of section 7."""

from __future__ import annotations

from typing import Any

import numpy as np

from stepmill.envs.unity import ActionTuple
from stepmill.frontends.mlagents.steps import ActionInfo, DecisionSteps, TerminalSteps

BEHAVIOR = "ball"


class NoopUnity:
    """An env with one agent, whose observation is always the same float32 image."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.behavior_specs = {BEHAVIOR: None}  # a spec, which managers only pass on
        ids = np.zeros(1, np.int32)
        decision = DecisionSteps([np.zeros((1, *shape), np.float32)], np.ones(1, np.float32), ids)
        no_agents = TerminalSteps(
            [np.zeros((0, *shape), np.float32)], np.zeros(0, np.float32), np.zeros(0, bool), ids[:0]
        )
        self._steps = decision, no_agents

    def reset(self) -> None:
        pass

    def step(self) -> None:
        pass

    def close(self) -> None:
        pass

    def get_steps(self, name: str) -> tuple[DecisionSteps, TerminalSteps]:
        return self._steps

    def set_actions(self, name: str, action: Any) -> None:
        pass


class NoopPolicy:
    """Gives every agent the same action."""

    def __init__(self) -> None:
        self._action = ActionTuple(np.zeros((1, 2), np.float32))

    def get_action(self, steps: Any, worker_id: int) -> ActionInfo:
        return ActionInfo(self._action, self._action, {}, steps.agent_id)
