"""`stepmill.evaluate`: each pair of a task and a seed is played once, and faults are not zeros."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.evaluation.envs import FailsAlways, FailsOnce, Walk, forward


def facts(evaluation):
    """Return what must not depend on how an evaluation was run."""
    return [
        (each.task, each.seed, each.episode_return, each.length, each.success, dict(each.infos))
        for each in evaluation.episodes
    ]


def played_by_hand(seed, env_fn=Walk, options=None):
    env = env_fn()
    obs, _ = env.reset(seed=seed, options=options)
    total, length = 0.0, 0
    while True:
        obs, reward, terminated, truncated, info = env.step(forward(obs[None])[0])
        total, length = total + reward, length + 1
        if terminated or truncated:
            return (None, seed, total, length, info["is_success"], {})


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
@pytest.mark.parametrize("num_envs", [1, 4, 16])
def test_episodes_are_those_played_one_by_one_with_any_number_of_envs(backend, num_envs):
    found = stepmill.evaluate(forward, Walk, seeds=range(20), num_envs=num_envs, backend=backend)
    assert facts(found) == [played_by_hand(seed) for seed in range(20)]


def test_tasks_are_reset_options_and_env_functions():
    tasks = {"near": {"limit": 30}, "far": {"further": 40}, "fast": partial(Walk, speed=3)}
    found = stepmill.evaluate(forward, Walk, tasks=tasks, seeds=[5, 1, 9], num_envs=4, infos=["at", "absent"])
    assert [(each.task, each.seed) for each in found.episodes] == [(task, seed) for task in tasks for seed in (5, 1, 9)]
    for each in found.episodes:
        env_fn, options = (tasks[each.task], None) if callable(tasks[each.task]) else (Walk, tasks[each.task])
        assert facts(found)[found.episodes.index(each)][1:5] == played_by_hand(each.seed, env_fn, options)[1:5]
        assert set(each.infos) == {"at"}
    assert found.by_task["far"].success_rate == 0.0
    assert found.by_task["near"].success_rate == 1.0


def test_tasks_with_other_spaces_are_listed_with_their_fault():
    class Other(Walk):
        action_space = gymnasium.spaces.Discrete(5)

    found = stepmill.evaluate(forward, tasks=[Walk, Other], seeds=[0], num_envs=1, retries=0)
    good, bad = found.episodes
    assert good.fault is None
    assert "task 1 has the spaces" in bad.fault


class RaisesAtClose(Walk):
    def close(self):
        raise RuntimeError("the viewer is gone")


def test_an_env_that_raises_in_close_does_not_spoil_the_next_task():
    found = stepmill.evaluate(forward, tasks=[RaisesAtClose, Walk], seeds=[0, 1], num_envs=1, retries=0)
    assert [episode.fault for episode in found.episodes] == [None] * 4


def test_faults_are_played_again_and_change_nothing(tmp_path):
    expected = stepmill.evaluate(forward, Walk, seeds=range(18))
    found = stepmill.evaluate(
        forward,
        partial(FailsOnce, str(tmp_path)),
        seeds=range(18),
        num_envs=6,
        num_workers=3,
        step_timeout_s=2,
        retries=12,
    )
    assert facts(found) == facts(expected)
    assert {int(path.name) for path in tmp_path.iterdir()} == {*range(0, 18, 2)}
    assert all(each.attempts >= 2 for each in found.episodes if each.seed % 6 in (0, 2))


class Deadly(Walk):
    """Kills its process in the third step of each episode with seed 2."""

    def reset(self, *, seed=None, options=None):
        self.left = 3 if seed == 2 else None
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_an_episode_that_kills_its_worker_costs_those_beside_it_no_attempt():
    options = {"num_envs": 4, "backend": "process", "num_workers": 1, "retries": 1}
    found = stepmill.evaluate(forward, Deadly, seeds=range(4), **options)
    assert [episode.seed for episode in found.episodes if episode.fault is not None] == [2]
    assert [episode.attempts for episode in found.episodes] == [1, 1, 2, 1]


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_an_episode_that_always_fails_is_listed_and_not_counted_as_zero(backend):
    found = stepmill.evaluate(forward, FailsAlways, seeds=range(6), num_envs=2, backend=backend, retries=1)
    failed = found.episodes[3]
    assert (failed.episode_return, failed.length, failed.success, failed.attempts) == (None, None, None, 2)
    assert "never with 3" in failed.fault
    played = [each for each in found.episodes if each.seed != 3]
    assert found.summary.num_failed == 1
    assert found.summary.mean_return == np.mean([each.episode_return for each in played])


KILLED = """
import os, signal, sys
import stepmill
from tests.evaluation.envs import Walk, forward

calls = 0
def policy(obs):
    global calls
    calls += 1
    if calls == 60:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(obs)

stepmill.evaluate(policy, Walk, seeds=range(40), num_envs=4, resume=sys.argv[1])
"""


@pytest.mark.orphans
def test_a_run_that_was_killed_plays_only_what_is_missing(tmp_path):
    path = tmp_path / "eval.jsonl"
    run = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=os.getcwd(), timeout=120, check=False)
    assert run.returncode == -signal.SIGKILL
    lines = path.read_text().splitlines()
    assert 1 < len(lines) < 41
    path.write_text("\n".join([*lines, lines[-1][:20]]))  # a line that was cut off
    played = []

    def policy(obs, episode_ids, is_first):
        played.extend(episode_ids[is_first].tolist())
        return forward(obs)

    policy.__qualname__ = "policy"  # as that of the run that was killed
    found = stepmill.evaluate(policy, Walk, seeds=range(40), num_envs=4, resume=path)
    known = {json.loads(line)["seed"] for line in lines[1:]}
    assert sorted(played) == [seed for seed in range(40) if seed not in known]
    assert facts(found) == facts(stepmill.evaluate(forward, Walk, seeds=range(40)))
    assert len(path.read_text().splitlines()) == 41
    assert facts(stepmill.evaluate(policy, Walk, seeds=range(40), resume=path)) == facts(found)


def test_a_policy_with_memory_knows_whose_rows_it_gets():
    counts = {}

    def policy(obs, episode_ids, is_first):
        for episode_id, first in zip(episode_ids.tolist(), is_first.tolist(), strict=True):
            counts[episode_id] = 1 if first else counts[episode_id] + 1
        return forward(obs)

    found = stepmill.evaluate(policy, Walk, tasks=[{"limit": 5}, {"limit": 9}], seeds=range(7), num_envs=5)
    assert [counts[episode_id] for episode_id in range(14)] == [each.length for each in found.episodes]


class Recurrent:
    """Has the form of sb3-contrib's recurrent models: two states [layers, B, ...], which it starts itself."""

    def predict(self, obs, state=None, episode_start=None, deterministic=False):
        assert deterministic
        state = (np.zeros((1, len(obs), 3)), np.zeros((2, len(obs), 1))) if state is None else state
        counts = tuple(np.where(episode_start[None, :, None], 0.0, part) + 1 for part in state)
        for part in counts:
            assert (part == obs[:, 2][None, :, None] + 1).all()  # as many as the env has made steps, and one
        return forward(obs), counts


def test_the_state_of_a_recurrent_model_stays_with_its_episode():
    found = stepmill.evaluate(Recurrent(), Walk, seeds=range(20), num_envs=4)
    assert facts(found) == [played_by_hand(seed) for seed in range(20)]


@pytest.mark.parametrize(("batch_size", "num_rows", "num_envs"), [("fixed", 32, 4), (5, 5, 4), (5, 5, 16)])
def test_rows_are_filled_up_to_a_fixed_number_which_may_be_smaller_than_that_of_envs(batch_size, num_rows, num_envs):
    sizes = set()

    def policy(obs, episode_ids, is_first):
        sizes.add((len(obs), len(episode_ids), len(is_first)))
        assert not is_first[episode_ids == -1].any()
        return forward(obs)

    found = stepmill.evaluate(policy, Walk, seeds=range(20), num_envs=num_envs, batch_size=batch_size)
    assert sizes == {(num_rows,) * 3}
    assert facts(found) == [played_by_hand(seed) for seed in range(20)]


def test_success_is_a_name_or_a_function_of_the_last_info():
    named = stepmill.evaluate(forward, Walk, seeds=range(5), success="is_success")
    by_function = stepmill.evaluate(forward, Walk, seeds=range(5), success=lambda info: info["at"] < 5)
    assert [each.success for each in named.episodes] == [played_by_hand(seed)[4] for seed in range(5)]
    assert [each.success for each in by_function.episodes] == [
        each.infos["at"] < 5 for each in stepmill.evaluate(forward, Walk, seeds=range(5), infos=["at"]).episodes
    ]
    with pytest.raises(stepmill.UsageError, match=r"success='won', but the info .* \['at', 'is_success'\]"):
        stepmill.evaluate(forward, Walk, seeds=range(5), success="won")
    assert stepmill.evaluate(lambda obs: np.zeros(len(obs), int), "CartPole-v1", seeds=[0]).summary.success_rate is None


def test_it_prints_as_a_table_and_becomes_json(tmp_path):
    found = stepmill.evaluate(forward, Walk, tasks={"near": {}, "far": {"further": 40}}, seeds=range(10))
    text = str(found)
    assert "near" in text
    assert "100.0%" in text
    path = tmp_path / "found.json"
    assert json.loads(found.to_json(path)) == json.loads(path.read_text())
    content = json.loads(path.read_text())
    assert len(content["episodes"]) == 20
    assert content["by_task"]["far"]["success_rate"] == 0.0


def test_videos_of_failures_are_written_where_they_fail(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    make = partial(Walk, render_mode="rgb_array")
    tasks = {"near": {"limit": 40}, "far away": {"further": 40}}
    found = stepmill.evaluate(forward, make, tasks=tasks, seeds=range(2), videos=tmp_path, record="failures")
    assert {path.name for path in tmp_path.iterdir()} == {"far_away-0.mp4", "far_away-1.mp4"}
    assert [each.success for each in found.episodes] == [True, True, False, False]
    import imageio_ffmpeg

    assert imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "far_away-0.mp4"))[0] == found.episodes[2].length + 1


def test_only_the_first_episodes_are_recorded(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    make = partial(Walk, render_mode="rgb_array")
    stepmill.evaluate(forward, make, seeds=range(4, 9), videos=tmp_path, record=2, num_envs=3)
    assert {path.name for path in tmp_path.iterdir()} == {"4.mp4", "5.mp4"}


def test_replay_absorbs_faults(tmp_path):
    found = stepmill.evaluate(
        forward, partial(FailsOnce, str(tmp_path)), seeds=range(0, 12, 2), num_envs=3, num_workers=3, step_timeout_s=2,
        on_fault="replay", seeding="per_episode",
    )  # fmt: skip
    assert facts(found) == facts(stepmill.evaluate(forward, Walk, seeds=range(0, 12, 2)))
    assert {each.attempts for each in found.episodes} == {1}
