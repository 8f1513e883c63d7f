"""`stepmill tune`: a whole search of an env, and what it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import stepmill
from stepmill.spec.errors import EnvError, EnvTimeout
from stepmill.testing import CountingEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import ROOT, run_source
from tests.harness.sick_envs import Hanging, Raising

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "stepmill", "tune"]
SHORT = ["--num-envs", "2", "--budget-s", "4"]


def run_tune(*arguments, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=2 * HANG_GUARD_S,
        cwd=cwd,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("flags", [[], ["--async"]])
def test_tune_prints_a_program_that_runs(flags):
    done = run_tune("CartPole-v1", *SHORT, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("CartPole-v1, 2 envs, ")
    printed = done.stdout[done.stdout.index("\nimport ") :]
    program, _, _ = printed.partition("\n# or")
    use = "pool.reset(seed=0); pool.close()" if flags else "envs.reset(seed=0); envs.close()"
    ran = run_source(f"{program}\n{use}\nprint('done')")
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["done"]), ran.stderr


def test_tune_prints_json_of_an_env_of_a_module():
    for budget_s in ("4", "20", "100"):  # what is measured alone takes all of a short budget on a busy machine
        arguments = ["--num-envs", "2", "--budget-s", budget_s, "--json", "--quiet"]
        done = run_tune("tests.harness.sick_envs:Healthy-v0", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        if found["choice"]["steps_per_s"] is not None:
            break
    assert (found["env"], found["num_envs"]) == ("Healthy-v0", 2)
    assert found["choice"]["steps_per_s"] > 0
    assert 'make_vec("tests.harness.sick_envs:Healthy-v0", num_envs=2' in found["code"]
    assert found["profile"]["episode_steps"] == pytest.approx(20, rel=0.2)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["NoSuchEnv-v0"], 2, "unknown env id"),
        (["CartPole-v1", "--budget-s", "0"], 2, "Invalid value"),
        (["tests.harness.sick_envs:Raising-v0"], 1, "a deliberate failure"),
    ],
)
def test_tune_says_what_is_wrong(arguments, status, text):
    done = run_tune(*arguments)
    assert done.returncode == status
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_env_that_raises_or_hangs_is_an_error():
    with pytest.raises(EnvError, match="a deliberate failure"):
        stepmill.tune(Raising, 2, budget_s=4)
    with pytest.raises(EnvTimeout, match="env 0"):
        stepmill.tune(Hanging, 2, budget_s=4, step_timeout_s=0.5)


def test_ctrl_c_prints_what_is_known_and_leaves_nothing():
    from stepmill.observe.attach import find_pools

    command = [*COMMAND, "CartPole-v1", "--num-envs", "4", "--budget-s", "600", "--no-async"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while len(find_pools(running.pid)) < 2:  # several pools: the comparison has begun
            os.sched_yield()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=HANG_GUARD_S)
    assert running.returncode == 130
    assert ", interrupted" in out.splitlines()[0]
    assert "import stepmill" in out
    assert err == "stepmill: interrupted\n"


def test_a_result_gives_keywords_for_a_vector_env():
    result = stepmill.tune(CountingEnv, 2, budget_s=3, is_async=False)
    assert isinstance(result, stepmill.TuneResult)
    with stepmill.VectorEnv([CountingEnv] * (2 + result.options.resets.spare_envs), **result.keywords) as envs:
        assert envs.reset(seed=0)[0].shape == (2, 3)
