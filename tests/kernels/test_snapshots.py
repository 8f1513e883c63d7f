"""A snapshot of an env is all that it remembers: what is restored goes on as it would have gone on."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

import stepmill

pytest.importorskip("numba")

from tests.kernels.kernels import walk, walk_limited


def _play(pool: stepmill.Pool, num_steps: int) -> list[list[float]]:
    rows = []
    for count in range(num_steps):
        batch = pool.step(np.full(pool.num_envs, count % 3))
        rows.append([*batch.obs.ravel(), *batch.reward, *batch.terminated, *batch.truncated])
    return rows


@pytest.mark.parametrize("kernel", [walk, walk_limited])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_restored_env_does_again_what_it_did(kernel: stepmill.kernels.PythonKernel, mode: str) -> None:
    with stepmill.Pool([kernel] * 3, backend="kernel", autoreset_mode=mode) as pool:
        pool.reset(seed=4)
        for num_steps in (3, 8):
            _play(pool, num_steps)
            snapshot = pickle.loads(pickle.dumps(pool.snapshot()))
            expected = _play(pool, 20)
            np.testing.assert_array_equal(pool.restore(snapshot), snapshot.obs)
            assert _play(pool, 20) == expected


def test_an_env_can_be_made_what_another_one_is() -> None:
    with stepmill.Pool([walk] * 4, backend="kernel") as pool:
        pool.reset(seed=1)
        _play(pool, 5)
        pool.restore(pool.snapshot([2]), [0])
        pool.restore(pool.snapshot([2, 3]), [3, 1])
        for _ in range(10):
            batch = pool.step(np.ones(4, np.int64))
            np.testing.assert_array_equal(batch.obs[0], batch.obs[2])
            np.testing.assert_array_equal(batch.obs[3], batch.obs[2])


def test_a_snapshot_of_another_kernel_or_a_part_of_one_is_refused() -> None:
    with (
        stepmill.Pool([walk] * 2, backend="kernel") as pool,
        stepmill.Pool([walk_limited] * 2, backend="kernel") as other,
    ):
        pool.reset(seed=0)
        other.reset(seed=0)
        snapshot, kept = pool.snapshot(), other.snapshot()
        with pytest.raises(stepmill.UsageError, match="of another kernel or another model than walk_limited"):
            other.restore(snapshot)
        assert other.snapshot().memory == kept.memory
        _play(pool, 3)
        kept = pool.snapshot()
        damaged = dataclasses.replace(snapshot, memory=(snapshot.memory[0], snapshot.memory[1][:-1]))
        with pytest.raises(stepmill.UsageError, match=r"has \d+ bytes, not \d+; it is damaged"):
            pool.restore(damaged)
        with pytest.raises(stepmill.UsageError, match="a bytes is no snapshot"):
            pool.restore(snapshot.memory[0])  # type: ignore[arg-type]
        assert pool.snapshot().memory == kept.memory


def test_snapshots_are_of_idle_envs_of_kernels() -> None:
    with stepmill.Pool([walk] * 2, backend="kernel") as pool:
        pool.reset(seed=0)
        pool.send(np.array([1]), [1])
        with pytest.raises(stepmill.BusyEnvError, match=r"envs \[1\] are stepping"):
            pool.snapshot()
        assert pool.snapshot([0]).env_ids == (0,)
        pool.recv(1)
        snapshot = pool.snapshot([0])
        with pytest.raises(stepmill.UsageError, match="got 2 env_ids for a snapshot of 1 envs"):
            pool.restore(snapshot, [0, 1])
    with stepmill.Pool([walk] * 2, backend="serial") as pool:
        pool.reset()
        with pytest.raises(stepmill.UsageError, match="only kernel envs have snapshots"):
            pool.snapshot()
