"""An env with ML-Agents' own classes, whose results are a function; only where mlagents is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mlagents_envs.base_env import (
    ActionSpec,
    BaseEnv,
    BehaviorSpec,
    DecisionSteps,
    DimensionProperty,
    ObservationSpec,
    ObservationType,
    TerminalSteps,
)


def spec(shapes: Any = ((3,),), num_continuous: int = 2, branches: tuple[int, ...] = ()) -> Any:
    """Return the spec of a behaviour."""
    parts = [
        ObservationSpec(shape, (DimensionProperty.NONE,) * len(shape), ObservationType.DEFAULT, f"obs{place}")
        for place, shape in enumerate(shapes)
    ]
    return BehaviorSpec(parts, ActionSpec(num_continuous, branches))


def decisions(ids: Sequence[int], obs: Any = None) -> Any:
    """Return the steps of agents that need a decision."""
    num = len(ids)
    groups = np.zeros(num, np.int32), np.zeros(num, np.float32)
    return DecisionSteps(obs or _obs(ids), np.array(ids, np.float32), np.array(ids, np.int32), None, *groups)


def ends(ids: Sequence[int], obs: Any = None, interrupted: Any = None) -> Any:
    """Return the steps of agents whose episode ended."""
    num = len(ids)
    flags = np.array([False] * num if interrupted is None else interrupted, np.bool_)
    groups = np.zeros(num, np.int32), np.zeros(num, np.float32)
    return TerminalSteps(obs or _obs(ids), np.array(ids, np.float32), flags, np.array(ids, np.int32), *groups)


def _obs(ids: Sequence[int]) -> list[Any]:
    return [np.tile(np.array(ids, np.float32)[:, None], (1, 3))]


def pair(env: Any, name: str) -> Any:
    """The results of two agents that never end."""
    return decisions([1, 2]), ends([])


class Real(BaseEnv):  # type: ignore[misc, unused-ignore]
    """An env of ML-Agents' class.

    Args:
        specs: the specs by behaviour, or a function of the number of steps since the reset, `t`.
        results: `results(env, behaviour)` returns what get_steps does.
        hooks: functions of the env, by the name of what calls them.
    """

    academy_capabilities = None

    def __init__(self, specs: Any, results: Any, hooks: Any = None) -> None:
        self.specs, self.results, self.hooks = specs, results, dict(hooks or {})
        self.t = 0
        self.got: list[Any] = []

    def _call_hook(self, name: str) -> None:
        self.hooks.get(name, lambda env: None)(self)

    @property
    def behavior_specs(self) -> Any:
        self._call_hook("specs")
        return self.specs(self.t) if callable(self.specs) else self.specs

    def get_steps(self, behavior_name: str) -> Any:
        self._call_hook("get_steps")
        return self.results(self, behavior_name)

    def step(self) -> None:
        self.t += 1
        self._call_hook("step")

    def reset(self) -> None:
        self.t = 0
        self._call_hook("reset")

    def close(self) -> None:
        self._call_hook("close")

    def set_actions(self, behavior_name: str, action: Any) -> None:
        self.got.append((behavior_name, action.continuous.tolist(), action.discrete.tolist()))
        self._call_hook("set_actions")

    def set_action_for_agent(self, *args: Any) -> None: ...


def real(specs: Any = None, results: Any = pair, hooks: Any = None) -> Callable[[int, Any], Real]:
    """Return a factory of such envs."""
    return lambda worker_id, channels: Real(specs or {"walk": spec()}, results, hooks)
