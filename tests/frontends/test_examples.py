"""The examples run, in a short form, and their own assertions hold. An example whose library is missing is left to `make test-frontends`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.frontends.guides import run_guide

EXAMPLES = Path(__file__).parents[2] / "examples"
# file: (modules it needs, arguments of the short form)
RUNS = {
    "vector_env.py": ((), ("serial", "--curve", "{file}")),
    "pool_async.py": ((), ("--bars", "{file}")),
    "text_sandbox.py": ((), ()),
    "text_policy.py": ((), ("--episodes", "160")),
    "ppo_cartpole.py": (("torch",), ("--steps", "6000")),
    "impala_async.py": (("torch",), ("--steps", "6000")),
    "cleanrl_ppo.py": (("torch",), ("--total-timesteps", "6000", "--backend", "serial")),
    "pettingzoo_agents.py": (("pettingzoo",), ("--rounds", "10")),
    "evaluate.py": (("stable_baselines3",), ()),
    "evaluate_counting.py": (("stable_baselines3",), ("--bars", "{file}")),
    "sb3_ppo.py": (("stable_baselines3",), ("--steps", "1024")),
    "ray_cartpole.py": (("ray",), ("--rounds", "20")),
    "action_chunks.py": ((), ()),
    "kill_me.py": ((), ("--kills", "3", "--updates", "12")),
    "go_explore.py": (("numba",), ("--rounds", "20", "--curve", "{file}")),
    "cleanrl_ppo_resume.py": (("torch",), ("{file}", "--iterations", "2")),
    "sb3_ppo_resume.py": (("stable_baselines3",), ("{file}", "--steps", "1024")),
    "tianshou_ppo.py": (("tianshou",), ("--steps", "4096")),
    "torchrl_collector.py": (("torchrl",), ("--frames", "4096")),
}
HERE = [name for name, (modules, _) in RUNS.items() if all(map(find_spec, modules))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.orphans
@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name, tmp_path):
    done = run(name, tmp_path / "file", *RUNS[name][1])
    assert done.returncode == 0, done.stderr


def run(name, file, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *(each.format(file=file) for each in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


RESUMED = {
    "cleanrl_ppo_resume.py": (("--iterations", "12", "--every", "3"), ("--stop-at", "8")),
    "sb3_ppo_resume.py": (("--steps", "6144", "--every", "2"), ("--stop-at", "4096")),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.orphans
@pytest.mark.parametrize("name", [name for name in RESUMED if name in HERE])
def test_a_training_that_is_resumed_ends_with_the_weights_of_one_that_was_never_killed(name, tmp_path):
    arguments, stop = RESUMED[name]
    whole = run(name, tmp_path / "whole", "{file}", *arguments)
    assert run(name, tmp_path / "file", "{file}", *arguments, *stop).returncode == 143
    assert run(name, tmp_path / "file", "{file}", *arguments).stdout == whole.stdout != ""


def test_every_example_has_a_short_form_that_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.slow
def test_the_api_references_examples_that_need_other_libraries_run(tmp_path):
    for library in ("envpool", "stable_baselines3", "tianshou", "torchrl"):
        pytest.importorskip(library)
    run_guide("../api_examples", tmp_path, ignored=".*precision lowered by casting")
