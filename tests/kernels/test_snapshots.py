"""A snapshot of an env is all that it remembers: what is restored goes on as it would have gone on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill

pytest.importorskip("numba")

from tests.harness.pools import begun
from tests.kernels.kernels import parts, walk, walk_limited
from tests.kernels.library_builder import build_text


def _memory(saved: stepmill.SavedEnvs) -> tuple[tuple[bytes, bytes | None], ...]:
    """Return for each env its state, and its memory outside the state."""
    return tuple(each["position"]["memory"] for each in saved.envs)


def _with_memory(saved: stepmill.SavedEnvs, memory: tuple[tuple[bytes, bytes | None], ...]) -> stepmill.SavedEnvs:
    pairs = zip(saved.envs, memory, strict=True)
    envs = tuple(each | {"position": each["position"] | {"memory": own}} for each, own in pairs)
    return dataclasses.replace(saved, envs=envs)


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
            snapshot = pickle.loads(pickle.dumps(stepmill.save(pool, None)))
            expected = _play(pool, 20)
            np.testing.assert_array_equal(stepmill.restore(pool, snapshot).obs, snapshot.obs)
            assert _play(pool, 20) == expected


def test_an_env_can_be_made_what_another_one_is() -> None:
    with stepmill.Pool([walk] * 4, backend="kernel") as pool:
        pool.reset(seed=1)
        _play(pool, 5)
        stepmill.restore(pool, stepmill.save(pool, None, env_ids=[2]), env_ids=[0])
        stepmill.restore(pool, stepmill.save(pool, None, env_ids=[2, 3]), env_ids=[3, 1])
        for _ in range(10):
            batch = pool.step(np.ones(4, np.int64))
            np.testing.assert_array_equal(batch.obs[0], batch.obs[2])
            np.testing.assert_array_equal(batch.obs[3], batch.obs[2])


@pytest.mark.parametrize("kernel", [walk, parts])
def test_a_snapshot_right_after_a_restore_has_the_observations_of_the_restored_one(
    kernel: stepmill.kernels.PythonKernel,
) -> None:
    actions = gymnasium.vector.utils.batch_space(kernel.action_space, 3)
    actions.seed(0)
    with stepmill.Pool([kernel] * 3, backend="kernel") as pool:

        def step() -> Any:
            return pool.step(actions.sample()).obs

        pool.reset(seed=1)
        snapshot = stepmill.save(pool, None)
        step()
        stepmill.restore(pool, snapshot)
        again = stepmill.save(pool, None)
        assert _memory(again) == _memory(snapshot)
        np.testing.assert_equal(again.obs, snapshot.obs)
        newest = step()
        np.testing.assert_equal(stepmill.save(pool, None).obs, newest)
        stepmill.restore(pool, stepmill.save(pool, None, env_ids=[2]), env_ids=[0])
        assert_rows_equal(stepmill.save(pool, None, env_ids=[1, 0]).obs, newest, [1, 2])


def assert_rows_equal(obs: Any, others: Any, places: list[int]) -> None:
    others = {name: each[places] for name, each in others.items()} if isinstance(others, dict) else others[places]
    np.testing.assert_equal(obs, others)


@pytest.mark.parametrize(("mode", "other_mode"), [("NextStep", "SameStep"), ("SameStep", "NextStep")])
def test_the_snapshot_of_an_ended_episode_is_for_pools_of_the_same_autoreset_mode(mode: Any, other_mode: Any) -> None:
    with (
        stepmill.Pool([walk_limited], backend="kernel", autoreset_mode=mode) as pool,
        stepmill.Pool([walk_limited], backend="kernel", autoreset_mode=mode) as same,
        stepmill.Pool([walk_limited], backend="kernel", autoreset_mode=other_mode) as other,
    ):
        for each in (pool, same, other):
            each.reset(seed=0)
        stepmill.restore(other, stepmill.save(pool, None))  # the episode goes on
        kept = _memory(stepmill.save(other, None))
        while not pool.step(np.array([4])).truncated[0]:
            pass
        with pytest.raises(
            stepmill.UsageError, match=f"saved with autoreset_mode='{mode}', and these have '{other_mode}'"
        ):
            stepmill.restore(other, stepmill.save(pool, None))
        assert _memory(stepmill.save(other, None)) == kept
        stepmill.restore(same, stepmill.save(pool, None))
        assert _play(same, 9) == _play(pool, 9)


def test_what_is_written_into_restored_observations_does_not_change_the_snapshot() -> None:
    with stepmill.Pool([walk] * 2, backend="kernel") as pool:
        pool.reset(seed=1)
        snapshot = stepmill.save(pool, None)
        first = stepmill.restore(pool, snapshot).obs
        kept = first.copy()
        first[:] = 9
        np.testing.assert_array_equal(stepmill.restore(pool, snapshot).obs, kept)


def test_a_snapshot_of_another_kernel_or_a_part_of_one_is_refused() -> None:
    with (
        stepmill.Pool([walk] * 2, backend="kernel") as pool,
        stepmill.Pool([walk_limited] * 2, backend="kernel") as other,
    ):
        pool.reset(seed=0)
        other.reset(seed=0)
        snapshot, kept = stepmill.save(pool, None), stepmill.save(other, None)
        with pytest.raises(stepmill.UsageError, match=r"saved with kernel='walk .*, and these have 'walk_limited "):
            stepmill.restore(other, snapshot)
        assert _memory(stepmill.save(other, None)) == _memory(kept)
        _play(pool, 3)
        kept = stepmill.save(pool, None)
        first, (state, outside) = _memory(snapshot)
        for cut in ((state[:-1], outside), (state, b""), (state,), state, None):
            with pytest.raises(stepmill.UsageError, match=r"position of env 1 does not fit"):
                stepmill.restore(pool, _with_memory(snapshot, (first, cut)))  # type: ignore[arg-type]
        with pytest.raises(stepmill.UsageError, match="cannot read"):
            stepmill.restore(pool, "missing")
        assert _memory(stepmill.save(pool, None)) == _memory(kept)


def test_what_was_set_before_a_save_does_not_replace_what_the_env_has_become() -> None:
    with begun(stepmill.Pool([walk] * 2, backend="kernel")) as pool:
        pool.set_attr("steps", 7)
        _play(pool, 5)
        saved = stepmill.save(pool, None)
        expected = _play(pool, 9)
        stepmill.restore(pool, saved)
        assert _play(pool, 9) == expected


def _check_refused(kernel: Any, others: Sequence[Any]) -> None:
    """Check that no kernel takes a snapshot of another one, and that each takes its own, from another pool."""
    kernels = [kernel, *others]
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(stepmill.Pool([kernel] * 2, backend="kernel")) for kernel in kernels]
        for pool in pools:
            pool.reset(seed=0)
        snapshots = [stepmill.save(pool, None) for pool in pools]
        with stepmill.Pool([kernel] * 2, backend="kernel") as same:
            same.reset(seed=1)
            stepmill.restore(same, pickle.loads(pickle.dumps(snapshots[0])))
            assert _memory(stepmill.save(same, None)) == _memory(snapshots[0])
        for pool, other in itertools.permutations(range(len(kernels)), 2):
            with pytest.raises(stepmill.UsageError, match="the envs were saved with"):
                stepmill.restore(pools[pool], snapshots[other])
            assert _memory(stepmill.save(pools[pool], None)) == _memory(snapshots[pool])


def test_a_kernel_with_another_table_refuses_a_snapshot() -> None:
    find = stepmill.kernels.find
    others = [{"map_name": "8x8"}, {"is_slippery": False}, {"desc": ("SF", "HG")}]
    _check_refused(find("FrozenLake-v1"), [find("FrozenLake-v1", **arguments) for arguments in others])


def _make_drift(speed: float, table: Any, *, is_backward: bool = False, size: int = 1) -> stepmill.kernels.PythonKernel:
    @stepmill.kernel(
        observation_space=spaces.Box(-9.0, 9.0, (size,), np.float64),
        action_space=spaces.Discrete(2),
        state=np.dtype([("place", "f8")]),
    )
    class drift:  # noqa: N801
        def reset(state: Any, rng: Any, obs: Any) -> None:
            state.place = rng.random()
            obs[:] = state.place

        def step(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            state.place += speed * table[action]
            obs[:] = state.place
            return 0.0, False, False

        def step_back(state: Any, action: Any, rng: Any, obs: Any) -> tuple[float, bool, bool]:
            state.place -= speed * table[action]
            obs[:] = state.place
            return 0.0, False, False

    made: Any = drift
    if is_backward:
        made.step = made.methods["step_back"]
    return cast("stepmill.kernels.PythonKernel", made)


def test_a_kernel_with_other_constants_or_other_code_refuses_a_snapshot() -> None:
    table = np.array([1.0, 2.0])
    drift = _make_drift(0.5, table)
    others = [_make_drift(0.25, table), _make_drift(0.5, table[::-1].copy()), _make_drift(0.5, table, is_backward=True)]
    _check_refused(drift, [*others, _make_drift(0.5, table, size=2)])


def test_a_kernel_that_is_made_again_takes_a_snapshot() -> None:
    with (
        stepmill.Pool([_make_drift(0.5, np.array([1.0, 2.0]))], backend="kernel") as pool,
        stepmill.Pool([_make_drift(0.5, np.array([1.0, 2.0]))], backend="kernel") as other,
    ):
        pool.reset(seed=0)
        other.reset(seed=1)
        np.testing.assert_array_equal(
            stepmill.restore(other, stepmill.save(pool, None)).obs, stepmill.save(pool, None).obs
        )
        np.testing.assert_array_equal(other.step(np.array([1])).obs, pool.step(np.array([1])).obs)


def test_a_library_with_other_code_or_another_description_refuses_a_snapshot(tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "examples" / "kernels" / "particle.c").read_text()
    changes = [("", ""), ("0.1 * force", "0.2 * force"), (".low = -1.0", ".low = -2.0")]
    kernels = []
    for count, (old, new) in enumerate(changes):
        assert old in source
        kernels.append(
            stepmill.kernels.load(build_text(source.replace(old, new) if old else source, tmp_path, f"p{count}.c"))
        )
    _check_refused(kernels[0], kernels[1:])


def test_snapshots_are_of_idle_envs_of_kernels() -> None:
    with begun(stepmill.Pool([walk] * 2, backend="kernel")) as pool:
        pool.send(np.array([1]), [1])
        with pytest.raises(stepmill.BusyEnvError, match=r"envs \[1\] are stepping"):
            stepmill.save(pool, None)
        assert stepmill.save(pool, None, env_ids=[0]).env_ids == (0,)
        pool.recv(1)
        snapshot = stepmill.save(pool, None, env_ids=[0])
        with pytest.raises(stepmill.UsageError, match="got 1 env_ids for 2 saved envs"):
            stepmill.restore(pool, stepmill.save(pool, None), env_ids=[0])
        stepmill.restore(pool, snapshot, env_ids=[0, 1])
        np.testing.assert_array_equal(*pool.step(np.array([1, 1])).obs)
