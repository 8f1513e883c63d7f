"""Spare envs: which server runs which env, what the user sees, and that both depend on the data alone."""

from functools import partial

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.spec.errors import SpecMismatch, UsageError
from stepmill.testing.gates import Gate
from tests.harness.pools import begun
from tests.harness.spare_envs import Named, batched, named_pool


@pytest.mark.covers("A-12", "A-14")
def test_the_queue_is_first_in_first_out_in_the_order_of_env_ids():
    with begun(named_pool(3, 2, env=partial(Named, length=2), num_workers=2)) as pool:
        for expected in ([0, 1, 2], [0, 1, 2], [3, 4, 0], [3, 4, 0], [3, 4, 0], [1, 2, 3]):
            batch = pool.step([0, 0, 0])
            assert batch.env_id.tolist() == [0, 1, 2]
            assert batch.obs[:, 0].tolist() == expected


@pytest.mark.covers("A-11", "A-12", "G-8", "X-6")
def test_a_step_after_the_end_does_not_wait_for_a_reset_while_there_is_a_spare():
    with Gate() as gate, named_pool(1, 1, env=partial(Named, gate=str(gate.path), length=1), num_workers=2) as pool:
        pool.reset(seed=0)
        assert pool.step([0]).terminated.tolist() == [True]
        gate.wait_arrivals()  # the finished env is at its reset, and does not come back
        first = pool.step([0])
        assert first.obs[:, :3].tolist() == [[1, 1, 0]]
        assert first.reward.tolist() == [0.0]
        assert not first.terminated.any()
        assert not first.truncated.any()
        gate.open()


@pytest.mark.covers("A-15")
def test_a_reset_of_all_gives_every_env_its_own_object_back_and_does_not_wait_for_spares():
    with Gate() as gate, begun(named_pool(2, 1, env=partial(late_spare, str(gate.path)), num_workers=3)) as pool:
        pool.step([0, 0])
        assert pool.get_attr("identity") == (2, 0)  # both ended: the spare, then who ended first
        gate.open(1)
        assert pool.reset().obs[:, 0].tolist() == [0, 1]
        gate.wait_arrivals()  # the spare is reset as well, and nobody waits for it
        assert pool.reset().obs[:, 0].tolist() == [0, 1]
        gate.open(3)


def late_spare(gate, identity):
    return Named(identity, gate if identity == 2 else None, 1)


@pytest.mark.covers("A-B6", "G-8")
def test_calls_attributes_and_render_reach_the_env_that_serves_the_slot():
    with begun(named_pool(2, 1, env=partial(Named, length=1), num_workers=2)) as pool:
        pool.set_attr("level", 7)
        pool.step([0, 0])
        assert pool.get_attr("identity") == pool.render() == pool.call("get_wrapper_attr", "identity") == (2, 0)
        assert pool.get_attr("identity", env_ids=[2]) == (1,)  # who waits in the queue
        assert pool.get_attr("level", env_ids=[0, 1, 2]) == (7, 7, 7)
        pool.set_attr("level", [1, 2], env_ids=[0, 1])
        assert pool.get_attr("level", env_ids=[0, 1, 2]) == (1, 2, 7)


@pytest.mark.covers("A-B6")
def test_a_call_waits_for_a_reset_that_is_under_way():
    with Gate() as gate, named_pool(1, 1, env=partial(Named, gate=str(gate.path), length=1), num_workers=2) as pool:
        pool.reset(seed=0)
        pool.step([0])
        pool.step([0])
        pool.step([0])  # env 0 is served by its own object again, which is still at its reset
        future = pool.call_async("get_wrapper_attr", "num_resets")
        assert not future.is_done
        gate.open(2)
        assert future.result() == (2,)


@pytest.mark.covers("A-B7", "G-8")
def test_spares_are_checked_like_all_others_and_cannot_be_all_there_is():
    with pytest.raises(UsageError, match=r"resets.spare_envs=3 of 3 env_fns leaves no env to step"):
        named_pool(0, 3)
    with pytest.raises(SpecMismatch, match="env 2 has another observation space than env 0"):
        named_pool(2, 1, env=odd_spare)


def odd_spare(identity):
    env = Named(identity)
    if identity == 2:
        env.observation_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)
    return env


@pytest.mark.covers("A-B11", "G-8")
def test_a_batched_env_changes_places_as_a_whole():
    with begun(named_pool(2, 1, env=batched, num_workers=2)) as pool:
        ended = [pool.step([0, 0, 0, 0]) for _ in range(3)][-1]
        assert ended.terminated.all()
        assert ended.obs[:, 0].tolist() == [0, 1, 2, 3]
        first = pool.step([0, 0, 0, 0])
        assert first.obs[:, 0].tolist() == [4, 5, 0, 1]
        assert first.obs[:, 2].tolist() == [0, 0, 0, 0]
        assert first.reward.tolist() == [0.0] * 4


def test_with_autoreset_disabled_the_explicit_reset_takes_the_spare_unless_it_is_given_a_seed():
    with begun(named_pool(2, 1, env=partial(Named, length=1), num_workers=2, autoreset_mode="Disabled")) as pool:
        pool.step([0, 0])
        with pytest.raises(UsageError, match="reset them before stepping them"):
            pool.step([0, 0])
        assert pool.reset(env_ids=[0]).obs[:, :2].tolist() == [[2, 1]]
        again = pool.reset(env_ids=[1], seed={1: 50})
        assert again.obs[:, :2].tolist() == [[0, 3]]
        assert again.info["given"].tolist() == [50]
        pool.step([0, 0])


def test_large_observations_are_lent_although_they_were_staged():
    with begun(named_pool(2, 1, env=partial(wide, 2), num_workers=2)) as pool:
        kept = [pool.step([0, 0]).obs for _ in range(4)]
        assert [obs[:, 0, 0, 0].tolist() for obs in kept] == [[0, 1], [0, 1], [2, 0], [2, 0]]


class Wide(Named):
    observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def observe(self):
        obs = np.zeros(self.observation_space.shape, np.uint8)
        obs[:] = self.identity
        return obs


def wide(length, identity):
    return Wide(identity, None, length)


def test_make_vec_makes_the_spares_itself():
    envs = stepmill.make_vec(
        "CartPole-v1", num_envs=2, backend="thread", options=stepmill.PoolOptions(resets={"spare_envs": 1})
    )
    try:
        obs, _ = envs.reset(seed=0)
        assert envs.num_envs == 2
        assert obs.shape == (2, 4)
        for _ in range(60):
            envs.step(np.ones(2, np.int64))
    finally:
        envs.close()
