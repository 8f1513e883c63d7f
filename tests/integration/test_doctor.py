"""`stepmill doctor` finds planted faults, and nothing in sound envs."""

from __future__ import annotations

import itertools
import json
import threading
from functools import partial

import gymnasium
import pytest
from gymnasium import spaces

from stepmill.observe.catalog import find_env
from stepmill.observe.compared_runs import check_seeds
from stepmill.observe.doctor import GROUPS, diagnose
from stepmill.observe.doctor_probe import check_backends, check_steps
from stepmill.observe.findings import Severity, make_finding
from stepmill.spec.errors import UsageError
from stepmill.testing import CheckFailed, CountingEnv, check_env
from tests.harness.commands import run_command
from tests.harness.coroutine_envs import NoSpaces, Turns
from tests.harness.sick_envs import (
    SICK,
    Clocked,
    FourValues,
    GlobalGenerator,
    Hanging,
    Healthy,
    Leaving,
    LeavingChildren,
    Remembering,
    Rounded,
    SharedState,
    Slow,
    SlowReset,
    WrongShape,
)

GROUP_OF = {
    "global-generator": "seeds",
    "non-deterministic": "seeds",
    "state-survives-reset": "seeds",
    "shared-state": "seeds",
    "fork-unsafe": "forks",
}
NUM_STEPS = {"holds-gil": 10, "slow-reset": 60, "threads": 320}


@pytest.mark.slow
@pytest.mark.parametrize("env", [each for each in SICK if each not in (Hanging, Slow)], ids=lambda each: each.__name__)
def test_a_planted_fault_is_found_and_nothing_else(env):
    found = diagnose(env, groups=[GROUP_OF.get(env.check, "steps")], num_steps=NUM_STEPS.get(env.check, 2000))
    assert [finding.check for finding in found.findings] == [env.check]
    finding = found.findings[0]
    assert finding.what
    assert finding.where
    assert finding.cure
    assert found.is_healthy == (finding.severity is Severity.NOTE)


def test_a_rounding_error_is_no_lie_of_the_space():
    (finding,) = diagnose(Rounded, num_steps=10, groups=["steps"]).findings
    assert (finding.check, finding.severity) == ("observation-space", Severity.WARNING)
    assert "a rounding error" in finding.what


class Parallel:
    """As PettingZoo's parallel envs: a method returns the space of an agent."""

    def action_space(self, agent):
        return spaces.Discrete(2)

    def step(self, action):
        raise AssertionError("it is not stepped")

    def close(self):
        raise AttributeError("as textarena's games before their first reset")


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (Turns, "its step is a coroutine"),
        (NoSpaces, "it declares no action_space"),
        (Parallel, "it declares no action_space"),
    ],
)
def test_an_env_that_cannot_be_checked_is_reported_once(env, why):
    (finding,) = diagnose(env, num_steps=10).findings
    assert (finding.check, finding.severity) == ("not-checked", Severity.ERROR)
    assert why in finding.what


@pytest.mark.parametrize("check", [check_seeds, check_backends])
def test_of_a_slow_env_fewer_steps_are_compared_and_a_note_says_how_many(check):
    found = []
    check(Slow, lambda *finding: found.append(finding), 0, 0.3)
    ((name, _, where),) = found
    assert make_finding(*found[0]).severity is Severity.NOTE
    assert name == "few-steps"
    assert where.endswith(" steps")


def test_an_env_that_hangs_is_found_and_ended():
    found = diagnose(Hanging, limit_s=4.0)
    assert [finding.check for finding in found.findings] == ["hangs"]
    assert found.groups == ["steps"]


def test_an_env_that_ends_its_process_with_status_0_is_found():
    (finding,) = diagnose(Leaving, groups=["steps"], num_steps=10).findings
    assert (finding.check, finding.what) == ("crashes", "the env ended its process with exit status 0")


def test_processes_that_an_env_left_behind_are_ended():
    found = diagnose(LeavingChildren, num_steps=10, groups=["steps"])
    assert [finding.check for finding in found.findings] == ["children-left"]


def test_a_factory_that_cannot_be_pickled_is_found():
    lock = threading.Lock()
    found = diagnose(partial(Healthy, lock))
    assert [finding.check for finding in found.findings] == ["unpicklable-factory"]
    assert found.groups == []


@pytest.mark.slow
def test_a_sound_env_has_no_findings_in_any_group():
    found = diagnose(Healthy, num_steps=2000)
    assert found.findings == []
    assert found.groups == [*GROUPS]
    assert "nothing found" in str(found)


@pytest.mark.slow
def test_shared_state_shows_as_a_difference_between_backends():
    found = diagnose(SharedState, groups=["backends"])
    assert {finding.check for finding in found.findings} == {"backend-differs"}


def test_unknown_checks_are_refused():
    with pytest.raises(UsageError, match="choose from steps"):
        diagnose(Healthy, groups=["everything"])


def run_doctor(*arguments):
    return run_command("doctor", *arguments)


@pytest.mark.slow
def test_the_command_exits_with_2_for_an_env_that_it_cannot_check():
    done = run_command("doctor", "tests.harness.sick_envs:Unspaced-v0", "--json")
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["findings"][0]["check"] == "not-checked"


def test_a_close_that_is_a_coroutine_is_awaited():
    closed = []

    class Awaited(Rounded):
        async def close(self):
            closed.append(True)

    check_steps(Awaited, lambda *finding: None, 10, 5.0)
    assert closed == [True]


def test_the_command_prints_findings_and_exits_with_1():
    done = run_doctor("tests.harness.sick_envs:Sick-v0", "--steps", "50")
    assert done.returncode == 1
    assert "bad-reward: the reward is nan" in done.stdout
    assert "cure:" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_the_command_prints_json():
    done = run_doctor("tests.harness.sick_envs:Healthy-v0", "--steps", "50", "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout) == {"env": "Healthy-v0", "is_healthy": True, "checks": [*GROUPS], "findings": []}


CLASSIC = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
TOY = ["Taxi-v4", "FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1"]
OTHERS = ["ALE/Pong-v5", "HalfCheetah-v5"]


@pytest.mark.slow
@pytest.mark.parametrize("env_id", [*CLASSIC, *TOY, *OTHERS])
def test_nothing_is_found_in_envs_that_come_with_gymnasium(env_id):
    if env_id not in OTHERS and env_id not in gymnasium.registry:
        env_id = env_id[:-1] + str(int(env_id[-1]) - 1)
    found = diagnose(find_env(env_id).make, name=env_id)
    assert found.findings == []


@pytest.mark.parametrize("env", [WrongShape, FourValues, GlobalGenerator, SharedState, Clocked, Remembering])
def test_check_env_raises_what_doctor_finds(env):
    with pytest.raises(CheckFailed, match=rf"^{env.check}: "):
        check_env(env, num_steps=50)


class Waiting(Healthy):
    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize(("env", "why"), [(Waiting, "a coroutine"), (NoSpaces, "no action_space")])
def test_check_env_raises_why_an_env_cannot_be_checked(env, why):
    with pytest.raises(CheckFailed, match=f"^not-checked: .*{why}"):
        check_env(env)


@pytest.mark.parametrize("env", [Healthy, Rounded, SlowReset, CountingEnv])
def test_check_env_accepts_sound_envs_and_ignores_warnings(env):
    check_env(env, seed=3, num_steps=50)


def test_check_env_compares_infos_unless_they_are_ignored():
    with pytest.raises(CheckFailed, match="non-deterministic"):
        check_env(TimedInfo, num_steps=5)
    check_env(TimedInfo, num_steps=5, ignore_info=["time"])


class TimedInfo(Healthy):
    clock = itertools.count()

    def step(self, action):
        *data, info = super().step(action)
        return (*data, {**info, "time": next(self.clock)})
