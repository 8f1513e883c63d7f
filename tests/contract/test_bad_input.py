"""A caller's mistake is a typed error that names it. It is raised before anything is changed, and the pool stays usable."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import GATED_ACTION, GateEnv
from stepmill.testing.sampled import SampledEnv, describe
from tests.harness.pools import begun, counting_envs

ACTION_SPACE = spaces.Dict(
    {
        "move": spaces.Discrete(4),
        "push": spaces.Box(-1, 1, (3,), np.float32),
        "keys": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(3, start=5)]),
    }
)
N = 3
GOOD = {
    "move": np.zeros(N, np.int64),
    "push": np.zeros((N, 3), np.float32),
    "keys": (np.zeros((N, 2), np.int8), np.full(N, 5)),
}
BAD_ACTIONS = {
    "nothing": None,
    "a number": 3,
    "a list": [1, 2, 3],
    "a key missing": {key: GOOD[key] for key in ("move", "push")},
    "a key too many": {**GOOD, "more": np.zeros(N)},
    "a row missing": {**GOOD, "push": np.zeros((N - 1, 3), np.float32)},
    "a row too many": {**GOOD, "move": np.zeros(N + 1, np.int64)},
    "another shape": {**GOOD, "push": np.zeros((N, 4), np.float32)},
    "a dimension missing": {**GOOD, "push": np.zeros(N, np.float32)},
    "a dimension too many": {**GOOD, "move": np.zeros((N, 1), np.int64)},
    "numbers with fractions": {**GOOD, "move": np.full(N, 0.5)},
    "complex numbers": {**GOOD, "push": np.zeros((N, 3), np.complex64)},
    "text": {**GOOD, "move": np.array(["a", "b", "c"])},
    "objects": {**GOOD, "move": np.array([None, 1, {}], object)},
    "a tuple too short": {**GOOD, "keys": (np.zeros((N, 2), np.int8),)},
    "a dict for a tuple": {**GOOD, "keys": {"0": np.zeros((N, 2), np.int8), "1": np.full(N, 5)}},
    "an array for a dict": np.zeros((N, 3)),
    "a list of dicts": [{"move": 1}] * N,
}
NAMED = {  # in the message of the error
    "another shape": "push",
    "text": "move",
    "a key missing": "keys",
    "a list of dicts": "give its structure once, with arrays of one row per env",
}


# What is checked before anything reaches a backend is tried on one.
ONE_BACKEND = pytest.mark.parametrize("where", ["thread"])


@pytest.fixture
def counting_pool(pool_of):
    return begun(pool_of(counting_envs(N)))


def _assert_whole(pool):
    """Every env takes its next step, and nobody has taken one before."""
    assert pool.get_attr("num_steps") == (0,) * N
    assert pool.step([1, 2, 3]).reward.tolist() == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- actions


@ONE_BACKEND
@pytest.mark.covers("G-11")
@pytest.mark.parametrize("what", BAD_ACTIONS)
def test_actions_that_do_not_fit_are_refused_and_no_env_steps(pool_of, what):
    pool = begun(pool_of([partial(SampledEnv, spaces.Discrete(2), ACTION_SPACE)] * N))
    before = describe(BAD_ACTIONS[what])
    for attempt in (pool.step, pool.send):
        with pytest.raises(stepmill.UsageError, match=NAMED.get(what)):
            attempt(BAD_ACTIONS[what])
    assert describe(BAD_ACTIONS[what]) == before
    assert [state.name for state in pool.states] == ["IDLE"] * N
    assert pool.step(GOOD).env_id.tolist() == [0, 1, 2]


@ONE_BACKEND
def test_actions_may_lie_in_memory_in_any_way(counting_pool):
    wide = np.arange(12).reshape(3, 4)
    swapped = np.array([4, 5, 6], ">i8")
    frozen = np.array([7, 8, 9])
    frozen.flags.writeable = False
    for actions in (wide[:, 1], wide[::-1, 2], swapped, frozen):
        assert counting_pool.step(actions).reward.tolist() == [float(action) for action in actions]


@pytest.mark.covers("G-12")
def test_the_callers_arrays_are_never_changed(pool_of):
    pool = pool_of([partial(SampledEnv, ACTION_SPACE, ACTION_SPACE)] * N)
    seeds, options, ids, actions = [1, None, 3], {"a": np.arange(3)}, [2, 0], copy.deepcopy(GOOD)
    before = describe([seeds, options, ids, actions])
    pool.reset(seed=seeds, options=options)
    pool.reset(env_ids=ids, options=options)
    pool.step(actions)
    assert describe([seeds, options, ids, actions]) == before


# ---------------------------------------------------------------- env ids


BAD_IDS: list[tuple[Any, str]] = [
    *(([0, number], str(number)) for number in (3, -1, 99, 2**40)),
    *((ids, "env_ids") for ids in ([0.0, 1.0], [1.7], ["0"], np.array([0.5]), "01", [[0], [1]], 1, [None])),
    *((mask, "flatnonzero") for mask in ([True, False, True], np.array([True, False, True]), [True, 2], (np.True_, 2))),
]


@ONE_BACKEND
@pytest.mark.parametrize(("ids", "text"), BAD_IDS, ids=repr)
def test_ids_that_are_none_are_refused(counting_pool, ids, text):
    for attempt in (
        lambda: counting_pool.send([1, 1], ids),
        lambda: counting_pool.reset(env_ids=ids),
        lambda: counting_pool.call("add", 1.0, env_ids=ids),
        lambda: counting_pool.render(env_ids=ids),
    ):
        with pytest.raises(stepmill.UsageError, match=text):
            attempt()
    _assert_whole(counting_pool)


@ONE_BACKEND
def test_ids_that_come_twice_and_other_numbers_of_actions_than_of_ids_are_refused(counting_pool):
    for actions, ids in (([1, 1], [1, 1]), ([1], [0, 1]), ([1, 2, 3], [0, 1]), ([1, 2], None)):
        with pytest.raises(stepmill.UsageError):
            counting_pool.send(actions, ids)
    with pytest.raises(stepmill.UsageError, match="1"):
        counting_pool.reset(env_ids=[1, 1])
    _assert_whole(counting_pool)


@ONE_BACKEND
@pytest.mark.parametrize(
    "ids", [np.array([2, 0], np.int32), np.array([2, 0], np.uint8), (2, 0), range(2, -1, -2)], ids=repr
)
def test_ids_may_be_any_sequence_of_whole_numbers(counting_pool, ids):
    counting_pool.send([5, 6], ids)
    batch = counting_pool.recv(2)
    assert batch.env_id.tolist() == [0, 2]
    assert batch.reward.tolist() == [6.0, 5.0]


# ---------------------------------------------------------------- recv, reset and options


@ONE_BACKEND
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 4},
        {"batch_size": 1, "min_envs": 1},
        {"min_envs": 2, "max_envs": 1},
        {"min_envs": -1},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": "soon"},
    ],
    ids=str,
)
def test_a_recv_that_makes_no_sense_is_refused_and_nothing_is_lost(counting_pool, arguments):
    counting_pool.send([1, 2, 3])
    text = r"recv\(\) cannot return 0 envs; ask for 1 to 3" if arguments == {"batch_size": 0} else None
    with pytest.raises(stepmill.UsageError, match=text):
        counting_pool.recv(**arguments)
    assert counting_pool.recv(3).reward.tolist() == [1.0, 2.0, 3.0]


@ONE_BACKEND
@pytest.mark.parametrize("seed", [-1, 1.5, "7", [1, 2], [1, 2, 3, 4], [1, "2", 3], {9: 1}, {0: -5}, True], ids=repr)
def test_a_seed_that_is_none_is_refused(counting_pool, seed):
    with pytest.raises(stepmill.UsageError):
        counting_pool.reset(seed=seed)
    _assert_whole(counting_pool)


@pytest.mark.parametrize("batch_size", [0, 4, -1, 1.5], ids=repr)
def test_a_batch_size_must_lie_between_one_and_the_number_of_envs(batch_size):
    with pytest.raises(stepmill.UsageError, match="batch_size"):
        stepmill.Pool(counting_envs(3), backend="serial", batch_size=batch_size)


# ---------------------------------------------------------------- after close, other threads, forked children


def test_everything_but_close_is_refused_after_close(pool_of):
    pool = begun(pool_of(counting_envs(2)))
    pool.close()
    pool.close()
    for use in (
        pool.reset,
        pool.reset_async,
        pool.recv,
        partial(pool.recv, min_envs=0),
        pool.receive,
        pool.render,
        pool.stats,
        partial(pool.step, [0, 0]),
        partial(pool.send, [0, 0]),
        partial(pool.call, "add", 1.0),
        partial(pool.call_async, "add", 1.0),
        partial(pool.get_attr, "weight"),
        partial(pool.set_attr, "weight", 1.0),
    ):
        with pytest.raises(stepmill.ClosedPoolError):
            use()


@pytest.mark.parametrize("where", ["thread", "fork"])
def test_a_second_thread_is_refused_while_the_first_waits(pool_of, gate):
    pool = begun(pool_of([partial(GateEnv, gate.path, i) for i in range(2)]))
    pool.send([GATED_ACTION, 1])
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(pool.recv(2)))
    thread.start()
    refused = 0
    # The waiting thread may not have begun to wait; a poll that is not refused returns at once and takes nothing.
    while not refused and thread.is_alive():
        try:
            pool.recv(2, timeout_s=0)
        except stepmill.RecvTimeout:
            continue
        except stepmill.UsageError:
            refused += 1
    gate.open()
    thread.join()
    assert refused
    assert isinstance(results[0], stepmill.Batch)


def test_an_env_that_uses_its_own_pool_is_refused():
    pool_box: list[stepmill.Pool] = []

    class ReentrantEnv(CountingEnv):
        def step(self, action):
            pool_box[0].step([0])
            return super().step(action)

    pool = stepmill.Pool([ReentrantEnv], backend="serial")
    pool_box.append(pool)
    pool.reset()
    with pytest.raises(stepmill.EnvError, match=r"UsageError|BusyEnvError|in use"):
        pool.step([0])
    pool_box.clear()
    pool.close()


def test_a_pool_is_inert_in_a_forked_child(pool_of):
    pool = begun(pool_of(counting_envs(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads in the parent
        child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.step([1, 1])
        except stepmill.UsageError:
            pool.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.step([3, 4]).reward.tolist() == [3.0, 4.0]


# ---------------------------------------------------------------- sentences that end a mistake


@pytest.mark.parametrize(
    ("env_fns", "text"),
    [
        ("CartPole-v1", r"the string 'CartPole-v1'; .* stepmill.make_vec\('CartPole-v1', num_envs=8\)"),
        (["CartPole-v1"] * 2, r"env_fns\[0\] is a str; .* lambda: gymnasium.make\('CartPole-v1'\)"),
        (4, "env_fns is an int; give a list of functions"),
        *((wrong, "env_fns") for wrong in ([5], [CountingEnv, None], None, CountingEnv)),
        ([CountingEnv()], r"env_fns\[0\] is a CountingEnv; give a function that makes the env: a class, or a lambda"),
    ],
)
def test_what_are_no_functions_is_refused_with_what_to_write(env_fns, text):
    with pytest.raises(TypeError, match=text) as caught:
        stepmill.Pool(env_fns)
    assert isinstance(caught.value, stepmill.UsageError)


def test_a_pool_has_at_least_one_env():
    with pytest.raises(stepmill.UsageError, match="at least one env"):
        stepmill.Pool([])
