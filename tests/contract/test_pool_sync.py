"""A pool stepped in lock step: data, partial resets, seeds, episode statistics, copies and the caller's own arrays."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.backends.serial import SerialBackend
from stepmill.envs.opaque import OpaqueEnvMaker
from stepmill.pool.port import worker_settings
from stepmill.testing.check import check_backend
from stepmill.testing.envs import CountingEnv, ImageEnv, SeedRecorder
from tests.harness.odd_outputs import DisguiseEnv, OddRewardEnv, ScalarDisguiseEnv
from tests.harness.plain_envs import OldEnv
from tests.harness.pools import BACKENDS, begun, counting_envs, make_pool


@pytest.mark.parametrize("name", list(BACKENDS))
def test_every_backend_keeps_the_contract(name):
    check_backend(partial(make_pool, name))


def test_an_object_with_the_four_methods_of_a_backend_is_one():
    settings = worker_settings(stepmill.PoolOptions())
    check_backend(lambda env_fns: stepmill.Pool(env_fns, backend=SerialBackend(settings), num_workers=1))


def test_a_pool_has_gymnasiums_spaces(pool_of):
    pool = pool_of(counting_envs(3))
    assert pool.single_observation_space == spaces.Box(-1, 2**40, (3,), np.int64)
    assert pool.single_action_space == spaces.Discrete(100)
    assert pool.observation_space.shape == (3, 3)
    assert pool.action_space.shape == (3,)
    pool.reset(seed=0)
    pool.step(pool.action_space.sample())


def test_a_pool_of_other_envs_says_that_it_has_no_such_spaces():
    with (
        stepmill.Pool([OpaqueEnvMaker(OldEnv)], backend="serial") as pool,
        pytest.raises(stepmill.UsageError, match=r"no Gymnasium spaces .*pool.spec.observation"),
    ):
        pool.observation_space  # noqa: B018


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int32, np.uint8, np.uint64, np.float16, np.float32, np.float64, ">f8", np.bool_]
)
def test_whole_numbers_of_any_dtype_are_actions_of_a_discrete_space(pool_of, dtype):
    pool = begun(pool_of(counting_envs(2)))
    assert pool.step(np.array([1, 0]).astype(dtype)).reward.tolist() == [1.0, 0.0]


def test_odd_but_legal_rewards_pass(pool_of):
    pool = pool_of([partial(OddRewardEnv, length=1000)])
    pool.reset()
    for i, reward in enumerate(OddRewardEnv.REWARDS):
        got = pool.step([i]).reward
        assert got.dtype == np.float64
        assert np.array_equal(got, [float(np.asarray(reward))], equal_nan=True)


def test_observations_in_any_memory_layout_arrive_as_they_are(pool_of):
    pool = pool_of([DisguiseEnv] * 2)
    batch = pool.reset()
    for t in range(21):
        for name, wanted in DisguiseEnv.expected(t).items():
            got = batch.obs[name]
            assert got.dtype == wanted.dtype
            assert np.array_equal(got, np.stack([wanted, wanted])), (t, name)
        batch = pool.step([0, 0])


def test_numbers_of_no_dimension_come_in_any_dress(pool_of):
    pool = pool_of([ScalarDisguiseEnv])
    batch = pool.reset()
    for t in range(7):
        assert batch.obs["f4"].tolist() == batch.obs["f8"].tolist() == [t / 4]
        assert batch.obs["d"].tolist() == batch.obs["i8"].tolist() == [t]
        assert batch.obs["b"].tolist() == [t % 2 == 1]
        assert [part.tolist() for part in batch.obs["pair"]] == [[t], [[t / 2]]]
        batch = pool.step([0])


# ---------------------------------------------------------------- seeds


def _seeds_of(pool):
    return [list(seeds) for seeds in pool.get_attr("seeds")]


@pytest.mark.covers("G-20/seeds")
def test_seeds_may_be_one_for_all_or_a_list_or_a_dict(pool_of):
    pool = pool_of([SeedRecorder] * 3)
    pool.reset(seed=20, env_ids=[2, 0])
    seeds = [5, None, 7]
    pool.reset(seed=seeds)
    assert seeds == [5, None, 7]
    chosen = {0: 1, 2: 3}
    pool.reset(seed=chosen)
    assert chosen == {0: 1, 2: 3}
    assert _seeds_of(pool) == [[20, 5, 1], [None, None], [22, 7, 3]]


@pytest.mark.parametrize("seed", [2**31, 2**63, 2**64 - 1, 2**64, 2**200])
def test_a_seed_may_be_as_large_as_python_likes(pool_of, seed):
    pool = pool_of([_SeedKeeper])
    pool.reset(seed=seed)
    assert pool.get_attr("kept") == (seed,)


class _SeedKeeper(CountingEnv):
    def reset(self, *, seed=None, options=None):
        self.kept = seed
        return super().reset(seed=0)


def _play(pool, steps=5):
    seeds = [pool.reset(seed=100).obs[:, 0].tolist()]
    for _ in range(steps):
        batch = pool.step([0] * pool.num_envs)
        seeds.append(batch.obs[:, 0].tolist())
    return seeds


@pytest.mark.parametrize(("seeding", "seeds"), [("continue", (None, None)), ("fixed", (100, 101))])
def test_the_seeds_of_further_episodes_are_those_of_the_option_seeding(pool_of, seeding, seeds):
    pool = pool_of([partial(SeedRecorder, 1)] * 2, seeding=seeding)
    _play(pool)
    assert _seeds_of(pool) == [[100 + env_id, seed, seed] for env_id, seed in enumerate(seeds)]


@pytest.mark.covers("X-15")
def test_per_episode_gives_each_episode_of_each_env_a_seed_of_its_own(pool_of):
    pool = pool_of([partial(SeedRecorder, 1)] * 2, seeding="per_episode")
    _play(pool, 9)
    seeds = _seeds_of(pool)
    assert [len(own) for own in seeds] == [5, 5]
    assert len({seed for own in seeds for seed in own}) == 10
    assert all(seed is not None for own in seeds for seed in own)


# ---------------------------------------------------------------- where results lie


@pytest.mark.covers("G-12")
def test_copies_belong_to_the_caller(pool_of):
    pool = pool_of([partial(ImageEnv, i) for i in range(2)], copy=True)
    first = pool.reset(seed=0).obs
    first[:] = 0
    batch = pool.reset(env_ids=[0])
    assert (batch.obs[0] == ImageEnv.colour(0, 1)).all()
    assert first.flags.owndata or first.base is not None
    assert (pool.step([0, 0]).obs[1] == ImageEnv.colour(1, 1)).all()


@pytest.mark.covers("X-3")
def test_results_outlive_the_pool(pool_of):
    pool = pool_of([partial(ImageEnv, i) for i in range(2)])
    images = pool.reset(seed=0).obs
    pool.close()
    assert [int(image[5, 5, 1]) for image in images] == [ImageEnv.colour(0, 0), ImageEnv.colour(1, 0)]
    images[:] = 9
    assert (images == 9).all()


def test_recv_fills_the_arrays_it_is_given(pool_of):
    pool = begun(pool_of([partial(ImageEnv, i) for i in range(4)]))
    mine = np.zeros((4, 84, 84, 4), np.uint8)
    pool.send([0] * 4)
    batch = pool.recv(4, out=mine)
    assert np.shares_memory(batch.obs, mine)
    assert [int(mine[row, 0, 0, 0]) for row in range(4)] == [ImageEnv.colour(i, 1) for i in batch.env_id]


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 84, 84, 3), np.uint8),
        np.zeros((3, 84, 84, 4), np.uint8),
        np.zeros((2, 84, 84, 4), np.int8),
        {"a": 1},
        5,
    ],
    ids=["shape", "rows", "dtype", "structure", "number"],
)
def test_an_out_that_does_not_fit_is_refused_and_nothing_is_lost(pool_of, out):
    pool = begun(pool_of([partial(ImageEnv, i) for i in range(2)]))
    pool.send([0, 0])
    with pytest.raises(stepmill.UsageError):
        pool.recv(2, out=out)
    assert sorted(pool.recv(2).env_id.tolist()) == [0, 1]


def test_a_new_observation_may_be_written_to_by_its_holder(pool_of):
    pool = begun(pool_of([partial(ImageEnv, i) for i in range(2)]))
    images = pool.step([0, 0]).obs
    assert images.flags.writeable
    images += 1
    assert (pool.step([0, 0]).obs[0] == ImageEnv.colour(0, 2)).all()


TOO_LARGE = "actions have numbers that int64 cannot hold; give actions of the space"


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([1, 1, 1], "got 3 actions for 2 envs; give one action per env"),
        (np.ones((2, 1), np.int64), "actions have shape (2, 1); give shape (2,)"),
        (np.ones(2, complex), "actions have dtype complex128; give dtype int64"),
        (np.array([2**63, 1], np.uint64), TOO_LARGE),
        *((np.array([1.0, wrong]), TOO_LARGE) for wrong in (0.5, np.nan, np.inf, -1e30, 2.0**63)),
    ],
)
def test_actions_of_another_form_than_the_spaces_are_refused_with_what_to_give(pool_of, actions, text):
    pool = begun(pool_of(counting_envs(2)))
    with pytest.raises(stepmill.UsageError, match=f"^{re.escape(text)}$"):
        pool.step(actions)
    assert pool.step([1, 1]).reward.tolist() == [1.0] * 2


class Unreadable:
    """An object that NumPy asks for an array, as it asks a tensor of torch."""

    def __init__(self, error):
        self.error = error

    def __array__(self, *_, **__):
        raise self.error


def test_actions_that_are_no_array_are_refused_with_the_reason(pool_of):
    pool = begun(pool_of(counting_envs(2)))
    with pytest.raises(stepmill.UsageError, match=r"^actions are not an array: .* inhomogeneous .*; give an array of"):
        pool.step([[1], [1, 2]])
    with pytest.raises(stepmill.UsageError, match=r"^actions are not an array: it requires grad; give an array of"):
        pool.step(Unreadable(RuntimeError("it requires grad.")))
    with pytest.raises(KeyboardInterrupt):
        pool.step(Unreadable(KeyboardInterrupt()))
    assert pool.step([1, 1]).reward.tolist() == [1.0] * 2
