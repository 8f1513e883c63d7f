"""Pools of kernels do what pools of the same envs in Python do, with however many threads."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.pool.port import PoolPort

pytest.importorskip("numba")

from tests.harness.pools import assert_equal, assert_same, begun
from tests.kernels.kernels import faulty, parts, walk, walk_limited

NUM_ENVS = 5
MODES = ["NextStep", "SameStep", "Disabled"]
SEEDINGS = ["continue", "per_episode", "fixed"]


def _batches_equal(ours: stepmill.Batch, theirs: stepmill.Batch) -> None:
    assert_same(ours, theirs)
    infos = ({key: value for key, value in each.info.items() if key != "final_info"} for each in (ours, theirs))
    assert_equal(*infos)


def _reset_ended(pool: stepmill.Pool, batch: stepmill.Batch) -> stepmill.Batch:
    return pool.reset(env_ids=np.flatnonzero(batch.terminated | batch.truncated).tolist())


@pytest.mark.parametrize(
    ("kernel", "seeding"), [*((walk, seeding) for seeding in SEEDINGS), (walk_limited, "continue")]
)
@pytest.mark.parametrize("mode", MODES)
def test_each_step_is_that_of_the_python_loop(mode: str, seeding: str, kernel: Any) -> None:
    options: Any = {"autoreset_mode": mode, "seeding": seeding, "episode_stats": True}
    actions = np.random.default_rng(0).integers(0, 4, (60, NUM_ENVS))
    serial = partial(kernel, compiled=False)
    with (
        stepmill.Pool([kernel] * NUM_ENVS, backend="kernel", num_workers=2, **options) as ours,
        stepmill.Pool([serial] * NUM_ENVS, backend="serial", **options) as theirs,
    ):
        _batches_equal(ours.reset(seed=11), theirs.reset(seed=11))
        for action in actions:
            batch, other = ours.step(action), theirs.step(action)
            _batches_equal(batch, other)
            if mode == "Disabled" and (batch.terminated | batch.truncated).any():
                _batches_equal(_reset_ended(ours, batch), _reset_ended(theirs, other))


def test_many_envs_in_many_threads_are_all_stepped_once() -> None:
    with stepmill.Pool([walk] * 3000, backend="kernel", num_workers=4) as pool:
        pool.reset(seed=1)
        for count in range(1, 20):
            batch = pool.step(np.ones(3000, np.int64))
            alive = ~(batch.terminated | batch.truncated) & (batch.obs[:, 2] != 0)
            assert batch.obs[alive, 2].max() <= count
            assert (batch.obs[:, 2] == count).sum() > 2000


def test_observations_and_actions_may_have_parts() -> None:
    serial = partial(parts, compiled=False)
    with stepmill.Pool([parts] * 3, backend="kernel") as ours, stepmill.Pool([serial] * 3, backend="serial") as theirs:
        for pool in (ours, theirs):
            assert pool.reset(seed=0).obs["a"].tolist() == [0, 0, 0]
        for count in range(8):
            action = {"by": np.array([0, 1, 2]), "scale": np.array([0.5, 1.0, count])}
            assert_same(ours.step(action), theirs.step(action), count)


@pytest.mark.parametrize("is_fast", [False, True])
def test_large_observations_are_lent_and_stay_as_they_are(is_fast: bool) -> None:
    kernel = stepmill.kernels.find("stepmill/Catch84-v0")
    with begun(stepmill.Pool([kernel] * 4, backend="kernel")) as pool:
        step = PoolPort(pool).step_fast if is_fast else pool.step
        kept = [obs for obs, *_ in (step(np.zeros(4, np.int64)) for _ in range(12))]
        copies = [obs.copy() for obs in kept]
        for _ in range(12):
            step(np.zeros(4, np.int64))
        np.testing.assert_array_equal(kept, copies)
        assert kept[0].base is not None


def test_methods_and_fields_of_the_state_can_be_reached() -> None:
    with begun(stepmill.Pool([walk] * 2, backend="kernel")) as pool:
        places = pool.get_attr("place")
        assert pool.call("jump", 1.5) == tuple(place + 1.5 for place in places)
        pool.set_attr("place", [0.25, 0.5])
        assert pool.get_attr("place") == (0.25, 0.5)
        with pytest.raises(stepmill.EnvError, match="does not declare a method 'fly'"):
            pool.call("fly")


def test_reset_options_are_refused() -> None:
    with stepmill.Pool([walk] * 2, backend="kernel") as pool:
        with pytest.raises(stepmill.EnvError, match="kernels take no reset options"):
            pool.reset(options={"x": 1})
        pool.reset()
        assert pool.step(np.ones(2, np.int64)).obs[:, 2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "options", [{"resets": {"spare_envs": 1}}, {"envs_per_worker": 1}, {"resets": {"overlap": True}}]
)
def test_options_without_meaning_are_refused(options: Any) -> None:
    with pytest.raises(stepmill.UsageError, match=next(iter(options))):
        stepmill.Pool([walk] * 2, backend="kernel", **options)


def test_env_functions_that_are_no_kernel_are_refused() -> None:
    with pytest.raises(stepmill.UsageError, match="runs the envs of one kernel"):
        stepmill.Pool([lambda: None] * 2, backend="kernel")


def test_a_pool_can_be_closed_while_another_thread_steps_it() -> None:
    pool = begun(stepmill.Pool([walk] * 20_000, backend="kernel", num_workers=2))
    is_at_work = threading.Event()

    def step() -> None:
        with contextlib.suppress(stepmill.ClosedPoolError):
            while True:
                PoolPort(pool).step_fast(np.ones(20_000, np.int64))
                is_at_work.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert is_at_work.wait(60)
    pool.close()
    thread.join(60)
    assert not thread.is_alive()


def test_wrong_actions_change_nothing() -> None:
    with begun(stepmill.Pool([faulty] * 2, backend="kernel")) as pool:
        PoolPort(pool).step_fast(np.zeros(2, np.int64))
        with pytest.raises(stepmill.UsageError, match="got 3 actions for 2 envs"):
            PoolPort(pool).step_fast(np.zeros(3, np.int64))
        assert PoolPort(pool).step_fast(np.zeros(2, np.int64))[0][:, 0].tolist() == [2.0, 2.0]
