"""Timer trees: the workers', those of mlagents_envs within them, and the learner's own as one."""

from __future__ import annotations

import contextlib
from typing import Any

from stepmill import timers
from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError

LIBRARY = "mlagents_envs"


def timer_tree(pool: Pool) -> dict[str, Any]:
    """Return the timers of a pool, with the trees of mlagents_envs in its workers added up beside the engine's."""
    tree: dict[str, Any] = pool.timers()
    libraries = _ask_libraries(pool)
    if libraries:
        node = timers.merge(LIBRARY, [_as_tree(LIBRARY, library) for library in libraries])
        tree["children"]["workers"]["children"]["worker_root"]["children"][LIBRARY] = node
        gauges = [library.get("gauges", {}) for library in libraries]
        tree["gauges"] = {**timers.merge_gauges(gauges), **tree["gauges"]}
    return tree


def _ask_libraries(pool: Pool) -> list[dict[str, Any]]:
    """The trees of workers that have one; who cannot answer has none."""
    asked = [pool.call_async("library_timers", env_ids=[env_id]) for env_id in range(pool.num_envs)]
    found: list[dict[str, Any] | None] = []
    for future in asked:
        with contextlib.suppress(StepmillError):  # it has died, which the next command tells
            found.extend(future.result())
    return [tree for tree in found if tree is not None]


def _as_tree(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """mlagents_envs leaves out what is empty, and names of nodes that are not the root."""
    return timers.make_node(
        name,
        total=found["total"],
        count=found["count"],
        children={key: _as_tree(key, child) for key, child in found.get("children", {}).items()},
    )
