"""Evaluations whose workers are killed or hang at random lose nothing and change nothing."""

from __future__ import annotations

import pytest

import stepmill
from tests.evaluation.envs import Unlucky, Walk, forward
from tests.evaluation.test_evaluate import facts


def check_unlucky(num_episodes, **options):
    found = stepmill.evaluate(
        forward, Unlucky, seeds=range(num_episodes), step_timeout_s=2, retries=50, restarts={"max_restarts": 10**6}, **options
    )  # fmt: skip
    expected = stepmill.evaluate(forward, Walk, seeds=range(num_episodes), backend="serial")
    assert facts(found) == facts(expected)
    return found


@pytest.mark.slow
def test_random_kills_and_hangs_change_nothing():
    check_unlucky(600, num_envs=8, num_workers=4)


@pytest.mark.soak
def test_ten_thousand_episodes_with_random_kills_and_hangs_change_nothing():
    found = check_unlucky(10_000, num_envs=16, num_workers=16)
    assert sum(each.attempts > 1 for each in found.episodes) > 50
