"""Options of resets: for all envs or each its own, once or for every reset to come."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import BatchedCountingEnv, CountingEnv, SeedRecorder
from tests.harness.pools import make_pool


def recorders(num_envs, length=2):
    return [lambda: SeedRecorder(length)] * num_envs


@pytest.mark.covers("D-15", "M-11", "G-20/options")
def test_each_env_may_have_options_of_its_own(pool_of):
    pool = pool_of(recorders(3))
    pool.reset(options={0: {"level": 1}, 2: {"level": 3}})
    pool.reset(options=[{"level": 4}, None, {"level": 6}])
    pool.reset(env_ids=[2, 1], options=[{"level": 7}, {"level": 8}])
    assert pool.get_attr("options") == (
        [{"level": 1}, {"level": 4}],
        [None, None, {"level": 8}],
        [{"level": 3}, {"level": 6}, {"level": 7}],
    )


class OnlySeeds(CountingEnv):
    def reset(self, seed=None):
        return super().reset(seed=seed)


def test_an_env_whose_reset_takes_no_options_gets_none_unless_the_user_has_some(pool_of):
    pool = pool_of([OnlySeeds] * 2)
    pool.reset(seed=3)
    pool.reset()
    with pytest.raises(stepmill.EnvError, match="unexpected keyword argument 'options'"):
        pool.reset(options={"level": 1})


# The engine has room for 256 bytes beside a command; what is larger goes another way. Sizes are on both sides of that.
SIZES = [0, 100_000, 3, *range(190, 270, 7), 1_000_000, 1]


def test_options_of_any_size_arrive_whatever_came_before(pool_of):
    pool = pool_of(recorders(2))
    texts = [[f"{size % 10}" * size, f"{size % 7}" * (size // 2)] for size in SIZES]
    for text, other in texts:
        pool.reset(options=[{"text": text}, {"text": other}])
    assert pool.get_attr("options") == tuple([{"text": pair[i]} for pair in texts] for i in range(2))


def test_a_mapping_with_names_is_for_all_envs_and_copied_for_each(pool_of):
    options = {"level": [1]}
    pool = pool_of(recorders(2))
    pool.reset(options=options)
    pool.reset(options={})
    assert pool.get_attr("options") == ([{"level": [1]}, {}],) * 2
    assert options == {"level": [1]}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({7: {}}, r"envs \[7\], which this call does not reset"),
        ([{}], "got 1 options for 3 envs"),
        ("hard", "not a str"),
        (5, "not an? int"),
        (["a"] * 3, "the str 'a'"),
        ({1: "hard"}, "the str 'hard'"),
        ([None, None, 3], "the int 3"),
    ],
)
def test_options_that_fit_no_env_are_refused_and_nothing_is_reset(options, text):
    pool = make_pool("serial", recorders(3))
    with pool, pytest.raises(stepmill.UsageError, match=text):
        pool.reset(options=options)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("overlap_resets", [False, True])
@pytest.mark.covers("D-15", "D-B9", "X-15")
def test_kept_options_are_given_to_automatic_resets(pool_of, mode, overlap_resets):
    pool = pool_of(recorders(2, 1), autoreset_mode=mode, resets={"overlap": overlap_resets})
    pool.reset(options={0: {"level": 1}}, persist_options=True)
    for _ in range(2):
        pool.step([0, 0])
    kept, free = pool.get_attr("options")
    assert kept[:2] == [{"level": 1}, {"level": 1}]
    assert set(map(str, free)) == {"None"}


@pytest.mark.covers("D-15")
def test_kept_options_are_given_to_every_reset_that_has_none(pool_of):
    class Modest(SeedRecorder):
        def _observe(self):
            return np.zeros(3, np.int64)

    pool = pool_of([Modest] * 2)
    pool.reset(options={"level": 1}, persist_options=True)
    pool.reset()
    pool.reset(options={"level": 2})  # this once
    pool.reset(seed=2**70)  # a seed too large for a word travels as options do
    pool.reset(options={0: None}, persist_options=True)  # env 0 forgets
    pool.reset()
    one, other = pool.get_attr("options")
    assert one == [{"level": 1}, {"level": 1}, {"level": 2}, {"level": 1}, None, None]
    assert other == [{"level": 1}, {"level": 1}, {"level": 2}, {"level": 1}, {"level": 1}, {"level": 1}]
    assert pool.get_attr("seeds")[0][3] == 2**70


def test_an_env_that_changes_its_options_gets_them_whole_again(pool_of):
    class Greedy(SeedRecorder):
        def reset(self, *, seed=None, options=None):
            self.taken = options["levels"].pop()
            return super().reset(seed=seed, options=options)

    pool = pool_of([Greedy] * 2)
    pool.reset(options={"levels": [1, 2]}, persist_options=True)
    pool.reset()
    assert pool.get_attr("taken") == (2, 2)


@pytest.mark.parametrize("mask", [{}, {"reset_mask": np.ones(2, np.bool_)}])
def test_a_vector_env_keeps_the_options_that_it_is_told_to_keep(vector_env_of, mask):
    envs = vector_env_of(recorders(2, 1))
    envs.reset(options={"level": 5, **mask}, persist_options=True)
    envs.step([0, 0])
    envs.step([0, 0])  # resets
    envs.reset()
    assert envs.get_attr("options") == ([{"level": 5}] * 3,) * 2


def test_options_that_do_not_pickle_are_refused_by_name_of_the_trouble(pool_of):
    pool = pool_of(recorders(1))
    with pytest.raises(stepmill.UsageError, match=r"a lock in the options of a reset.*cannot be pickled.*give the env"):
        pool.reset(options={"lock": __import__("threading").Lock()})
    pool.reset()


@pytest.mark.covers("G-5", "D-B9")
@pytest.mark.parametrize("where", ["fork"])
@pytest.mark.parametrize("on_fault", ["raise", "truncate"])
def test_kept_options_survive_the_worker(pool_of, where, on_fault):
    pool = pool_of(recorders(2, 50), num_workers=2, on_fault=on_fault)
    pool.reset(options={0: {"level": 1}, 1: {"level": 2}}, persist_options=True)
    os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
    if on_fault == "raise":
        with pytest.raises(stepmill.WorkerDied):
            pool.step([0, 0])
        pool.reset()
    else:
        while not pool.step([0, 0]).truncated[1]:
            pass
        pool.step([0, 0])
    (given,) = pool.get_attr("options", env_ids=[1])
    assert given
    assert all(options == {"level": 2} for options in given)


def test_options_of_batched_envs_are_not_kept():
    with (
        make_pool("serial", [BatchedCountingEnv]) as pool,
        pytest.raises(stepmill.UsageError, match="does not work with batched envs"),
    ):
        pool.reset(options={"level": 1}, persist_options=True)
