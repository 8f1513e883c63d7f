"""Workers use only the cores that they were given."""

from __future__ import annotations

import os

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun, make_pool

CORES = sorted(os.sched_getaffinity(0))


class WhereEnv(CountingEnv):
    def cores(self):
        return sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("where", ["thread", "fork"])
def test_workers_run_on_these_cores_only_and_the_learner_as_ever(pool_of, where):
    pool = begun(pool_of([WhereEnv] * 2, workers={"affinity": CORES[-1:]}, num_workers=2))
    pool.step([0, 0])
    assert pool.call("cores") == ([CORES[-1]],) * 2
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_there_are_no_more_workers_than_cores_for_them():
    with make_pool("fork", [WhereEnv] * 4, workers={"affinity": CORES[:1]}, num_workers=None) as pool:
        assert pool.num_workers == 1


@pytest.mark.parametrize(
    ("affinity", "text"),
    [
        ([4096], r"cores \[4096\], which this process may not use; it may use"),
        ([], "must be a list of different core numbers"),
        ([0, 0], "must be a list of different core numbers"),
        ([-1], "must be a list of different core numbers"),
        ("0", "must be a list of different core numbers"),
        (0, "must be a list of different core numbers"),
    ],
)
def test_cores_that_cannot_be_are_refused(affinity, text):
    with pytest.raises(stepmill.UsageError, match=text):
        make_pool("thread", [WhereEnv], workers={"affinity": affinity})


def test_the_serial_backend_has_nobody_to_pin():
    with pytest.raises(stepmill.UsageError, match="the serial backend has none"):
        make_pool("serial", [WhereEnv], workers={"affinity": CORES[:1]})
