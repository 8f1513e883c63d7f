"""A snapshot of a MuJoCo task is all that its next steps depend on: they are the same to the last bit after a restore."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill

pytest.importorskip("numba")
pytest.importorskip("mujoco")

from tests.harness.pools import begun
from tests.kernels.test_mujoco import _break_simulation
from tests.kernels.test_snapshots import _memory, _with_memory

NUM_ENVS = 4
# Contacts, warm starts, rewards that depend on what was computed before the last integration, and tendons.
IDS = [
    "HalfCheetah-v5",
    *(
        pytest.param(env_id, marks=pytest.mark.slow)
        for env_id in ("Hopper-v5", "Ant-v5", "Humanoid-v5", "Pusher-v5", "InvertedDoublePendulum-v5")
    ),
]


def _pool(env_id: str, **options: Any) -> stepmill.Pool:
    return stepmill.Pool([stepmill.kernels.find(env_id)] * NUM_ENVS, backend="kernel", **options)


def _actions(env_id: str, num_steps: int) -> Any:
    space = stepmill.kernels.find(env_id).action_space
    shape = num_steps, NUM_ENVS, *space.shape
    return np.random.default_rng(2).uniform(space.low, space.high, shape).astype(np.float32)


def _play(pool: stepmill.Pool, actions: Any) -> list[Any]:
    rows = []
    for action in actions:
        batch = pool.step(action)
        rows.append(np.column_stack([batch.obs, batch.reward, batch.terminated, batch.truncated]))
    return rows


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_restored_simulation_does_again_what_it_did(env_id: str, mode: str) -> None:
    before, after = np.split(_actions(env_id, 80), 2)
    with _pool(env_id, num_workers=3, autoreset_mode=mode) as pool:
        pool.reset(seed=4)
        _play(pool, before)
        snapshot = pickle.loads(pickle.dumps(stepmill.save(pool, None)))
        expected = _play(pool, after)
        for _ in range(2):
            np.testing.assert_array_equal(stepmill.restore(pool, snapshot).obs, snapshot.obs)
            np.testing.assert_array_equal(_play(pool, after), expected)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Ant-v5", "Humanoid-v5"])
def test_a_simulation_can_be_made_what_another_one_is(env_id: str) -> None:
    before, after = np.split(_actions(env_id, 30), 2)
    with _pool(env_id) as pool, _pool(env_id, num_workers=2) as other:
        pool.reset(seed=1)
        _play(pool, before)
        snapshot = stepmill.save(pool, None, env_ids=[2])
        expected = np.array([rows[2] for rows in _play(pool, np.repeat(after[:, 2:3], NUM_ENVS, axis=1))])
        other.reset(seed=9)
        stepmill.restore(other, snapshot, env_ids=[0])
        found = np.array([rows[0] for rows in _play(other, np.repeat(after[:, 2:3], NUM_ENVS, axis=1))])
        np.testing.assert_array_equal(found, expected)


_CONTINUE = """
import pickle, sys
import numpy as np
import stepmill

snapshot, actions = pickle.load(sys.stdin.buffer)
with stepmill.Pool([stepmill.kernels.find("Walker2d-v5")] * 4, backend="kernel") as pool:
    pool.reset(seed=8)
    stepmill.restore(pool, snapshot)
    pickle.dump([pool.step(action).obs.copy() for action in actions], sys.stdout.buffer)
"""


def test_a_snapshot_can_be_restored_in_another_process() -> None:
    actions = _actions("Walker2d-v5", 12)
    with _pool("Walker2d-v5") as pool:
        pool.reset(seed=3)
        pool.step(actions[0])
        given = pickle.dumps((stepmill.save(pool, None), actions))
        expected = [pool.step(action).obs.copy() for action in actions]
    run = subprocess.run([sys.executable, "-c", _CONTINUE], input=given, capture_output=True, check=True, timeout=300)
    np.testing.assert_array_equal(pickle.loads(run.stdout), expected)


def test_a_snapshot_of_another_task_is_refused() -> None:
    # The states of HalfCheetah and Walker2d have the same size.
    with _pool("HalfCheetah-v5") as pool, _pool("Walker2d-v5") as other:
        pool.reset(seed=0)
        other.reset(seed=0)
        kept = stepmill.save(other, None)
        with pytest.raises(stepmill.UsageError, match="the envs were saved with info="):
            stepmill.restore(other, stepmill.save(pool, None))
        assert _memory(stepmill.save(other, None)) == _memory(kept)


def test_a_damaged_snapshot_changes_no_env() -> None:
    with begun(_pool("HalfCheetah-v5")) as pool:
        snapshot = stepmill.save(pool, None)
        _play(pool, _actions("HalfCheetah-v5", 5))
        kept = stepmill.save(pool, None)
        *others, (state, outside) = _memory(snapshot)
        for cut in (b"", outside[:10], outside[:-8], None):
            damaged = _with_memory(snapshot, (*others, (state, cut)))
            with pytest.raises(stepmill.UsageError, match="does not fit these envs, or is damaged"):
                stepmill.restore(pool, damaged)
            assert _memory(stepmill.save(pool, None)) == _memory(kept)


def test_a_simulation_that_has_diverged_can_be_restored() -> None:
    actions = _actions("HalfCheetah-v5", 20)
    with begun(_pool("HalfCheetah-v5")) as pool:
        snapshot = stepmill.save(pool, None)
        expected = _play(pool, actions)
        pool.call(_break_simulation, env_ids=[1])
        with pytest.raises(stepmill.EnvError, match="the simulation has diverged"):
            pool.step(actions[0])
        pool.recv(NUM_ENVS - 1)
        stepmill.restore(pool, snapshot)
        np.testing.assert_array_equal(_play(pool, actions), expected)


def test_a_model_whose_memory_mujoco_does_not_save_has_no_snapshots(tmp_path: Path) -> None:
    xml = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml"
    asleep = tmp_path / "asleep.xml"
    asleep.write_text(xml.read_text().replace("<option ", '<option><flag sleep="enable"/></option>\n  <option ', 1))
    with stepmill.Pool([stepmill.kernels.find("HalfCheetah-v5", xml_file=asleep)], backend="kernel") as pool:
        pool.reset(seed=0)
        with pytest.raises(stepmill.UsageError, match="models that enable sleep or ipc have no snapshots"):
            stepmill.save(pool, None)


def test_a_state_is_given_to_many_envs_without_python_code_for_each() -> None:
    num_calls: dict[int, int] = {}
    kernel = stepmill.kernels.find("HalfCheetah-v5")
    for num_envs in (2, 50):
        with begun(stepmill.Pool([kernel] * num_envs, backend="kernel")) as pool:
            saved = stepmill.save(pool, None, env_ids=[0])
            calls: list[str] = []
            sys.setprofile(lambda frame, event, _, calls=calls: calls.append(event))
            try:
                stepmill.restore(pool, saved, env_ids=np.arange(1, num_envs))
            finally:
                sys.setprofile(None)
            num_calls[num_envs] = sum(event in ("call", "c_call") for event in calls)
    assert num_calls[50] == num_calls[2]
