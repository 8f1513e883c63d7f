"""The shortest way to step all envs of a kernel gives what the ordinary one gives, and leaves the pool in the same state."""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import stepmill
from stepmill.pool.port import PoolPort

pytest.importorskip("numba")

from tests.harness.pools import begun
from tests.kernels.kernels import faulty, walk

NUM_ENVS = 6
CALLS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["fast", "step", "halves"]), st.lists(st.integers(0, 3), min_size=6, max_size=6)),
        st.tuples(st.just("reset"), st.sets(st.integers(0, NUM_ENVS - 1), min_size=1)),
        st.tuples(st.just("jump"), st.integers(0, NUM_ENVS - 1)),
    ),
    max_size=30,
)


def _do(pool: stepmill.Pool, call: str, argument: Any) -> list[Any]:
    if call == "reset":
        return [pool.reset(env_ids=sorted(argument)).obs]
    if call == "jump":
        return [pool.call("jump", 0.5, env_ids=[argument])]
    actions = np.array(argument)
    if call == "fast":
        return list(PoolPort(pool).step_fast(actions))[:4]
    if call == "step":
        batch = pool.step(actions)
        return [batch.obs, batch.reward, batch.terminated, batch.truncated]
    pool.send(actions[:3], [0, 1, 2])
    first = pool.recv(3)
    pool.send(actions[3:], [3, 4, 5])
    second = pool.recv(env_ids=[3, 4, 5])
    return [first.obs, first.reward, second.obs, second.reward, second.terminated]


@hypothesis.settings(max_examples=40)
@hypothesis.given(calls=CALLS, mode=st.sampled_from(["NextStep", "SameStep"]), num_threads=st.integers(1, 3))
def test_calls_in_any_order_give_what_envs_in_python_give(calls: Any, mode: Any, num_threads: int) -> None:
    serial = partial(walk, compiled=False)
    with (
        stepmill.Pool([walk] * NUM_ENVS, backend="kernel", autoreset_mode=mode, num_workers=num_threads) as ours,
        stepmill.Pool([serial] * NUM_ENVS, backend="serial", autoreset_mode=mode) as theirs,
    ):
        np.testing.assert_array_equal(ours.reset(seed=2).obs, theirs.reset(seed=2).obs)
        for call, argument in calls:
            for mine, yours in zip(_do(ours, call, argument), _do(theirs, call, argument), strict=True):
                np.testing.assert_array_equal(mine, yours)


def test_infos_of_finished_episodes_come_with_the_shortest_way_too() -> None:
    with begun(stepmill.Pool([walk] * 2, backend="kernel")) as pool:
        infos = [PoolPort(pool).step_fast(np.array([3, 1]))[4] for _ in range(12)]
        ended = [info["episode"] for info in infos if info]
        assert ended
        assert ended[0]["l"][0] > 0


def test_a_fault_in_the_shortest_way_is_that_of_one_env() -> None:
    with begun(stepmill.Pool([faulty] * 4, backend="kernel")) as pool:
        for _ in range(3):
            PoolPort(pool).step_fast(np.zeros(4, np.int64))
        with pytest.raises(stepmill.EnvError, match="env 2 raised ValueError"):
            PoolPort(pool).step_fast(np.array([0, 0, 2, 0]))
        batch = pool.recv(3)
        assert batch.env_id.tolist() == [0, 1, 3]
        assert batch.obs[:, 0].tolist() == [4.0, 4.0, 4.0]
        pool.reset(env_ids=[2])
        assert PoolPort(pool).step_fast(np.zeros(4, np.int64))[0][:, 0].tolist() == [5.0, 5.0, 1.0, 5.0]
        assert PoolPort(pool).step_fast(np.zeros(4, np.int64))[0][:, 0].tolist() == [6.0, 6.0, 2.0, 6.0]


def test_wrong_actions_change_nothing() -> None:
    with begun(stepmill.Pool([faulty] * 2, backend="kernel")) as pool:
        PoolPort(pool).step_fast(np.zeros(2, np.int64))
        with pytest.raises(stepmill.UsageError, match="got 3 actions for 2 envs"):
            PoolPort(pool).step_fast(np.zeros(3, np.int64))
        assert PoolPort(pool).step_fast(np.zeros(2, np.int64))[0][:, 0].tolist() == [2.0, 2.0]


def test_lent_observations_of_the_shortest_way_stay_as_they_are() -> None:
    kernel = stepmill.kernels.find("stepmill/Catch84-v0")
    with begun(stepmill.Pool([kernel] * 3, backend="kernel")) as pool:
        kept = [PoolPort(pool).step_fast(np.zeros(3, np.int64))[0] for _ in range(12)]
        copies = [obs.copy() for obs in kept]
        for _ in range(12):
            PoolPort(pool).step_fast(np.zeros(3, np.int64))
        for obs, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(obs, copy)
