"""A pool that closes says once which option would have made the program faster, with the reason that was measured."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.pool import advice
from stepmill.spec.stats import PoolStats
from tests.harness.hangs import HANG_GUARD_S

ENVS = 4
OBSTACLES = ("jax", "tensorflow", "torch.cuda")
LOAD_S = 0.05


class Slow:
    """A function that makes an env, and takes its time to be loaded."""

    def __call__(self) -> object:
        return gymnasium.make("CartPole-v1")

    def __setstate__(self, _: object) -> None:
        end_s = time.thread_time() + LOAD_S
        while time.thread_time() < end_s:  # as an import does
            pass

    def __getstate__(self) -> object:
        return "state"


@pytest.fixture(scope="module")
def measured() -> PoolStats:
    with stepmill.Pool([lambda: gymnasium.make("CartPole-v1")] * ENVS, backend="thread", num_workers=2) as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(ENVS, int))
        return pool.stats()


def stats_of(measured: PoolStats, *, step_s: float, wait_s: float, steps: int = 1000) -> PoolStats:
    workers = tuple(
        replace(each, step_s=step_s / 2, reset_s=0.0, publish_s=0.0, steps=steps) for each in measured.workers
    )
    return replace(measured, elapsed_s=100.0, workers=workers, learner=replace(measured.learner, wait_s=wait_s))


@pytest.mark.parametrize(
    ("options", "times", "asleep_s", "named"),
    [
        ({}, {"step_s": 3.0, "wait_s": 9.0}, 0.0, "backend"),
        ({}, {"step_s": 3.0, "wait_s": 9.0, "queued_s": 4.0}, 0.0, None),  # the machine was busy
        ({"backend": "process"}, {"step_s": 3.0, "wait_s": 9.0}, 0.0, None),
        ({}, {"step_s": 6.0, "wait_s": 9.0}, 0.0, None),
        ({}, {"step_s": 0.5, "wait_s": 1.5}, 0.0, None),
        ({}, {"step_s": 3.0, "wait_s": 9.0, "steps": 10}, 0.0, None),
        ({}, {"step_s": 10.0, "wait_s": 6.0}, 8.0, "num_workers"),
        ({"num_workers": 2}, {"step_s": 10.0, "wait_s": 6.0}, 8.0, None),
        ({"envs_per_worker": 2}, {"step_s": 10.0, "wait_s": 6.0}, 8.0, None),
        ({}, {"step_s": 10.0, "wait_s": 6.0}, 4.0, None),
        ({}, {"step_s": 250.0, "wait_s": 99.0}, 240.0, None),  # coroutines: the steps of a worker overlap
    ],
)
def test_an_option_that_is_not_given_is_advised_where_it_gains_seconds(
    measured: PoolStats, options: Any, times: Any, asleep_s: float, named: str | None
) -> None:
    queued_s = times.pop("queued_s", 0.0)
    found = advice.advise(stats_of(measured, **times), stepmill.PoolOptions(**options), asleep_s, queued_s)
    assert (found and found[0]) == named
    assert found is None or "ends this advice" in found[1]


@pytest.mark.parametrize(
    ("options", "load_s", "elapsed_s", "is_advised"),
    [
        ({}, 3.0, 20.0, True),
        ({"context": "forkserver"}, 3.0, 20.0, False),
        ({"context": "spawn"}, 3.0, 20.0, False),
        ({}, 1.5, 2.0, False),
        ({}, 3.0, 100.0, False),  # a small part of the run
    ],
)
def test_a_fork_is_advised_where_workers_spend_seconds_on_imports(
    options: Any, load_s: float, elapsed_s: float, is_advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", {name: each for name, each in sys.modules.items() if name not in OBSTACLES})
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    given = stepmill.PoolOptions(**options)
    found = advice.advise_context(load_s, elapsed_s, given)
    assert (found is not None) == is_advised
    assert found is None or ("for 3.0 s" in found[1] and "ends this advice" in found[1])


@pytest.mark.parametrize("obstacle", ["threads", *OBSTACLES])
def test_no_fork_is_advised_to_a_program_that_it_may_break(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: each for name, each in sys.modules.items() if name not in OBSTACLES}
    monkeypatch.setattr(sys, "modules", modules)
    monkeypatch.setattr(threading, "active_count", lambda: 2 if obstacle == "threads" else 1)
    modules[obstacle] = SimpleNamespace(is_initialized=lambda: True)  # type: ignore[assignment]
    assert advice.advise_context(3.0, 20.0, stepmill.PoolOptions()) is None


def test_a_pool_measures_how_long_its_workers_load_their_functions() -> None:
    with stepmill.Pool([Slow()] * 2, backend="process", num_workers=2) as pool:
        assert LOAD_S <= pool._runtime.load_s < HANG_GUARD_S
    with stepmill.Pool([Slow()] * 2, backend="process", num_workers=2, context="fork") as pool:
        assert pool._runtime.load_s == 0


def test_a_pool_gives_its_advice_once_and_names_what_it_measured(
    measured: PoolStats, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(advice, "_given", set())
    monkeypatch.setattr(advice, "_times_of", lambda _: (0.0, 0.0))
    monkeypatch.setattr(advice, "read_stats", lambda _: stats_of(measured, step_s=3.0, wait_s=9.0))
    with caplog.at_level(logging.WARNING, "stepmill"):
        for _ in range(2):
            stepmill.Pool([lambda: gymnasium.make("CartPole-v1")] * 2, context="fork").close()
    assert [record.getMessage()[:74] for record in caplog.records] == [
        "the program waited 9.0 s for workers, and the envs' own code took 3.0 s in"
    ]
