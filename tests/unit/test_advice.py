"""A pool that closes says once which option would have made the program faster, with the reason that was measured."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.pool import advice
from stepmill.spec.stats import PoolStats

ENVS = 4


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
