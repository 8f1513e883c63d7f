"""MuJoCo tasks as kernels give what Gymnasium's tasks give, to the last bit, as long as an episode goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill

pytest.importorskip("numba")
mujoco = pytest.importorskip("mujoco")

NUM_STEPS = 150
IDS = [env_id for env_id in stepmill.kernels.names() if env_id.endswith("-v5")]


def _same_state(ours: Any, theirs: Any) -> None:
    """Put a kernel's env where a Gymnasium env is after its reset."""
    ours.reset(seed=0)
    model, data = theirs.unwrapped.model, ours.kept[0]
    mujoco.mj_resetData(model, data)
    data.qpos[:], data.qvel[:] = theirs.unwrapped.data.qpos, theirs.unwrapped.data.qvel
    mujoco.mj_forward(model, data)


@pytest.mark.parametrize("env_id", IDS)
def test_episodes_are_gymnasiums_to_the_last_bit(env_id: str) -> None:
    kernel = stepmill.kernels.find(env_id)
    ours, theirs = kernel(), gymnasium.make(env_id)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert kernel.max_episode_steps == gymnasium.spec(env_id).max_episode_steps
    theirs.action_space.seed(3)
    for seed in range(3):
        theirs.reset(seed=seed)
        _same_state(ours, theirs)
        for _ in range(NUM_STEPS):
            action = theirs.action_space.sample()
            mine, yours = ours.step(action), theirs.step(action)
            np.testing.assert_array_equal(mine[0], yours[0])
            assert (mine[1], mine[2]) == (float(yours[1]), yours[2])
            if yours[2]:
                break
    theirs.close()


@pytest.mark.parametrize("env_id", IDS)
def test_resets_are_near_those_of_gymnasium(env_id: str) -> None:
    ours, theirs = stepmill.kernels.find(env_id)(), gymnasium.make(env_id)
    mine = np.array([ours.reset(seed=seed)[0] for seed in range(200)])
    yours = np.array([theirs.reset(seed=seed)[0] for seed in range(200)])
    theirs.close()
    np.testing.assert_allclose(mine.mean(axis=0), yours.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(mine.std(axis=0), yours.std(axis=0), atol=0.05)


def test_threads_make_no_difference() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (30, 6, 6)).astype(np.float32)
    seen = []
    for num_threads in (1, 3):
        with stepmill.make_vec("HalfCheetah-v5", 6, backend="kernel", num_workers=num_threads) as envs:
            rows = [envs.reset(seed=4)[0]]
            rows += [np.concatenate([envs.step(action)[0].ravel(), envs.step(action)[1]]) for action in actions]
            seen.append(rows)
    for mine, yours in zip(*seen, strict=True):
        np.testing.assert_array_equal(mine, yours)


def test_a_simulation_that_diverges_is_a_fault_of_its_env() -> None:
    kernel = stepmill.kernels.find("HalfCheetah-v5")
    with stepmill.Pool([kernel] * 2, backend="kernel") as pool:
        pool.reset(seed=0)
        pool.call(_break_simulation, env_ids=[1])
        with pytest.raises(stepmill.EnvError, match=r"env 1 raised ValueError.*the simulation has diverged"):
            pool.step(np.zeros((2, 6), np.float32))
        pool.recv(1)
        pool.reset(env_ids=[1])
        assert np.isfinite(pool.step(np.zeros((2, 6), np.float32)).obs).all()


def _break_simulation(env: Any) -> None:
    import ctypes

    speeds = (ctypes.c_double * 9).from_address(int(env.state["qvel"]))
    speeds[0] = float("nan")


def test_simulations_have_no_snapshots() -> None:
    with stepmill.Pool([stepmill.kernels.find("Hopper-v5")], backend="kernel") as pool:
        pool.reset(seed=0)
        with pytest.raises(stepmill.EnvError, match="keeps memory beside its state"):
            pool.snapshot()


_XML = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body name="mass"><joint name="slide" type="slide" axis="1 0 0"/><geom size="0.1" mass="1"/></body>
  </worldbody>
  <actuator><motor joint="slide" ctrlrange="-1 1"/></actuator>
</mujoco>
"""


def _reset(sim: Any, rng: Any) -> None:
    sim.qpos[0] = rng.uniform(-1.0, 1.0)


def _observe(sim: Any, obs: Any) -> None:
    obs[0] = sim.qpos[0]
    obs[1] = sim.qvel[0]


def _measure(sim: Any) -> Any:
    return sim.qpos[0]


def _outcome(sim: Any, action: Any, before: float) -> tuple[Any, bool]:
    return sim.qpos[0] - before, abs(sim.qpos[0]) > 2.0


def test_a_task_may_be_a_model_and_functions_of_ones_own(tmp_path: Path) -> None:
    xml = tmp_path / "slide.xml"
    xml.write_text(_XML)
    task = stepmill.kernels.MujocoTask(
        name="Slide",
        xml=xml,
        frame_skip=4,
        obs_size=2,
        reset=_reset,
        observe=_observe,
        measure=_measure,
        outcome=_outcome,
        max_episode_steps=50,
    )
    with stepmill.Pool([stepmill.kernels.MujocoKernel(task)] * 3, backend="kernel") as pool:
        first = pool.reset(seed=0).obs
        batch = pool.step(np.array([[1.0], [0.0], [-1.0]], np.float32))
        np.testing.assert_allclose(batch.obs[:, 1], [0.04, 0.0, -0.04], atol=1e-9)
        np.testing.assert_allclose(batch.reward, batch.obs[:, 0] - first[:, 0])
