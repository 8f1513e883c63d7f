"""Rollouts on the nodes of a Ray cluster: the data of a local Rollout, one message per T steps, versions of the policy."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import numpy as np
import pytest

import stepmill
from stepmill.frontends.ray_rollout import RayRollout, joined
from tests.frontends.guides import code_of
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs
from tests.harness.ray_cluster import NODE_CPUS

pytest.importorskip("ray")
pytestmark = pytest.mark.ray
T, N = 12, 5


class Constant:
    """A policy whose actions say which version it is."""

    def __init__(self, version):
        self.version = version

    def __call__(self, obs, env_ids):
        return np.full(len(env_ids), self.version), {"t": obs[:, 2] * 2.0}


class Suicidal(Constant):
    """Kills its node once, at a time that its folder remembers."""

    def __init__(self, folder):
        super().__init__(0)
        self.folder = folder

    def __call__(self, obs, env_ids):
        mark = self.folder / "died"
        if len(env_ids) == 3 and obs[0, 2] == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(obs, env_ids)


def ordered(episodes):
    return sorted(episodes, key=lambda episode: (episode["t"], episode["env_id"]))


def make(policy, **options):
    nodes = stepmill.RayOptions(num_nodes=2, resources={"CPU": 0})
    return RayRollout(counting_envs(N), T, policy=policy, seed=0, nodes=nodes, num_workers=1, **options)


def local_batches(num):
    """Return the batches of a Rollout on this machine, copied."""
    with stepmill.Pool(counting_envs(N), backend="serial") as pool:
        local = begun(stepmill.Rollout(pool, T))
        return [copy.deepcopy(local.collect(Constant(3))) for _ in range(num)]


def test_fragments_of_all_nodes_are_the_batch_of_a_local_rollout(ray_cluster):
    with make(Constant(3)) as rollout:
        for turn, expected in enumerate(local_batches(3)):
            fragments = rollout.collect()
            assert [fragment.is_first for fragment in fragments] == [turn == 0] * 2
            actual = joined(fragments)
            for name in ("obs", "action", "reward", "terminated", "truncated", "valid", "final_at", "final_obs"):
                np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
            np.testing.assert_array_equal(actual.extras["t"], expected.extras["t"])
            assert ordered(actual.episodes) == ordered(expected.episodes)


def test_the_example_of_the_api_reference_runs(ray_cluster):
    exec(code_of("../api_examples", "ray"), {})


def test_ctrl_c_while_a_fragment_is_fetched_does_not_lose_it(ray_cluster, monkeypatch):
    with make(Constant(3)) as rollout:
        get = rollout._module.get

        def get_after_ctrl_c(*arguments, **options):
            monkeypatch.setattr(rollout._module, "get", get)
            raise KeyboardInterrupt

        monkeypatch.setattr(rollout._module, "get", get_after_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            rollout.collect()
        for expected in local_batches(2):
            np.testing.assert_array_equal(joined(rollout.collect()).obs, expected.obs)


def make_pool(**options):
    nodes = stepmill.RayOptions(num_nodes=2, resources={"CPU": NODE_CPUS})
    return stepmill.Pool(counting_envs(N), backend="ray", num_workers=2, ray=nodes, **options)


def test_a_rollout_takes_over_the_envs_and_cpus_of_a_pool(ray_cluster):
    pool = make_pool()  # has reserved all CPUs of the cluster
    pool.reset(seed=5)
    with RayRollout.from_pool(pool, T, policy=Constant(3), seed=0) as rollout:
        with pytest.raises(stepmill.ClosedPoolError):
            pool.step(np.zeros(N, int))
        for expected in local_batches(2):
            actual = joined(rollout.collect(timeout_s=60))
            np.testing.assert_array_equal(actual.obs, expected.obs)
            np.testing.assert_array_equal(actual.action, expected.action)
        assert rollout.num_nodes == 2


def test_a_pool_goes_on_if_its_envs_cannot_be_taken_over(ray_cluster):
    with begun(make_pool()) as pool:
        with pytest.raises(stepmill.UsageError, match="policy cannot be sent to the nodes"):
            RayRollout.from_pool(pool, T, policy=Constant(threading.Lock()))
        assert pool.step(np.zeros(N, int)).obs[:, 2].tolist() == [1] * N


def test_a_rollout_of_a_pool_on_this_machine_is_refused():
    with (
        stepmill.Pool(counting_envs(1), backend="serial") as pool,
        pytest.raises(stepmill.UsageError, match=r"use stepmill.Rollout\(pool"),
    ):
        RayRollout.from_pool(pool, T, policy=Constant(0))


def test_a_rollout_has_a_column_for_each_env_and_so_no_spares(ray_cluster):
    with pytest.raises(stepmill.UsageError, match=r"resets.spare_envs=1"):
        make(Constant(0), resets={"spare_envs": 1})


def test_each_fragment_names_the_version_that_acted(ray_cluster):
    with make(Constant(0)) as rollout:
        rollout.collect()
        assert rollout.set_policy(Constant(1)) == 1
        seen = set()
        for _ in range(4):
            for fragment in rollout.collect():
                assert (fragment.batch.action == fragment.version).all()
                seen.add(fragment.version)
        assert 1 in seen
        assert {fragment.version for fragment in rollout.collect()} == {1}


def test_a_lost_node_begins_again_and_the_other_goes_on(ray_cluster, tmp_path):
    with make(Suicidal(tmp_path), on_fault="truncate") as rollout:
        for turn in range(3):
            fragments = rollout.collect(timeout_s=60)
            assert [fragment.node for fragment in fragments] == [0, 1]
            assert fragments[0].is_first is (turn == 0)
            assert (fragments[1].batch.obs[:, :, 0] == [3, 4]).all()
        assert rollout.num_restarts == 1


@pytest.mark.parametrize(
    "options", [{}, {"on_fault": "truncate", "restarts": {"max_restarts": 0}}], ids=["policy", "limit"]
)
def test_a_lost_node_is_raised_under_the_policy_raise_and_beyond_the_limit(ray_cluster, tmp_path, options):
    with make(Suicidal(tmp_path), **options) as rollout:
        with pytest.raises(stepmill.WorkerDied, match=r"node 0 was lost, .* envs \[0, 1, 2\]"):
            rollout.collect(timeout_s=HANG_GUARD_S)
        assert rollout.num_restarts == 0
        assert len(rollout.collect(timeout_s=HANG_GUARD_S)) == 2
        assert rollout.num_restarts == 1


class Raising(Constant):
    """Raises an error of a class of its own."""

    def __call__(self, obs, env_ids):
        raise DeliberateError("the policy failed")


class DeliberateError(Exception):
    """Raised by a policy."""


def recv_until_fragment(rollout):
    """Return the first fragment; those that were ordered under a policy that fails raise before it."""
    until = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < until:
        try:
            return rollout.recv(timeout_s=HANG_GUARD_S)
        except DeliberateError:
            continue
    raise AssertionError("no fragment has come")


@pytest.mark.parametrize("on_fault", ["raise", "truncate"])
def test_an_exception_of_the_policy_is_raised_with_its_traceback(ray_cluster, on_fault):
    with make(Raising(0), on_fault=on_fault) as rollout:
        with pytest.raises(DeliberateError, match=r"(?s)in __call__.*the policy failed"):
            rollout.recv(timeout_s=HANG_GUARD_S)
        with pytest.raises(DeliberateError):
            rollout.collect(timeout_s=HANG_GUARD_S)
        rollout.set_policy(Constant(1))
        fragment = recv_until_fragment(rollout)
        assert fragment.version == 1
        assert fragment.is_first
        assert rollout.num_restarts == 0


@pytest.mark.parametrize(
    ("actions", "text"),
    [(None, "shape"), (np.zeros(7, int), "got 7 actions"), (np.zeros((1, 4), int), "shape"), (0.5, "shape")],
    ids=["None", "too many", "too many dimensions", "a number"],
)
def test_wrong_actions_of_the_policy_are_refused_in_words(ray_cluster, actions, text):
    with make(lambda obs, env_ids: actions, on_fault="truncate") as rollout:
        with pytest.raises(stepmill.UsageError, match=text):
            rollout.recv(timeout_s=HANG_GUARD_S)
        assert rollout.num_restarts == 0


class Broken:
    """Cannot be built."""

    def __init__(self):
        raise DeliberateError("no such level")


def test_an_env_that_cannot_be_built_is_no_lost_node(ray_cluster):
    nodes = stepmill.RayOptions(num_nodes=1, resources={"CPU": 0})
    with RayRollout([Broken], T, policy=Constant(0), nodes=nodes, on_fault="truncate", backend="serial") as rollout:
        with pytest.raises(stepmill.EnvError, match="no such level"):
            rollout.recv(timeout_s=HANG_GUARD_S)
        assert rollout.num_restarts == 0


class LateReplacement(Suicidal):
    """Kills its node once, as Suicidal; in the new one it waits for a file."""

    def __call__(self, obs, env_ids):
        until = time.monotonic() + HANG_GUARD_S
        while (self.folder / "died").exists() and len(env_ids) == 3 and not (self.folder / "gate").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        return super().__call__(obs, env_ids)


def test_a_lost_node_does_not_extend_the_time_limit(ray_cluster, tmp_path):
    with make(LateReplacement(tmp_path), on_fault="truncate") as rollout:
        began = time.monotonic()
        with pytest.raises(stepmill.RecvTimeout, match=r"nodes \[0\]"):
            rollout.collect(timeout_s=40)  # in which node 1 starts
        assert rollout.num_restarts == 1
        assert time.monotonic() - began < HANG_GUARD_S
        (tmp_path / "gate").touch()
        fragments = rollout.collect(timeout_s=HANG_GUARD_S)
        assert fragments[1].is_first  # it was received before the time limit, and kept
