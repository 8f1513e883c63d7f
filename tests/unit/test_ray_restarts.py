"""Restarts on the nodes of a Ray pool, and what they wait for, with actors that are not those of Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stepmill._native import OwnedFd
from stepmill.backends.ray import backend as backend_module
from stepmill.backends.ray import cluster, node_link
from stepmill.backends.ray.backend import RayBackend, RemoteWorker
from stepmill.backends.ray.messages import NodePlan
from stepmill.backends.ray.node_link import NodeLink
from stepmill.frontends.ray_rollout import RayRollout
from stepmill.spec.errors import WorkerDied
from stepmill.spec.ray_options import RayOptions
from stepmill.worker.messages import WorkerPlan, WorkerReport, WorkerSettings
from tests.harness.hangs import HANG_GUARD_S


class RayError(Exception):
    """The class of the errors of Ray."""


class RayTaskError(RayError):
    """What a task raised."""


class Ray:
    """Stands for the module. The method `start` of an actor returns only when the actor is killed."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=TimeoutError)

    def __init__(self) -> None:
        self.is_starting, self.is_killed = threading.Event(), threading.Event()

    def get(self, *_: object, **__: object) -> None:
        self.is_starting.set()
        assert self.is_killed.wait(HANG_GUARD_S)
        raise RayError("the actor was killed")

    def wait(self, refs: list[object], **_: object) -> tuple[list[object], list[object]]:
        return refs, []


class Actor:
    """Has all methods."""

    def __getattr__(self, name: str) -> Any:
        return self

    def options(self, **_: object) -> Any:
        return self

    def remote(self, *_: object) -> Any:
        return self


def backend_of_one_node(ray: Ray) -> RayBackend:
    """Return a backend with two workers on a node."""
    made: Any = object.__new__(RayBackend)
    made._ray, made._settings, made._options = ray, WorkerSettings(start_timeout_s=None), RayOptions()
    made._workers = [RemoteWorker(WorkerPlan(number, (number,), ()), 0, number, OwnedFd.eventfd()) for number in (0, 1)]
    made._links, made._starting, made._searches, made._wake = [], set(), {}, OwnedFd.eventfd()
    made._replacing, made._is_closed, made._slab, made._thread = {0: threading.Lock()}, False, None, None
    made._node_plans = {0: cast("NodePlan", SimpleNamespace(num_threads=0))}
    made._links.append(NodeLink(ray, Actor(), 0, {0: (0,), 1: (1,)}, lambda call: call()))
    return cast("RayBackend", made)


def run_thread(function: Any) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except WorkerDied as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_a_worker_that_starts_slowly_does_not_delay_the_restart_of_another_one_of_its_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = backend_of_one_node(Ray())
    is_building, may_end = threading.Event(), threading.Event()

    def call_actor(_: NodeLink, method: Any, *arguments: Any, worker: int, timeout_s: float | None) -> Any:
        if worker == 0:
            is_building.set()
            assert may_end.wait(HANG_GUARD_S)
        return WorkerReport(worker, 1, ()), 1

    monkeypatch.setattr(NodeLink, "call_actor", call_actor)
    slow, slow_results = run_thread(lambda: backend._revive(0, ()))
    assert is_building.wait(HANG_GUARD_S)
    other, results = run_thread(lambda: backend._revive(1, ()))
    other.join(HANG_GUARD_S / 6)
    may_end.set()
    assert results == [WorkerReport(1, 1, ())]
    slow.join(HANG_GUARD_S)
    assert slow_results == [WorkerReport(0, 1, ())]


def test_close_kills_the_successor_of_a_lost_node_while_its_envs_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray()
    backend = backend_of_one_node(ray)
    backend._links[0].mark_lost("was lost")
    for module in (cluster, node_link):
        monkeypatch.setattr(module, "kill", lambda *_: ray.is_killed.set())
    monkeypatch.setattr(cluster, "make_actor", lambda *_: Actor())
    monkeypatch.setattr(cluster, "placed", lambda *_, **__: {})
    monkeypatch.setattr(cluster, "demand_of", lambda *_: {})
    monkeypatch.setattr(backend_module, "PlaceSearch", lambda *_: SimpleNamespace(shared_machines=list, gave_up_at=0.0))
    thread, results = run_thread(lambda: backend._replace_node(0, 0.0))
    assert ray.is_starting.wait(HANG_GUARD_S)
    backend._shut_down()
    was_killed = ray.is_killed.is_set()
    ray.is_killed.set()
    thread.join(HANG_GUARD_S)
    assert was_killed
    assert isinstance(results[0], WorkerDied)


def test_a_fragment_is_still_ordered_after_ctrl_c_while_it_is_fetched() -> None:
    rollout: Any = object.__new__(RayRollout)
    answers: list[Any] = [(3, True, None), KeyboardInterrupt()]

    def get(_: object) -> Any:
        answer = answers.pop()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    rollout._module = SimpleNamespace(exceptions=Ray.exceptions, get=get, wait=lambda refs, **_: (refs, []))
    rollout._env_ids, rollout._orders, rollout._searches = [np.arange(2)], {"first": 0}, {}
    rollout._actors, rollout._collected, rollout._is_closed = [Actor()], {}, False
    with pytest.raises(KeyboardInterrupt):
        rollout.recv()
    assert rollout.recv().version == 3
    assert list(rollout._orders.values()) == [0]
