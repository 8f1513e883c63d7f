"""Environment variables and cores of each worker, and the variables that tell a worker its number."""

from __future__ import annotations

import os

import pytest

import stepmill
from stepmill.pool.plans import plan_workers
from stepmill.spec.options import PoolOptions
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun, kill_worker, make_pool

CORES = sorted(os.sched_getaffinity(0))
OWN = ("STEPMILL_WORKER", "STEPMILL_NUM_WORKERS", "STEPMILL_ENV_IDS")


class SettingsEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        self.at_start = self.variables("PORT", *OWN)

    def variables(self, *names):
        return tuple(os.environ.get(name) for name in names)

    def cores(self):
        return sorted(os.sched_getaffinity(0))


def _ports(worker):
    return {"PORT": str(5005 + worker)}


@pytest.mark.parametrize("where", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_each_worker_has_its_variables_before_it_builds_envs(where):
    with make_pool(where, [SettingsEnv] * 3, num_workers=2, workers={"env": _ports}) as pool:
        assert pool.get_attr("at_start") == (
            ("5005", "0", "2", "0"),
            ("5006", "1", "2", "1,2"),
            ("5006", "1", "2", "1,2"),
        )


def test_a_restarted_worker_has_the_same_variables():
    with begun(make_pool("forkserver", [SettingsEnv] * 2, workers={"env": _ports}, on_fault="truncate")) as pool:
        kill_worker(pool, 1)
        pool.step([0, 0])
        pool.step([0, 0])
        assert pool.get_attr("at_start")[1:] == (("5006", "1", "2", "1"),)


def test_a_list_is_used_in_turn():
    options = PoolOptions(workers={"env": [{"GPU": "0"}, {"GPU": "1"}], "affinity": [[0], [1, 2]]}, num_workers=3)
    plans = plan_workers([CountingEnv] * 3, options)
    assert [plan.environ["GPU"] for plan in plans] == ["0", "1", "0"]
    assert [plan.affinity for plan in plans] == [(0,), (1, 2), (0,)]


@pytest.mark.parametrize("where", ["thread", "fork"])
def test_each_worker_runs_on_its_cores(where):
    own = CORES[:1], CORES[-1:]
    with make_pool(where, [SettingsEnv] * 2, workers={"affinity": own}) as pool:
        assert pool.call("cores") == (CORES[:1], CORES[-1:])
    with make_pool(
        where, [SettingsEnv] * 2, workers={"affinity": lambda worker: None if worker else CORES[:1]}
    ) as pool:
        assert pool.call("cores") == (CORES[:1], CORES)
    with make_pool(where, [SettingsEnv] * 2, num_workers=2, workers={"affinity": CORES[-1:]}) as pool:
        assert pool.call("cores") == (CORES[-1:],) * 2
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_there_are_no_more_workers_than_cores_for_them():
    with make_pool("fork", [SettingsEnv] * 4, workers={"affinity": CORES[:1]}, num_workers=None) as pool:
        assert pool.num_workers == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": {"env": [{"A": 1}]}}, "workers.env=.* must map names"),
        ({"workers": {"env": []}}, "workers.env=.* must map names"),
        ({"workers": {"env": lambda worker: {"A": worker}}}, "workers.env={'A': 0} must map names"),
        *(
            ({"workers": {"affinity": cores}}, "must be a list of different core")
            for cores in ([], [0, 0], [-1], "0", 0)
        ),
        ({"workers": {"affinity": [4096]}}, r"cores \[4096\], which this process may not use; it may use"),
        ({"workers": {"affinity": [[0], []]}}, r"workers.affinity=\[\] must be a list of different core numbers"),
        ({"workers": {"affinity": [[0], 1]}}, "must be a list of different core numbers"),
        ({"workers": {"affinity": lambda worker: [worker, worker]}}, r"workers.affinity=\[0, 0\] must be a list"),
        ({"workers": {"affinity": lambda worker: [4096]}}, r"cores \[4096\], which this process may not use"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, text):
    with pytest.raises(stepmill.UsageError, match=text):
        make_pool("fork", [SettingsEnv], **options)


def test_the_serial_backend_has_nobody_to_pin():
    with pytest.raises(stepmill.UsageError, match="the serial backend has none"):
        make_pool("serial", [SettingsEnv], workers={"affinity": CORES[:1]})


def test_the_threads_of_a_kernel_have_their_cores_together():
    with pytest.raises(stepmill.UsageError, match=r"give workers.affinity as one list"):
        stepmill.make_vec("CartPole-v1", num_envs=2, backend="kernel", workers={"affinity": [CORES[:1], CORES[-1:]]})


def test_backends_without_processes_warn():
    with pytest.warns(RuntimeWarning, match=r"workers.env"):
        make_pool("thread", [SettingsEnv], workers={"env": _ports}).close()
