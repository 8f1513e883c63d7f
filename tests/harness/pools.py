"""The backends that contract tests run on, by short names."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import stepmill
from stepmill.pool.workers import WorkerState
from stepmill.spec.ray_options import RayOptions
from stepmill.testing.compare import find_difference
from stepmill.testing.envs import CountingEnv
from tests.harness.kills import kill_process

BACKENDS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread"},
    "fork": {"backend": "process", "context": "fork"},
    "forkserver": {"backend": "process", "context": "forkserver"},
    "spawn": {"backend": "process", "context": "spawn"},
}
# With `pytest --where`; tests/conftest.py starts a cluster for it.
OPTIONAL: dict[str, dict[str, Any]] = {"ray": {"backend": "ray", "ray": RayOptions(num_nodes=2, resources={"CPU": 0})}}
Resettable = TypeVar("Resettable", stepmill.Pool, stepmill.VectorEnv)
EnvFns = Sequence[Callable[[], Any]]
NAMED = ("backend", "num_workers")


def has_command(pool: stepmill.Pool, env_id: int) -> bool:
    """Whether an env has a command whose result was not received."""
    state = pool._state
    return state.view(env_ids=[env_id])[0].is_pending


def make_pool(where: str, env_fns: EnvFns, **options: Any) -> stepmill.Pool:
    """Build a Pool on a backend of BACKENDS; `options` are arguments of PoolOptions, or `batch_size`."""
    chosen = {**(BACKENDS | OPTIONAL)[where], **options}
    if where == "serial":
        chosen.pop("num_workers", None)
    else:
        chosen.setdefault("num_workers", min(2, len(env_fns)))
    arguments = {name: chosen.pop(name) for name in ("backend", "num_workers", "batch_size", "ray") if name in chosen}
    return stepmill.Pool(env_fns, **arguments, options=stepmill.PoolOptions(**chosen))


def kill_worker(pool: stepmill.Pool, worker: int = 0) -> None:
    """Kill a worker, and wait until the pool knows: a call that is sent before may seem to have begun."""
    with contextlib.suppress(ProcessLookupError):  # it was killed before, and the pool does not know yet
        os.kill(pool.stats().workers[worker].pid, signal.SIGKILL)
    while not pool.stats().workers[worker].is_dead:
        os.sched_yield()


def await_ready(pool: stepmill.Pool, num_envs: int) -> None:
    """Wait until this number of envs have results."""
    while len(pool.ready_ids) < num_envs:
        os.sched_yield()


def kill_unnoticed(pool: stepmill.Pool, worker: int = 0) -> None:
    """Kill a worker, and wait until its process has ended: the pool finds it at its next use."""
    kill_process(pool.stats().workers[worker].pid)


def await_restart(pool: stepmill.Pool, worker: int) -> None:
    """Wait until no restart of a worker is under way, and leave faults of pending commands alone."""
    while pool._recovery.workers.records[worker].state is WorkerState.RESTARTING:
        pool._state.wait(1.0)
        pool._recovery.handle(has_faults=False)


def keep_closed(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes objects as `make` does; they are closed at the end. For fixtures."""
    made: list[Any] = []

    def make_one(*arguments: Any, **keywords: Any) -> Any:
        made.append(make(*arguments, **keywords))
        return made[-1]

    yield make_one
    for one in reversed(made):
        one.close()
    made.clear()


def begun(pool: Resettable) -> Resettable:
    """Begin the first episodes of a pool or a vector env, with seed 0; return it."""
    pool.reset(seed=0)
    return pool


def assert_equal(left: object, right: object) -> None:
    """Compare nested data to the last bit."""
    assert not (difference := find_difference(left, right)), difference


def assert_same(ours: stepmill.Batch, theirs: stepmill.Batch, when: object = "") -> None:
    """Compare all of two batches but the infos."""
    columns = [(each.obs, each.reward, each.terminated, each.truncated, each.env_id) for each in (ours, theirs)]
    assert find_difference(*columns, f"batch {when}") is None


def make_vector_env(where: str, env_fns: EnvFns, **arguments: Any) -> stepmill.VectorEnv:
    """Build a VectorEnv on a backend of BACKENDS; `arguments` are its own."""
    chosen = dict((BACKENDS | OPTIONAL)[where])
    if where != "serial":
        arguments.setdefault("num_workers", min(2, len(env_fns)))
    else:
        arguments.pop("num_workers", None)
    options = {**arguments.pop("options", {})}
    if "context" in chosen:
        options["context"] = chosen.pop("context")
    return stepmill.VectorEnv(env_fns, **chosen, **arguments, options=stepmill.PoolOptions(**options))


def counting_envs(num_envs: int, length: int = 5, **arguments: Any) -> list[Callable[[], CountingEnv]]:
    """Return env_fns of counting envs 0 … num_envs-1."""
    return [partial(CountingEnv, i, length, **arguments) for i in range(num_envs)]
