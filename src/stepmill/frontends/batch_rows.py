"""Rows of batches and actions, for the front-ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stepmill.spec.errors import StepmillError, UsageError
from stepmill.spec.options import EnvState
from stepmill.spec.tree import Leaf, Node, flatten, iter_tree, map_tree, unflatten

if TYPE_CHECKING:
    from stepmill.pool.pool import Pool


def view_row(node: Node, batch: Any, row: int = 0) -> Any:
    """Return one row of a batch, in the structure of the tree. Arrays are views of the batch's arrays."""
    return map_tree(lambda _, column: column[row], node, batch)


def select_rows(node: Node, actions: Any, rows: Sequence[int], num_rows: int) -> Any:
    """Return copies of some of `num_rows` actions, in the structure of the tree.

    Raises:
        UsageError: the actions do not have the structure of the tree, or their number is not `num_rows`.
    """

    def select(_: Node, column: Any) -> Any:
        if len(column) != num_rows:
            raise UsageError(f"got {len(column)} actions for {num_rows} envs; give one for each env")
        return column[list(rows)] if isinstance(column, np.ndarray) else [column[row] for row in rows]

    try:
        return map_tree(select, node, actions)
    except (KeyError, IndexError, TypeError) as exc:
        raise UsageError(
            f"the actions do not have the structure of the action space: {type(exc).__name__}: {exc}; "
            "give an element of action_space"
        ) from exc


def stack_rows(node: Node, values: Sequence[Any]) -> Any:
    """Return the values of one or more single envs as a batch.

    Raises:
        UsageError: a value does not have the structure of the tree.
    """
    rows = []
    for row, value in enumerate(values):
        try:
            rows.append(flatten(node, value))
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise UsageError(
                f"action {row} is {value!r}, which does not have the structure of the action space: "
                f"{type(exc).__name__}: {exc}; give a value with all its parts"
            ) from exc
    parts = [part for _, part in iter_tree(node)]
    columns = list(zip(parts, zip(*rows, strict=True), strict=True))
    arrays = [np.asarray(column) for part, column in columns if isinstance(part, Leaf)]
    return unflatten(node, arrays, [column for part, column in columns if not isinstance(part, Leaf)])


def send_living(pool: Pool, actions: Sequence[Any], env_ids: Sequence[int] | None = None) -> Sequence[int]:
    """Send a list of actions to envs, except to envs that turn out to be dead. Return the envs to which actions were sent.

    The next `receive` of the pool returns the faults of the others.
    """
    while True:
        try:
            pool.send(actions, env_ids)
            return range(pool.num_envs) if env_ids is None else env_ids
        except UsageError:
            raise
        except StepmillError:  # nothing was sent
            states = pool.states
            pairs = zip(range(pool.num_envs) if env_ids is None else env_ids, actions, strict=True)
            living = {env_id: action for env_id, action in pairs if states[env_id] is not EnvState.FAULTED}
            if not living:
                return ()
            actions, env_ids = list(living.values()), list(living)
