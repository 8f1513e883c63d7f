"""The benchmark of training programs: how it changes a program of another project, and the table of its results."""

import json

import pytest

from benchmarks import program_tables
from benchmarks.program_clock import Clock
from benchmarks.program_texts import CLEANRL_PPO, Zoo

PPO = """import gymnasium as gym
envs = gym.vector.SyncVectorEnv([])
if True:
    for iteration in range(1):
        for step in range(0, args.num_steps):
            pass

        # bootstrap value if not done
    envs.close()
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "cleanrl" / "cleanrl").mkdir(parents=True)
    monkeypatch.setenv("STEPMILL_ORIGINALS", str(tmp_path))
    return tmp_path / "cleanrl" / "cleanrl" / "ppo.py"


def test_a_program_is_changed_in_the_class_and_gets_a_clock(checkout, tmp_path):
    checkout.write_text(PPO)
    arguments = CLEANRL_PPO.prepare("stepmill", 3, 1024, tmp_path)
    text = (tmp_path / "ppo.py").read_text()
    compile(text, "ppo.py", "exec")
    assert arguments == ["ppo.py", "--total-timesteps", "1024", "--seed=3"]
    assert "envs = stepmill.VectorEnv([])" in text
    assert text.index("clock.begin_rollout()") < text.index("for step in") < text.index("clock.end_rollout()")
    assert text.endswith("    clock.end(agent)\n")
    CLEANRL_PPO.prepare("SyncVectorEnv", 3, 1024, tmp_path)
    assert "stepmill" not in (tmp_path / "ppo.py").read_text()


def test_a_program_that_has_changed_is_not_run(checkout, tmp_path):
    checkout.write_text(PPO.replace("bootstrap", "compute"))
    with pytest.raises(SystemExit, match="0 times '        # bootstrap value if not done"):
        CLEANRL_PPO.prepare("stepmill", 1, 1024, tmp_path)


def test_a_checkout_that_is_missing_is_named(checkout, tmp_path):
    with pytest.raises(SystemExit, match=r"no cleanrl/cleanrl/ppo\.py in \$STEPMILL_ORIGINALS"):
        CLEANRL_PPO.prepare("stepmill", 1, 1024, tmp_path)


def test_rl_zoo_gets_a_module_that_names_the_class_only_for_stepmill(tmp_path):
    zoo = Zoo("ppo", "CartPole-v1")
    assert "--vec-env" not in zoo.prepare("stepmill", 1, 512, tmp_path)
    assert "default_vec_env_cls = SB3VecEnv" in (tmp_path / "in_zoo.py").read_text()
    assert zoo.prepare("subproc", 1, 512, tmp_path)[-6:-4] == ["--vec-env", "subproc"]
    assert "SB3VecEnv" not in (tmp_path / "in_zoo.py").read_text()


def run(engine, seed, whole_s, learned="a", program="sb3-ppo-pong"):
    return {
        "program": program,
        "engine": engine,
        "seed": seed,
        "whole_s": whole_s,
        "learned": learned,
        "others": 0.01,
    } | {"start_s": 1.0, "rollout_s": 2.0, "learner_s": whole_s - 3.0}


def results(*runs):
    return {"machine": {"cores": 2, "cpu": "a", "commit": "0123456789ab"}, "runs": list(runs)}


def pong(ours_s, learned="a"):
    theirs = [run(engine, seed, 10.0 + seed) for engine in ("DummyVecEnv", "SubprocVecEnv") for seed in (1, 2, 3)]
    return results(*theirs, *(run("stepmill", seed, ours_s, learned) for seed in (1, 2, 3)))


def test_a_row_has_medians_and_a_reason_where_stepmill_is_not_ahead():
    title = "| SB3's PPO, Pong, 8 envs, 4,096 steps | DummyVecEnv 12.0, SubprocVecEnv 12.0"
    assert f"{title} | 10.0 | 1.0, 2.0, 7.0 | 1.20× | 3 of 3 seeds |  |\n" in program_tables.to_block(pong(10.0))
    behind = program_tables.to_block(pong(16.0, "b"))
    assert f"{title} | 16.0 | 1.0, 2.0, 13.0 | 0.75× | 0 of 3 seeds | The learner takes most of the time |\n" in behind


def test_the_last_results_of_a_program_count():
    later = results(run("stepmill", 7, 5.0), run("stepmill", 1, 9.0, program="sb3-sac-n1"))
    merged = program_tables.merge([pong(10.0), results(run("stepmill", 1, 8.0, program="sb3-sac-n1")), later])
    assert [(each["program"], each["seed"], each["whole_s"]) for each in merged["runs"]] == [
        ("sb3-ppo-pong", 7, 5.0),
        ("sb3-sac-n1", 1, 9.0),
    ]


def test_a_clock_divides_a_training_into_rollouts_and_learning(capsys):
    clock = Clock()
    clock.begin_rollout()
    learn = clock.between_rollouts(lambda value: value + 1)
    assert learn(1) == 2
    assert clock.rollout_s > 0 < clock.learner_s
    clock.end(b"weights")
    first = json.loads(capsys.readouterr().out)
    clock.end(b"others")
    assert set(first) == {"start_s", "rollout_s", "learner_s", "learned"}
    assert json.loads(capsys.readouterr().out)["learned"] != first["learned"]
