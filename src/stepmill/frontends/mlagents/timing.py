"""Reads and merges the timers of the learner and the workers, and those of mlagents_envs in both."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from stepmill import timers
from stepmill.pool.pool import Pool
from stepmill.pool.port import read_timers
from stepmill.spec.errors import StepmillError

LIBRARY = "mlagents_envs"
_LIBRARY_TIMERS = f"{LIBRARY}.timers"


@contextlib.contextmanager
def time_decisions(name: str, num_workers: int) -> Iterator[None]:
    """Time the policies' decisions for `num_workers` workers, with mlagents_envs' timers, too. Each worker counts once."""
    library = sys.modules.get(_LIBRARY_TIMERS)
    with timers.timed(name, count=num_workers):
        if library is None:
            yield
            return
        with library.hierarchical_timer(name) as node:
            yield
            node.count += num_workers - 1


def timer_tree(pool: Pool) -> dict[str, Any]:
    """Return the timers of a pool, with the trees of mlagents_envs in its workers merged beside the engine's."""
    tree: dict[str, Any] = read_timers(pool)
    libraries = _library_trees(pool, range(pool.num_envs), None)
    if libraries:
        node = timers.merge(LIBRARY, [_as_tree(LIBRARY, library) for library in libraries])
        tree["children"]["workers"]["children"]["worker_root"]["children"][LIBRARY] = node
        gauges = [library.get("gauges", {}) for library in libraries]
        tree["gauges"] = {**timers.merge_gauges(gauges), **tree["gauges"]}
    return tree


def publish_timers(pool: Pool, worker_ids: Sequence[int], timeout_s: float) -> None:
    """Merge the workers' trees into mlagents_envs' tree of this process, which ML-Agents writes to timers.json.

    Args:
        pool: the pool of the workers.
        worker_ids: the workers that are idle.
        timeout_s: the time limit for all of them together.
    """
    library = sys.modules.get(_LIBRARY_TIMERS)
    if library is not None and (found := _library_trees(pool, worker_ids, timeout_s)):
        with library.hierarchical_timer("workers") as node:
            for tree in found:
                _add(node.get_child("worker_root"), tree)


def merge_timers(root: Any) -> None:
    """Merge the root of another process's mlagents_envs timers into those of this process, under "workers"."""
    library = sys.modules.get(_LIBRARY_TIMERS)
    if library is not None and root is not None:
        with library.hierarchical_timer("workers") as node:
            node.merge(root, root_name="worker_root", is_parallel=True)


def _add(node: Any, tree: dict[str, Any]) -> None:
    node.total += tree["total"]
    node.count += tree["count"]
    node.is_parallel = True
    for name, child in tree.get("children", {}).items():
        _add(node.get_child(name), child)


def _library_trees(pool: Pool, worker_ids: Sequence[int], timeout_s: float | None) -> list[dict[str, Any]]:
    """Return the trees of the workers that have loaded mlagents_envs and answer in time."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    asked = [pool.call_async("library_timers", env_ids=[worker_id]) for worker_id in worker_ids]
    found: list[dict[str, Any] | None] = []
    for future in asked:
        with contextlib.suppress(StepmillError):  # the worker has died, and its next command raises this
            found.extend(future.result(None if deadline is None else max(deadline - time.monotonic(), 0.0)))
    return [tree for tree in found if tree is not None]


def _as_tree(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of mlagents_envs, which has names only at the root and no empty children, as one of stepmill's."""
    return timers.make_node(
        name,
        total=found["total"],
        count=found["count"],
        children={key: _as_tree(key, child) for key, child in found.get("children", {}).items()},
    )
