"""Kernels on the nodes of a Ray cluster: the data of the kernel backend, and faults that name the env and its node."""

from __future__ import annotations

import numpy as np
import pytest

import stepmill
from tests.harness.ray_nodes import kill_actor, link_of

pytest.importorskip("ray")
pytest.importorskip("numba")

from tests.harness.pools import assert_equal, begun
from tests.kernels.kernels import endless, faulty, parts, walk

pytestmark = pytest.mark.ray
N = 7


def nodes(num_nodes=2):
    return stepmill.RayOptions(num_nodes=num_nodes, resources={"CPU": 0}, host="kernel")


def make(kernel, num_envs=N, num_nodes=2, **options):
    return stepmill.Pool([kernel] * num_envs, backend="ray", ray=nodes(num_nodes), num_workers=4, **options)


@pytest.mark.parametrize(
    ("mode", "seeding"), [("NextStep", "per_episode"), ("SameStep", "fixed"), ("NextStep", "continue")]
)
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_the_data_of_any_number_of_nodes_are_those_of_the_kernel_backend(ray_cluster, num_nodes, mode, seeding):
    def run(pool):
        rng = np.random.default_rng(1)
        return [pool.reset(seed=5), *(pool.step(rng.integers(0, 4, N)) for _ in range(60))]

    options = {"autoreset_mode": mode, "seeding": seeding}
    with stepmill.Pool([walk] * N, backend="kernel", num_workers=2, **options) as pool:
        expected = run(pool)
    with make(walk, num_nodes=num_nodes, **options) as pool:
        assert pool.num_workers == num_nodes
        actual = run(pool)
    assert_equal([*map(tuple, actual)], [*map(tuple, expected)])


def trajectories(pool):
    """Return the results of each env; its actions depend on nothing but the env and the step."""
    seen = {env_id: [] for env_id in range(N)}
    pool.reset(seed=5)
    pool.send(np.zeros(N, np.int64))
    while min(map(len, seen.values())) < 40:
        batch = pool.recv(min_envs=1)
        for place, env_id in enumerate(batch.env_id.tolist()):
            seen[env_id].append((batch.obs[place].tolist(), batch.reward[place], batch.terminated[place]))
        actions = [(7 * env_id + len(seen[env_id])) % 4 for env_id in batch.env_id.tolist()]
        pool.send(np.array(actions), batch.env_id)
    return {env_id: results[:40] for env_id, results in seen.items()}


def test_results_that_are_received_as_they_come_are_those_of_the_kernel_backend(ray_cluster):
    with stepmill.Pool([walk] * N, backend="kernel") as pool:
        expected = trajectories(pool)
    with make(walk) as pool:
        assert trajectories(pool) == expected


def test_observations_and_actions_of_several_parts_pass(ray_cluster):
    def run(pool):
        pool.reset(seed=0)
        actions = {"by": np.array([0, 1, 2]), "scale": np.array([0.5, 1.0, 1.5])}
        return [pool.step(actions) for _ in range(8)]

    with stepmill.Pool([parts] * 3, backend="kernel") as pool:
        expected = run(pool)
    with make(parts, 3) as pool:
        actual = run(pool)
    assert_equal([*map(tuple, actual)], [*map(tuple, expected)])


def test_methods_and_fields_are_those_of_each_env(ray_cluster):
    with begun(make(walk, 4)) as pool:
        pool.set_attr("place", [0.5, 1.5, 2.5, 3.5])
        pool.send(np.ones(4, np.int64))
        future = pool.call_async("jump", 1.0)
        pool.recv(4)
        assert np.allclose(future.result(), [1.5, 2.5, 3.5, 4.5], atol=1.0)
        assert pool.get_attr("calls", env_ids=[1, 3]) == (1, 1)
        with pytest.raises(stepmill.EnvError, match="does not declare a method 'fly'"):
            pool.call("fly", env_ids=[3])


def test_what_a_kernel_raises_is_an_error_of_its_env(ray_cluster):
    with begun(make(faulty, 4)) as pool:
        with pytest.raises(stepmill.EnvError, match=r"env 3 raised ValueError.*no such move"):
            pool.step(np.array([0, 0, 0, 2]))
        assert pool.recv(3).env_id.tolist() == [0, 1, 2]
        pool.reset(env_ids=[3])
        assert pool.step(np.zeros(4, np.int64)).obs[:, 0].tolist() == [2, 2, 2, 1]


def test_a_lost_node_of_kernels_is_replayed_bit_for_bit(ray_cluster):
    def run(pool, kills):
        rng, results = np.random.default_rng(0), [pool.reset(seed=3)]
        for step in range(30):
            if step in kills:
                kill_actor(pool, kills[step])
            results.append(pool.step(rng.integers(0, 4, N)))
        return results

    options = {"seeding": "per_episode", "on_fault": "replay"}
    with stepmill.Pool([walk] * N, backend="kernel", **options) as pool:
        expected = run(pool, {})
    with make(walk, **options) as pool:
        actual = run(pool, {9: 0, 20: 1})
    assert_equal([*map(tuple, actual)], [*map(tuple, expected)])


def test_a_node_whose_env_hangs_is_ended_and_replaced(ray_cluster):
    with begun(make(endless, 4, on_fault="truncate", step_timeout_s=0.5)) as pool:
        batch = pool.step(np.array([0, 0, 0, 4]))
        assert batch.truncated.tolist() == [False, False, True, True]
        assert "on node 1" in batch.info["fault"]["message"][3]
        assert "its env 3 has not returned within step_timeout_s" in batch.info["fault"]["message"][3]
        assert pool.step(np.zeros(4, np.int64)).obs[:, 0].tolist() == [2, 2, 0, 0]
        assert link_of(pool, 1).cause is None


def test_options_without_meaning_for_kernels_are_refused():
    with pytest.raises(stepmill.UsageError, match="envs_per_worker"):
        make(walk, envs_per_worker=1)


def test_a_limit_that_kernels_do_not_keep_is_named(ray_cluster):
    with pytest.warns(
        RuntimeWarning, match="reset_timeout_s: no effect on the ray backend, because its envs run in threads of nodes"
    ):
        make(walk, 2, reset_timeout_s=1.0).close()


def test_env_fns_that_are_no_kernel_are_refused(ray_cluster):
    with pytest.raises(stepmill.UsageError, match="runs the envs of one kernel"):
        make(lambda: None, 2)
