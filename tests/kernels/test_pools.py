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

from tests.harness.pools import begun
from tests.kernels.kernels import parts, walk, walk_limited

NUM_ENVS = 5
MODES = ["NextStep", "SameStep", "Disabled"]
SEEDINGS = ["continue", "per_episode", "fixed"]


def _batches_equal(ours: stepmill.Batch, theirs: stepmill.Batch) -> None:
    for name in ("obs", "reward", "terminated", "truncated", "env_id"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert ours.info.keys() == theirs.info.keys()
    for key, value in theirs.info.items():
        if key == "final_info":
            continue
        mine = ours.info[key]
        if isinstance(value, dict):
            assert value.keys() == mine.keys()
            for name in value:
                np.testing.assert_array_equal(mine[name], value[name], err_msg=f"{key} {name}")
        elif value.dtype == object:
            assert [None if item is None else item.tolist() for item in value] == [
                None if item is None else item.tolist() for item in mine
            ]
        else:
            np.testing.assert_array_equal(mine, value, err_msg=key)


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


def _trajectory(num_threads: int, *, is_async: bool) -> dict[int, list[tuple[Any, ...]]]:
    """Return by env what each of its steps brought; its actions depend on nothing but the env and the step."""
    seen: dict[int, list[tuple[Any, ...]]] = {env: [] for env in range(NUM_ENVS)}
    with stepmill.Pool([walk] * NUM_ENVS, backend="kernel", num_workers=num_threads) as pool:
        pool.reset(seed=5)
        pool.send(np.zeros(NUM_ENVS, np.int64))
        while any(len(rows) < 40 for rows in seen.values()):
            batch = pool.recv(2 if is_async else NUM_ENVS)
            for place, env in enumerate(batch.env_id):
                row = batch.obs[place].tolist(), batch.reward[place], batch.terminated[place]
                seen[int(env)].append(row)
            actions = [(7 * int(env) + len(seen[int(env)])) % 4 for env in batch.env_id]
            pool.send(np.array(actions), batch.env_id)
    return {env: rows[:40] for env, rows in seen.items()}


def test_results_depend_neither_on_threads_nor_on_the_order_of_receiving() -> None:
    expected = _trajectory(1, is_async=False)
    for num_threads in (1, 2, 4):
        for is_async in (False, True):
            assert _trajectory(num_threads, is_async=is_async) == expected


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
            mine, yours = ours.step(action), theirs.step(action)
            np.testing.assert_array_equal(mine.obs["a"], yours.obs["a"])
            np.testing.assert_array_equal(mine.obs["b"], yours.obs["b"])
            np.testing.assert_array_equal(mine.reward, yours.reward)
            np.testing.assert_array_equal(mine.terminated, yours.terminated)


def test_results_may_be_written_where_the_caller_wants_them() -> None:
    with begun(stepmill.Pool([walk] * 2, backend="kernel")) as pool:
        pool.send(np.array([2, 2]))
        out = np.empty((2, 3))
        assert pool.recv(2, out=out).obs is out
        assert out[:, 2].tolist() == [1.0, 1.0]


def test_large_observations_are_lent_and_stay_as_they_are() -> None:
    kernel = stepmill.kernels.find("stepmill/Catch84-v0")
    with begun(stepmill.Pool([kernel] * 4, backend="kernel")) as pool:
        first = pool.step(np.zeros(4, np.int64)).obs
        before = first.copy()
        for _ in range(10):
            pool.step(np.zeros(4, np.int64))
        np.testing.assert_array_equal(first, before)
        assert first.base is not None


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
