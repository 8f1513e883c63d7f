"""The timers of a pool: the learner's own tree, and under it those of all workers as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepmill import timers
from stepmill.backends.serial import SerialBackend
from stepmill.pool.start import Running
from stepmill.pool.stats import read_stats
from stepmill.spec.errors import StepmillError
from stepmill.worker.messages import Request, RequestKind, Value

WORKERS, WORKER_ROOT = "workers", "worker_root"  # the names that ML-Agents' users know


def read_timers(running: Running, request_ids: Iterator[int]) -> timers.Tree:
    """Return the calling thread's tree with the node `workers`, in which the trees of all living workers are added up.

    In line the envs' timers are the caller's own, and the workers' node has the engine's counters alone.
    """
    root = timers.snapshot()
    is_in_line = isinstance(running.backend, SerialBackend)
    trees = [] if is_in_line else _read_workers(running, request_ids)
    stats = read_stats(running)["workers"]
    nodes = []
    for worker in stats:
        own = next((tree for tree in trees if tree["metadata"]["worker"] == worker["worker"]), None)
        inside = {} if own is None else own["children"]
        count = worker["steps"] + worker["resets"]
        envs = timers.make_node("envs", total=worker["env_s"], count=count, children=inside)
        wait = timers.make_node("wait", total=worker["wait_s"], count=0)
        total = worker["env_s"] + worker["wait_s"]
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


def _read_workers(running: Running, request_ids: Iterator[int]) -> list[timers.Tree]:
    """Ask every living worker; who cannot answer has no tree."""
    alive = [plan.worker for plan in running.plans if not running.slab.native.is_dead(plan.worker)]
    trees: list[Any] = []
    for future in running.backend.call(
        {worker: Request(next(request_ids), RequestKind.TIMERS, (0,), (0,), None) for worker in alive}
    ):
        try:
            outcome = future.result()[0]
        except StepmillError:
            continue  # it died meanwhile, which the next command tells
        if isinstance(outcome, Value) and isinstance(outcome.value, dict):
            outcome.value["metadata"]["worker"] = future.worker
            trees.append(outcome.value)
    return trees
