"""MuJoCo tasks as kernels give what Gymnasium's tasks give, to the last bit, as long as an episode goes on.

The rewards of Reacher and Pusher are the exception: Gymnasium computes distances with `np.linalg.norm`, whose BLAS rounds
differently from machine to machine.
"""

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
mujoco = pytest.importorskip("mujoco")

NUM_STEPS = 150
QUICK = ("HalfCheetah-v5",)  # the compilation of a task takes seconds
IDS = [
    pytest.param(env_id, marks=() if env_id in QUICK else pytest.mark.slow)
    for env_id in stepmill.kernels.names()
    if env_id.endswith("-v5")
]
NORM_ROUNDING = 4e-16  # relative: np.linalg.norm of two numbers
BLAS_ROUNDING = {"Reacher-v5": 2e-15, "Pusher-v5": 2e-15}  # relative


def _same_state(ours: Any, theirs: Any) -> None:
    """Put a kernel's env where a Gymnasium env is after its reset."""
    ours.reset(seed=0)
    model, data = theirs.unwrapped.model, ours.kept[0]
    mujoco.mj_resetData(model, data)
    data.qpos[:], data.qvel[:] = theirs.unwrapped.data.qpos, theirs.unwrapped.data.qvel
    mujoco.mj_forward(model, data)


@pytest.mark.parametrize("env_id", IDS)
def test_episodes_are_gymnasiums_to_the_last_bit(env_id: str) -> None:
    _compare_episodes(env_id, 3, {})


def _compare_episodes(env_id: str, num_episodes: int, arguments: dict[str, Any]) -> None:
    kernel = stepmill.kernels.find(env_id, **arguments)
    ours, theirs = kernel(), gymnasium.make(env_id, **arguments)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert kernel.max_episode_steps == gymnasium.spec(env_id).max_episode_steps
    theirs.action_space.seed(3)
    for seed in range(num_episodes):
        theirs.reset(seed=seed)
        _same_state(ours, theirs)
        for _ in range(NUM_STEPS):
            action = theirs.action_space.sample()
            mine, yours = ours.step(action), theirs.step(action)
            np.testing.assert_array_equal(mine[0], yours[0])
            np.testing.assert_allclose(mine[1], float(yours[1]), rtol=BLAS_ROUNDING.get(env_id, 0.0), atol=0.0)
            assert mine[2] == yours[2]
            assert mine[4].keys() == yours[4].keys()
            for name, value in yours[4].items():
                rounding = NORM_ROUNDING if name == "distance_from_origin" else BLAS_ROUNDING.get(env_id, 0.0)
                np.testing.assert_allclose(mine[4][name], value, rtol=rounding, atol=0.0, err_msg=name)
                assert np.asarray(mine[4][name]).dtype == np.asarray(value).dtype, name
            if yours[2]:
                break
    theirs.close()


_RUN = {"forward_reward_weight": 0.7, "ctrl_cost_weight": 0.3, "exclude_current_positions_from_observation": False}
_STAND = {"healthy_reward": 2.5, "terminate_when_unhealthy": False}
_PARTS = {"exclude_current_positions_from_observation": False, "include_cfrc_ext_in_observation": False}
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("HalfCheetah-v5", _RUN),
    ("HalfCheetah-v5", {"frame_skip": 2}),
    ("Swimmer-v5", _RUN),
    ("Hopper-v5", {**_RUN, **_STAND}),
    ("Hopper-v5", {"healthy_state_range": (-4.0, 4.0), "healthy_z_range": (1.0, 2.0), "healthy_angle_range": (-1, 1)}),
    ("Walker2d-v5", {**_RUN, **_STAND}),
    ("Walker2d-v5", {"healthy_z_range": [0.5, 3], "healthy_angle_range": (-0.3, 0.3), "xml_file": "walker2d.xml"}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 3.0}),
    ("Reacher-v5", {"reward_dist_weight": 0.3, "reward_control_weight": 0.2}),
    ("Pusher-v5", {"reward_near_weight": 0.4, "reward_dist_weight": 3, "reward_control_weight": 0.7}),
    ("Ant-v5", {**_RUN, **_STAND, "main_body": "torso", "include_cfrc_ext_in_observation": False}),
    ("Ant-v5", {"contact_force_range": (-0.2, 0.5), "contact_cost_weight": 0.1, "healthy_z_range": (0.3, 0.9)}),
    ("Ant-v5", {"main_body": 3}),
    ("Humanoid-v5", {**_PARTS, **_STAND, "forward_reward_weight": 2.0, "ctrl_cost_weight": 0.2}),
    ("Humanoid-v5", {"contact_cost_weight": 1e-3, "contact_cost_range": (0.2, 0.5), "healthy_z_range": (1.2, 1.5)}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "include_qfrc_actuator_in_observation": False}),
    ("HumanoidStandup-v5", {**_PARTS, "ctrl_cost_weight": 0.2, "uph_cost_weight": 3.0}),
    ("HumanoidStandup-v5", {"impact_cost_weight": 1e-3, "impact_cost_range": (0.1, 4.0)}),
    ("HumanoidStandup-v5", {"include_cvel_in_observation": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "arguments"), ARGUMENTS)
def test_episodes_with_arguments_are_gymnasiums(env_id: str, arguments: dict[str, Any]) -> None:
    _compare_episodes(env_id, 1, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v5", "Hopper-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Humanoid-v5"]
)
def test_the_noise_of_resets_has_the_scale_that_is_given(env_id: str) -> None:
    scales = []
    for scale in (0.0, 0.05):
        env = stepmill.kernels.find(env_id, reset_noise_scale=scale)()
        scales.append(np.ptp([env.reset(seed=seed)[0] for seed in range(40)], axis=0).max())
    assert scales[0] == 0.0
    assert scales[1] > 0.02


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
    env.outside.data.qvel[0] = np.nan


_THREE_KERNELS = """
import stepmill

for limit in (None, 7, 8):
    with stepmill.make_vec("HalfCheetah-v5", 2, backend="kernel", max_episode_steps=limit, ctrl_cost_weight=0.1) as envs:
        envs.reset(seed=0)
with stepmill.make_vec("HalfCheetah-v5", 2, backend="kernel", ctrl_cost_weight=0.2) as envs:
    envs.reset(seed=0)
"""


@pytest.mark.slow
def test_mujoco_says_once_what_is_deprecated_in_a_model(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", _THREE_KERNELS], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert (run.stdout + run.stderr).count("settotalmass") <= 1


def test_a_model_that_is_no_file_is_refused() -> None:
    with pytest.raises(stepmill.UsageError, match=r"the model no_such\.xml cannot be read"):
        stepmill.kernels.MujocoKernel(
            stepmill.kernels.MujocoTask("None", Path("no_such.xml"), 1, 1, _reset, _observe, _measure, _outcome)
        )


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


def test_an_edited_model_is_read_again_with_the_files_that_it_includes(tmp_path: Path) -> None:
    assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
    (tmp_path / "body.xml").write_text((assets / "hopper.xml").read_text())
    xml = tmp_path / "outer.xml"
    xml.write_text('<mujoco><include file = "body.xml"/></mujoco>')

    def find(**more: Any) -> Any:
        return stepmill.kernels.find("Hopper-v5", xml_file=str(xml), **more)

    first = find()
    assert find() is first
    text = (tmp_path / "body.xml").read_text()
    (tmp_path / "body.xml").write_text(text.replace('timestep="0.002"', 'timestep="0.001"'))
    assert "0.001" in (tmp_path / "body.xml").read_text()
    assert find().identity != first.identity
    assert find(max_episode_steps=5).identity == find().identity
    with pytest.raises(stepmill.UsageError, match=r"the model of Hopper-v5 .* differs from that of the pool"):
        pickle.loads(pickle.dumps(first))
