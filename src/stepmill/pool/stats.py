"""Reads the counters and timers of the workers of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepmill import timers
from stepmill.backends.base import traits_of
from stepmill.pool.start import PoolRuntime
from stepmill.spec.errors import StepmillError
from stepmill.spec.stats import PoolStats
from stepmill.worker.messages import Request, RequestKind, Value

if TYPE_CHECKING:
    from stepmill.pool.pool import Pool

WORKERS, WORKER_ROOT = "workers", "worker_root"  # names that users of ML-Agents know


def read_outcome(runtime: PoolRuntime, env_id: int) -> tuple[float, int, int]:
    """Return the reward, the flags (1 terminated, 2 truncated) and the observation hash of the newest result of an env."""
    return runtime.state.newest_outcome(env_id)


def read_stats(runtime: PoolRuntime) -> PoolStats:
    """Return the current counters."""
    nodes = traits_of(runtime.backend).nodes
    leased_slots, log_bytes = runtime.state.usage()
    return runtime.slab.read_stats(
        leased_slots=leased_slots,
        replay_log_bytes=log_bytes + runtime.revival.recovery.replays.log.size_bytes,
        nodes=() if nodes is None else nodes.node_stats(),
    )


def read_timers(pool: Pool) -> timers.Tree:
    """Return the timers of the calling thread, with a node `workers` that has the sum of the timers of all living workers.

    On the serial backend, the timers of the envs are in the caller's tree, and `workers` has only the counters of the
    engine. `stepmill.timers` describes the tree.
    """
    runtime = pool._runtime
    root = timers.snapshot()
    trees = _read_workers(runtime, pool._requests.ids) if traits_of(runtime.backend).has_own_timers else []
    stats = read_stats(runtime).workers
    nodes = []
    for worker in stats:
        own = next((tree for tree in trees if tree["metadata"]["worker"] == worker.worker), None)
        inside = {} if own is None else own["children"]
        count = worker.steps + worker.resets
        envs = timers.make_node("envs", total=worker.busy_s, count=count, children=inside)
        wait = timers.make_node("wait", total=worker.wait_s, count=0)
        total = worker.busy_s + worker.wait_s
        nodes.append(timers.make_node(WORKER_ROOT, total=total, count=1, children={"envs": envs, "wait": wait}))
    merged = timers.merge(WORKER_ROOT, nodes)
    root["children"][WORKERS] = {
        **timers.make_node(WORKERS, total=merged["total"], count=1, is_parallel=True),
        "self": 0.0,
        "children": {WORKER_ROOT: merged},
    }
    root["gauges"] = {**timers.merge_gauges([tree["gauges"] for tree in trees]), **root["gauges"]}
    root["metadata"] = {**root["metadata"], "num_workers": len(stats)}
    return root


def _read_workers(runtime: PoolRuntime, request_ids: Iterator[int]) -> list[timers.Tree]:
    """Return the trees of all workers that reply."""
    alive = [worker.worker for worker in read_stats(runtime).workers if not worker.is_dead]
    trees: list[Any] = []
    for future in runtime.backend.call(
        {lane: Request(next(request_ids), RequestKind.TIMERS, (0,), (0,), None) for lane in alive}
    ):
        try:
            outcome = future.result()[0]
        except StepmillError:
            continue  # the worker has died, which the next command reports
        if isinstance(outcome, Value) and isinstance(outcome.value, dict):
            outcome.value["metadata"]["worker"] = future.lane
            trees.append(outcome.value)
    return trees
