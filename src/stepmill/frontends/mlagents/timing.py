"""Timer trees: the workers', those of mlagents_envs within them, and the learner's own as one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from stepmill import timers
from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError

LIBRARY = "mlagents_envs"


def timer_tree(pool: Pool) -> dict[str, Any]:
    """Return the timers of a pool, with the trees of mlagents_envs in its workers added up beside the engine's."""
    tree: dict[str, Any] = pool.timers()
    libraries = _ask_libraries(pool, range(pool.num_envs), None)
    if libraries:
        node = timers.merge(LIBRARY, [_as_tree(LIBRARY, library) for library in libraries])
        tree["children"]["workers"]["children"]["worker_root"]["children"][LIBRARY] = node
        gauges = [library.get("gauges", {}) for library in libraries]
        tree["gauges"] = {**timers.merge_gauges(gauges), **tree["gauges"]}
    return tree


def publish_timers(pool: Pool, worker_ids: Sequence[int], timeout_s: float) -> None:
    """Add the workers' trees to those of mlagents_envs in this process, as ML-Agents' manager does: timers.json has them.

    Args:
        pool: of the workers.
        worker_ids: those that can answer now.
        timeout_s: for all of them together.
    """
    library = sys.modules.get(f"{LIBRARY}.timers")
    found = [] if library is None else _ask_libraries(pool, worker_ids, timeout_s)
    if library is None or not found:
        return
    with library.hierarchical_timer("workers") as node:
        for tree in found:
            root = node.get_child("worker_root")
            _add(root, tree)


def _add(node: Any, tree: dict[str, Any]) -> None:
    node.total += tree["total"]
    node.count += tree["count"]
    node.is_parallel = True
    for name, child in tree.get("children", {}).items():
        _add(node.get_child(name), child)


def _ask_libraries(pool: Pool, worker_ids: Sequence[int], timeout_s: float | None) -> list[dict[str, Any]]:
    """The trees of workers that have one; one that cannot answer has none."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    asked = [pool.call_async("library_timers", env_ids=[worker_id]) for worker_id in worker_ids]
    found: list[dict[str, Any] | None] = []
    for future in asked:
        with contextlib.suppress(StepmillError):  # it has died, which the next command tells
            found.extend(future.result(None if deadline is None else max(deadline - time.monotonic(), 0.0)))
    return [tree for tree in found if tree is not None]


def _as_tree(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """mlagents_envs leaves out what is empty, and names of nodes that are not the root."""
    return timers.make_node(
        name,
        total=found["total"],
        count=found["count"],
        children={key: _as_tree(key, child) for key, child in found.get("children", {}).items()},
    )
