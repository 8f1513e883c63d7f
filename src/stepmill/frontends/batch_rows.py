"""Rows of batches and actions, for the front-ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stepmill.pool.port import rows_of
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import Leaf, Node, flatten, iter_tree, map_tree, unflatten


def view_row(node: Node, batch: Any, row: int = 0) -> Any:
    """Return one row of a batch, in the structure of the tree. Arrays are views of the batch's arrays."""
    return map_tree(lambda _, column: column[row], node, batch)


def infos_and_finals(
    info: Mapping[str, Any], rows: Sequence[int] | None = None
) -> tuple[dict[int, Mapping[Any, Any]], dict[int, tuple[Any, Mapping[Any, Any]]]]:
    """Return the newest info of each row, and of rows whose episode ended (SAME_STEP) its last observation and info; see `rows_of`."""
    infos: dict[int, Mapping[Any, Any]] = {}
    finals: dict[int, tuple[Any, Mapping[Any, Any]]] = {}
    for row, own in rows_of(info, rows):
        if "final_obs" in own:
            finals[row] = own["final_obs"], own.get("final_info") or {}
        else:
            infos[row] = own
    return infos, finals


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
