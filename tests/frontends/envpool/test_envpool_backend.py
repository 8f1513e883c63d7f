"""Real EnvPool pools behind stepmill's Pool and VectorEnv."""

from __future__ import annotations

import envpool
import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.envs.envpool import EnvPoolTask, GivenEnvPool
from stepmill.frontends.gymnasium.spaces import read_spaces
from stepmill.pool.port import PoolPort
from tests.frontends.guides import run_guide

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


def make_pool(task_id="CartPole-v1", num_envs=4, *, is_async=False, **options):
    task = EnvPoolTask(task_id, {"num_threads": 2}, is_async=is_async)
    return stepmill.Pool([task] * num_envs, backend="envpool", options=stepmill.PoolOptions(**options))


def test_data_are_those_of_the_pool_itself():
    theirs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=8, seed=5)
    rng = np.random.default_rng(0)
    with make_pool(num_envs=8) as ours:
        obs, _ = theirs.reset()
        np.testing.assert_array_equal(ours.reset(seed=5).obs, obs)
        for _ in range(120):
            actions = rng.integers(0, 2, 8)
            obs, reward, terminated, truncated, info = theirs.step(actions)
            batch = ours.step(actions)
            np.testing.assert_array_equal(batch.obs, obs)
            np.testing.assert_array_equal(batch.reward, reward)
            np.testing.assert_array_equal(batch.terminated, terminated)
            np.testing.assert_array_equal(batch.truncated, truncated)
            np.testing.assert_array_equal(batch.info["elapsed_step"], info["elapsed_step"])


@pytest.mark.parametrize(
    "task_id", ["FrozenLake-v1", "Pendulum-v1", "MountainCar-v0", "CheetahRun-v1", "HalfCheetah-v5", "Pong-v5"]
)
def test_every_kind_of_space_is_taken(task_id):
    with make_pool(task_id, is_async=True) as pool:
        assert pool.reset().env_id.tolist() == [0, 1, 2, 3]
        space = gymnasium.vector.utils.batch_space(read_spaces(PoolPort(pool).env_specs)[0][1], 4)
        for _ in range(5):
            pool.send(space.sample())
            assert sorted([*pool.recv(1).env_id, *pool.recv(3).env_id]) == [0, 1, 2, 3]


@pytest.mark.covers("X-14")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_masked_reset_of_fewer_envs_than_a_batch_does_not_deadlock(is_async):
    with make_pool(is_async=is_async) as pool:
        pool.reset()
        pool.step([1, 1, 1, 1])
        batch = pool.reset(env_ids=[2])
        assert batch.env_id.tolist() == [2]
        assert batch.info["elapsed_step"].tolist() == [0]


@pytest.mark.covers("X-14")
@pytest.mark.parametrize("is_async", [False, True])
def test_resetting_twice_neither_aborts_nor_loses_a_result(is_async):
    with make_pool(is_async=is_async) as pool:
        pool.reset_async()
        pool.reset_async()
        pool.reset_async(env_ids=[1])
        assert sorted(pool.recv().env_id.tolist()) == [0, 1, 2, 3]
        with pytest.raises(stepmill.UsageError, match="nothing pending"):
            pool.recv()


@pytest.mark.covers("X-14")
def test_an_episode_that_ended_is_reset_once_in_every_mode():
    for mode in ("NextStep", "SameStep", "Disabled"):
        with make_pool("MountainCar-v0", autoreset_mode=mode) as pool:
            pool.reset()
            for _ in range(199):
                pool.step([0, 1, 2, 1])
            ended = pool.step([0, 1, 2, 1])
            assert ended.truncated.all()
            if mode == "NextStep":
                assert ended.info["elapsed_step"].tolist() == [200] * 4
                assert pool.step([0, 1, 2, 1]).info["elapsed_step"].tolist() == [0] * 4
            elif mode == "SameStep":
                assert ended.info["final_info"]["elapsed_step"].tolist() == [200] * 4
                assert ended.info["elapsed_step"].tolist() == [0] * 4
            else:
                assert pool.reset().info["elapsed_step"].tolist() == [0] * 4
            assert pool.step([0, 1, 2, 1]).info["elapsed_step"].tolist() == [1] * 4


def test_seeds_are_for_all_envs_or_none():
    with make_pool() as pool:
        first = pool.reset(seed=7).obs
        np.testing.assert_array_equal(pool.reset(seed=7).obs, first)
        np.testing.assert_array_equal(pool.reset(seed=[10, 8, 9, 7]).obs[[3, 1, 2]], first[[0, 1, 2]])
        with pytest.raises(stepmill.EnvError, match="only seed all envs at once"):
            pool.reset(seed={1: 5}, env_ids=[1])
        pool.reset()
        with pytest.raises(stepmill.EnvError, match="32 bits"):
            pool.reset(seed=2**40)


@pytest.mark.parametrize("batch_size", [4, 2])
def test_a_pool_that_exists_is_used_or_made_again_if_it_returns_blocks(batch_size):
    given = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, batch_size=batch_size, seed=5, num_threads=2)
    maker = GivenEnvPool(given)
    with stepmill.Pool([maker] * maker.num_envs, backend="envpool") as pool:
        first = pool.reset()
        pool.send([1], env_ids=[3])
        assert pool.recv(timeout_s=30).env_id.tolist() == [3]
    fresh = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=5)
    np.testing.assert_array_equal(first.obs, fresh.reset()[0])
    if batch_size == 4:
        assert given.step(np.array([1, 1, 1, 1]))[0].shape == (4, 4)  # it is its owner's again


def test_what_cannot_be_run_says_so():
    with pytest.raises(stepmill.EnvError, match="EnvPool has no task 'Nonsense-v0'"):
        make_pool("Nonsense-v0")
    with pytest.raises(stepmill.EnvError, match="EnvPoolTask got num_envs, which the pool chooses"):
        stepmill.Pool([EnvPoolTask("CartPole-v1", {"num_envs": 3})] * 2, backend="envpool")
    with pytest.raises(stepmill.EnvError, match="env_type='gymnasium'"):
        stepmill.Pool([GivenEnvPool(envpool.make_dm("CartPole-v1", num_envs=2))] * 2, backend="envpool")
    with pytest.raises(stepmill.EnvError, match="has 2 envs, but got 3 env functions"):
        stepmill.Pool([GivenEnvPool(envpool.make_gymnasium("CartPole-v1", num_envs=2))] * 3, backend="envpool")
    with pytest.raises(stepmill.EnvError, match="backend='envpool'"):
        stepmill.Pool([EnvPoolTask("CartPole-v1")], backend="serial")
    with make_pool() as pool, pytest.raises(stepmill.EnvError, match="take no reset options"):
        pool.reset(options={"low": 1})


def test_a_vector_env_is_made_by_the_name_of_the_task():
    envs = stepmill.make_vec("CartPole-v1", num_envs=3, backend="envpool", num_threads=1)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (3, 4)
    assert envs.single_action_space == gymnasium.spaces.Discrete(2)
    obs, reward, _, _, info = envs.step(np.array([0, 1, 0]))
    assert reward.tolist() == [1, 1, 1]
    assert info["elapsed_step"].tolist() == [1, 1, 1]
    assert envs.get_attr("num_envs") == (3, 3, 3)
    envs.close()
    with pytest.raises(stepmill.UsageError, match="EnvPool cannot be wrapped"):
        stepmill.make_vec("CartPole-v1", 2, backend="envpool", wrappers=[gymnasium.Wrapper])


def test_the_guide_runs(tmp_path):
    pytest.importorskip("jax")  # the guide's last program compiles a loop with it
    run_guide("envpool", tmp_path, ignored=".*precision lowered by casting")
