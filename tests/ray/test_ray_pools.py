"""Pools and vector envs on a Ray cluster: the contract of a backend, the data of the serial backend, and what stats() counts."""

from __future__ import annotations

import threading
from functools import partial

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.testing import check_backend
from stepmill.testing.compare import find_difference
from tests.harness.pools import begun, counting_envs, make_pool

pytest.importorskip("ray")
pytestmark = pytest.mark.ray
NODES = {num: stepmill.RayOptions(num_nodes=num, resources={"CPU": 0}) for num in (1, 2, 3)}


def test_the_backend_keeps_the_contract(ray_cluster):
    check_backend(partial(make_pool, "ray"))


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_the_data_of_any_number_of_nodes_are_those_of_one_machine(ray_cluster, num_nodes):
    def run(**options):
        made = stepmill.make_vec("CartPole-v1", 6, seeding="per_episode", autoreset_mode="SameStep", **options)
        with made as envs:
            rng = np.random.default_rng(1)
            results = [envs.reset(seed=5)]
            results += [envs.step(rng.integers(0, 2, 6)) for _ in range(60)]
            return results

    expected = run(backend="serial")
    actual = run(backend="ray", num_workers=3, ray=NODES[num_nodes])
    for ours, theirs in zip(actual, expected, strict=True):
        assert find_difference(tuple(ours), tuple(theirs), "result") is None


def make_lock(env):
    return threading.Lock()


@pytest.mark.parametrize("host", ["process", "thread"])
def test_a_result_that_cannot_be_sent_is_told_as_such_and_at_once(ray_cluster, host):
    options = stepmill.RayOptions(num_nodes=1, resources={"CPU": 0}, host=host)
    with make_pool("ray", counting_envs(2), num_workers=1, ray=options) as pool:
        with pytest.raises(stepmill.EnvError, match=r"a _thread\.lock cannot be sent to another process"):
            pool.call(make_lock)
        assert pool.call("add", 1) == (1, 2)


def test_results_are_received_as_they_come(ray_cluster):
    with begun(make_pool("ray", counting_envs(4), num_workers=4)) as pool:
        seen = dict.fromkeys(range(4), 0)
        pool.send(np.zeros(4, int))
        for _ in range(60):
            batch = pool.recv(min_envs=1)
            for env_id, obs in zip(batch.env_id.tolist(), batch.obs.tolist(), strict=True):
                seen[env_id] += 1
                assert obs == [env_id, *divmod(seen[env_id], 6)]
            pool.send(np.zeros(len(batch.env_id), int), batch.env_id)
        pool.recv(4)


def test_large_observations_and_infos_pass_whole(ray_cluster):
    class Large(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (200, 300), np.uint8)
        action_space = gymnasium.spaces.Discrete(256)

        def reset(self, *, seed=None, options=None):
            return np.zeros((200, 300), np.uint8), {"options": options}

        def step(self, action):
            return np.full((200, 300), action, np.uint8), 0.0, False, False, {"text": "x" * 100_000 + str(action)}

    with make_pool("ray", [Large] * 4, num_workers=2) as pool:
        batch = pool.reset(options={"blob": "y" * 50_000})
        assert [len(blob) for blob in batch.info["options"]["blob"]] == [50_000] * 4
        for step in range(5):
            batch = pool.step(np.arange(4) + step)
            assert (batch.obs == (np.arange(4) + step)[:, None, None]).all()
            assert [text[100_000:] for text in batch.info["text"]] == [str(each + step) for each in range(4)]
        nodes = pool.stats().nodes
        assert [node.workers for node in nodes] == [(0,), (1,)]
        assert all(node.received_bytes > 5 * 2 * 60_000 for node in nodes)
        assert all(node.messages < 60 for node in nodes)
