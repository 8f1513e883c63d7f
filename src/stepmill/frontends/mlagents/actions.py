"""What policies decide, as what travels to a worker: arrays, or pairs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepmill.frontends.mlagents.steps import EnvironmentStep


def plain_actions(infos: Mapping[str, Any], last_step: EnvironmentStep) -> dict[str, Any]:
    """Return the actions of behaviours that have some, in the shape that `set_agent_actions` takes.

    Args:
        infos: by behaviour, as policies gave them.
        last_step: what they decided on: it tells the generations apart, which look for actions in different fields.
    """
    actions = {}
    for name, info in infos.items():
        is_pair = isinstance(last_step.current_all_step_result[name], tuple)
        action = _behaviors_action(info) if is_pair else info.action
        if action is not None and (isinstance(action, tuple) or len(action)):
            actions[name] = action
    return actions


def _behaviors_action(info: Any) -> Any:
    action = getattr(info, "env_action", info.action)
    if not len(info.agent_ids):
        return None
    if hasattr(action, "continuous") and hasattr(action, "discrete"):
        return action.continuous, action.discrete
    return action
