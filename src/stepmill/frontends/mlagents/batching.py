"""For policies that decide for several workers at once: their agents as one batch, and its decisions as theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepmill.frontends.mlagents.steps import ActionInfo, DecisionSteps


def join_steps(steps: Sequence[DecisionSteps]) -> DecisionSteps:
    """Return the agents of several workers as one batch, in the order of the workers.

    Args:
        steps: of one behaviour, one per worker, with A_w agents each.
    Returns:
        [sum of A_w, ...] in every array. Agents of different workers may have the same agent_id.
    """
    first = steps[0]
    masks = [each.action_mask for each in steps if len(each)]
    joined = None
    if masks and all(mask is not None for mask in masks):
        joined = [np.concatenate(branch) for branch in zip(*masks, strict=True)]
    return DecisionSteps(
        [np.concatenate([each.obs[leaf] for each in steps]) for leaf in range(len(first.obs))],
        np.concatenate([each.reward for each in steps]),
        np.concatenate([each.agent_id for each in steps]),
        joined,
        np.concatenate([each.group_id for each in steps]),
        np.concatenate([each.group_reward for each in steps]),
    )


def split_info(info: ActionInfo, steps: Sequence[DecisionSteps]) -> list[ActionInfo]:
    """Return decisions for a joined batch as one ActionInfo per worker.

    Args:
        info: whose action, env_action and outputs are arrays [sum of A_w, ...], ActionTuples of such, or dicts of them;
            what has another length, or none, goes to every worker as it is.
        steps: what was joined.
    """
    bounds = np.cumsum([0, *(len(each) for each in steps)]).tolist()
    return [
        ActionInfo(
            _part(info.action, begin, end, bounds[-1]),
            _part(info.env_action, begin, end, bounds[-1]),
            {name: _part(value, begin, end, bounds[-1]) for name, value in info.outputs.items()},
            list(each.agent_id),
        )
        for each, begin, end in zip(steps, bounds, bounds[1:], strict=False)
    ]


def _part(value: Any, begin: int, end: int, size: int) -> Any:
    if hasattr(value, "continuous") and hasattr(value, "discrete"):
        parts = (_part(value.continuous, begin, end, size), _part(value.discrete, begin, end, size))
        return type(value)(continuous=parts[0], discrete=parts[1])
    if isinstance(value, dict):
        return {name: _part(each, begin, end, size) for name, each in value.items()}
    has_rows = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str)
    return value[begin:end] if has_rows and len(value) == size else value
