"""Workers and nodes of a Ray pool whose envs take long to be built again."""

from __future__ import annotations

import os
import time
from functools import partial

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, kill_worker
from tests.harness.ray_nodes import kill_actor

pytest.importorskip("ray")
pytestmark = pytest.mark.ray


class SlowToBuild(gymnasium.Env):
    """Counts its steps. If a file `wait-ENV_ID` exists, the constructor first writes `building` there and waits until it is gone."""

    observation_space = gymnasium.spaces.Discrete(100_000)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, folder, env_id):
        self.count, wait = 0, folder / f"wait-{env_id}"
        if wait.exists():
            (folder / "building").write_text(str(os.getpid()))
        while wait.exists():
            time.sleep(0.01)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return 0, {}

    def step(self, action):
        self.count += 1
        return self.count, 0.0, False, False, {}


def make_pool(folder):
    env_fns = [partial(SlowToBuild, folder, env_id) for env_id in range(4)]
    nodes = stepmill.RayOptions(num_nodes=2, resources={"CPU": 0})
    return stepmill.Pool(env_fns, backend="ray", num_workers=4, ray=nodes, on_fault="truncate")


def wait_until(is_done):
    until = time.monotonic() + HANG_GUARD_S
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_constructor_that_hangs_does_not_delay_the_restarts_of_the_nodes_other_workers(ray_cluster, tmp_path):
    with begun(make_pool(tmp_path)) as pool:
        (tmp_path / "wait-0").touch()
        kill_worker(pool, 0)
        pool.send(np.zeros(1, int), [0])
        assert pool.recv(1, timeout_s=HANG_GUARD_S).truncated.tolist() == [True]
        pool.send(np.zeros(1, int), [0])
        wait_until((tmp_path / "building").exists)
        kill_worker(pool, 1)
        for truncated in (True, False):
            pool.send(np.zeros(1, int), [1])
            assert pool.recv(1, timeout_s=HANG_GUARD_S).truncated.tolist() == [truncated]
        (tmp_path / "wait-0").unlink()
        assert pool.recv(1, timeout_s=HANG_GUARD_S).env_id.tolist() == [0]


def test_a_pool_that_is_closed_while_a_lost_node_is_replaced_leaves_no_actor(ray_cluster, tmp_path):
    with begun(make_pool(tmp_path)) as pool:
        (tmp_path / "wait-2").touch()
        kill_actor(pool, 1)
        pool.step(np.zeros(4, int))
        building = tmp_path / "building"
        wait_until(lambda: building.exists() and building.read_text())
    assert not leaks.wait_until_gone([int(building.read_text())], timeout_s=HANG_GUARD_S)
