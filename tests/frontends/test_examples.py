"""The examples run, in a short form, and their own assertions hold. An example whose library is missing is left to `make test-frontends`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# file: (modules it needs, arguments of the short form)
RUNS = {
    "vector_env.py": ((), ()),
    "pool_async.py": ((), ()),
    "text_sandbox.py": ((), ()),
    "text_policy.py": ((), ("160",)),
    "ppo_cartpole.py": (("torch",), ("--steps", "6000")),
    "impala_async.py": (("torch",), ("--steps", "6000")),
    "cleanrl_ppo.py": (("torch",), ("--total-timesteps", "6000", "--backend", "serial")),
    "cleanrl_ppo_atari.py": (("torch", "ale_py"), ("--total-timesteps", "32", "--num-envs", "2", "--num-steps", "16")),
    "ppo_atari.py": (("torch", "ale_py"), ("--steps", "256", "--envs", "2")),
    "pettingzoo_agents.py": (("pettingzoo",), ("--rounds", "10")),
    "evaluate.py": (("stable_baselines3",), ()),
    "evaluate_counting.py": (("stable_baselines3",), ()),
    "sb3_ppo.py": (("stable_baselines3",), ("--steps", "1024")),
    "ray_cartpole.py": (("ray",), ("--rounds", "20")),
    "torchrl_collector.py": (("torchrl",), ("--frames", "4096")),
}
HERE = [name for name, (modules, _) in RUNS.items() if all(map(find_spec, modules))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.orphans
@pytest.mark.parametrize("name", HERE)
def test_an_example_runs(name):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *RUNS[name][1]], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_example_has_a_short_form_that_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUNS)
