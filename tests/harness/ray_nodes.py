"""Finds the processes of the nodes of a Ray pool, and ends or stops them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import stepmill
from stepmill.pool.port import PoolPort
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S


def link_of(pool: stepmill.Pool, node: int) -> Any:
    """Return the pool's end of a node."""
    return pool._runtime.backend._links[node]  # type: ignore[attr-defined]


def actor_pid(pool: stepmill.Pool, node: int) -> int:
    """Return the pid of a node's actor."""
    pid: int = link_of(pool, node).started.pid
    return pid


def kill_actor(pool: stepmill.Pool, node: int) -> None:
    """Kill the actor of a node; its workers end with it."""
    os.kill(actor_pid(pool, node), signal.SIGKILL)


def stop_node(pool: stepmill.Pool, node: int) -> list[int]:
    """Stop all processes of a node, and return their pids."""
    pid = actor_pid(pool, node)
    pids = [pid, *leaks.descendants(pid)]
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    return pids


def end_processes(pids: list[int]) -> None:
    """Kill processes, stopped ones too."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_lost(pool: stepmill.Pool, node: int) -> float:
    """Wait until the pool has noticed the loss of a node; return the seconds that this took."""
    began, link, slab = time.monotonic(), link_of(pool, node), pool._runtime.slab.native
    while link.cause is None or not all(map(slab.is_dead, link.workers)):
        assert time.monotonic() - began < HANG_GUARD_S
        time.sleep(0.01)
    return time.monotonic() - began


def envs_of_node(pool: stepmill.Pool, node: int) -> list[int]:
    """Return the env_ids of a node."""
    workers = set(link_of(pool, node).workers)
    return [env_id for env_id, worker in enumerate(PoolPort(pool).worker_of) if worker in workers]
