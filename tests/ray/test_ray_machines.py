"""Machines that are lost and that no other can replace: a warning, and then what RayOptions(replacement=...) says."""

from __future__ import annotations

import contextlib
import time
import warnings

import numpy as np
import pytest

import stepmill
from stepmill.frontends.ray_rollout import RayRollout
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs
from tests.harness.ray_cluster import NODE_CPUS, add_machine, remove_machine
from tests.harness.ray_nodes import envs_of_node, link_of

pytest.importorskip("ray")
pytestmark = pytest.mark.ray
N = 6
NODE_TIMEOUT_S = 2.0


@contextlib.contextmanager
def added_machine(cluster):
    """Add a machine to the cluster, and remove it, if it is still there."""
    added = add_machine(cluster, resources={"third": 1})
    try:
        yield added
    finally:
        if added in cluster.list_all_nodes():
            remove_machine(cluster, added)


@pytest.fixture
def machine(ray_cluster):
    """A third machine of the cluster, which is gone after the test."""
    with added_machine(ray_cluster) as added:
        yield added


def make_pool(**nodes):
    """Return a pool with a node on each of three machines, of which it reserves all CPUs."""
    chosen = {"num_nodes": 3, "resources": {"CPU": NODE_CPUS}, "node_timeout_s": NODE_TIMEOUT_S, **nodes}
    options = stepmill.RayOptions(**chosen)
    pool = begun(stepmill.Pool(counting_envs(N), backend="ray", num_workers=N, ray=options, on_fault="truncate"))
    pool.step(np.zeros(N, int))
    return pool


def envs_on(pool, machine):
    """Return the number of the node that runs on a machine, and its envs."""
    node = next(link.node for link in pool._runtime.backend._links if link.started.node_id == machine.node_id)
    return node, envs_of_node(pool, node)


def lose(cluster, machine, pool):
    """Remove a machine; return the number of its node, and its envs, whose episodes have been truncated."""
    node, lost = envs_on(pool, machine)
    remove_machine(cluster, machine)
    until = time.monotonic() + HANG_GUARD_S
    while not (truncated := pool.step(np.zeros(N, int)).truncated).any():
        assert time.monotonic() < until, "the loss was not noticed"
    assert np.flatnonzero(truncated).tolist() == lost
    return node, lost


@contextlib.contextmanager
def recorded():
    """Record the warnings of all threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def wait_warned(caught, text):
    """Wait for a warning with this text."""
    until = time.monotonic() + HANG_GUARD_S
    while not any(text in str(each.message) for each in caught):
        assert time.monotonic() < until, f"no warning says {text!r}"
        time.sleep(0.05)


def test_workers_of_a_lost_machine_are_spread_over_those_that_are_left(ray_cluster, machine):
    with make_pool() as pool:
        node, lost = lose(ray_cluster, machine, pool)
        with recorded() as caught:
            pool.send(np.zeros(N, int))
            batch = pool.recv(N, timeout_s=HANG_GUARD_S)
        texts = [str(each.message) for each in caught]
        assert len(texts) == 2
        for text in texts:
            assert f"no machine has room for the successor of node {node} (" in text
            assert f"which ran envs {lost}, which needs {NODE_CPUS} CPU (left: " in text
            assert text.count(", 0 CPU free") == 2
        assert "2 s from now replacement='spread' takes effect" in texts[0]
        assert "its envs now run on machines that are left" in texts[1]
        assert batch.obs[lost, 2].tolist() == [0, 0]
        assert (np.delete(batch.obs[:, 2], lost) > 1).all()
        nodes = pool.stats().nodes
        assert sorted(worker for each in nodes for worker in each.workers) == list(range(N))
        homes = {link.started.node_id for link in (pool._runtime.backend._links[-1], link_of(pool, node))}
        assert len(nodes) == 4
        assert len(homes) == 2  # one worker on each machine that is left
        assert pool.call("add", 1.0) == tuple(float(i + 1) for i in range(N))
        assert pool.step(np.zeros(N, int)).obs[lost, 2].tolist() == [1, 1]


def wait_repeated(caught, pool):
    while len(caught) < 2:
        with pytest.raises(stepmill.RecvTimeout):
            pool.recv(N, timeout_s=0.2)


def test_a_pool_waits_for_a_machine_if_it_is_to_wait(ray_cluster, machine):
    with make_pool(replacement="wait") as pool:
        node, lost = lose(ray_cluster, machine, pool)
        with recorded() as caught:
            pool.send(np.zeros(N, int))
            wait_warned(caught, "its envs wait for a machine")
            wait_repeated(caught, pool)
        with added_machine(ray_cluster) as other:
            batch = pool.recv(N, timeout_s=HANG_GUARD_S)
            assert batch.obs[lost, 2].tolist() == [0, 0]
            assert link_of(pool, node).started.node_id == other.node_id
            assert len(pool.stats().nodes) == 3
            pool.close()


def test_a_pool_raises_what_is_missing_if_it_is_to_raise(ray_cluster, machine):
    with make_pool(replacement="raise") as pool:
        node, lost = lose(ray_cluster, machine, pool)
        pool.send(np.zeros(N, int))
        with (
            recorded() as warned,
            pytest.raises(stepmill.WorkerDied, match=f"on node {node} .* needs {NODE_CPUS} CPU") as caught,
        ):
            pool.recv(N, timeout_s=HANG_GUARD_S)
        assert "2 s from now replacement='raise' takes effect" in str(warned[0].message)
        faults = [caught.value, *caught.value.others]
        assert all(fault.node.startswith(f"node {node}") for fault in faults)
        told = {env_id for fault in faults for env_id in fault.env_ids}
        while told < set(lost):  # the node's workers fail together, but not in the same moment
            try:
                pool.recv(1, timeout_s=HANG_GUARD_S)
            except stepmill.WorkerDied as error:
                told |= {env_id for fault in [error, *error.others] for env_id in fault.env_ids}
        with added_machine(ray_cluster) as other:
            batch = pool.reset(env_ids=lost)
            assert batch.env_id.tolist() == lost
            assert link_of(pool, node).started.node_id == other.node_id
            pool.close()


def test_workers_need_their_custom_resources_wherever_they_run(ray_cluster, machine):
    resources = {"CPU": NODE_CPUS, "third": 1}
    with added_machine(ray_cluster) as other, make_pool(num_nodes=2, resources=resources) as pool:
        _, lost = lose(ray_cluster, machine, pool)
        with recorded() as caught:
            batch = pool.step(np.zeros(N, int))
        assert "0 CPU free, 0 third free" in str(caught[0].message)
        assert batch.obs[lost, 2].tolist() == [0] * 3
        assert {link.started.node_id for link in pool._runtime.backend._links} == {other.node_id}


def test_a_rollout_runs_a_lost_node_on_a_machine_that_is_left(ray_cluster, machine):
    nodes = stepmill.RayOptions(num_nodes=3, resources={"CPU": NODE_CPUS}, node_timeout_s=NODE_TIMEOUT_S)
    with RayRollout(
        counting_envs(N), 4, policy=stay, seed=0, nodes=nodes, num_workers=1, on_fault="truncate"
    ) as rollout:
        rollout.collect(timeout_s=HANG_GUARD_S)
        remove_machine(ray_cluster, machine)
        with recorded() as caught:
            while not rollout.num_restarts:
                fragments = rollout.collect(timeout_s=HANG_GUARD_S)
        assert "without reserved CPUs" in str(caught[-1].message)
        assert [fragment.env_ids.tolist() for fragment in fragments] == [[0, 1], [2, 3], [4, 5]]
        assert sum(fragment.is_first for fragment in fragments) == 1


def stay(obs, env_ids):
    return np.zeros(len(env_ids), int)
