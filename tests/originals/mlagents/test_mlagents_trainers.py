"""SubprocessEnvManager with the real ML-Agents trainers: timers, classes, subclasses, and the program of the page."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepmill.frontends.mlagents import ManagerOptions, SubprocessEnvManager
from tests.harness.pools import keep_closed
from tests.harness.unity_envs import ScriptedBehaviors
from tests.originals.mlagents.sides import MARKS, class_of, run_options
from tests.originals.pages import run_page, run_training
from tests.originals.rows import ORIGINAL
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = MARKS


@pytest.fixture
def manager_of() -> Iterator[Callable[..., Any]]:
    """Build managers of scripted envs from ML-Agents' own RunOptions."""

    def make(num: int) -> Any:
        return SubprocessEnvManager(lambda worker_id, channels: ScriptedBehaviors(), run_options(), num)

    yield from keep_closed(make)


# "CLASS.METHOD(PARAMETER): how it differs", and words of the row of the page that says so.
DIFFERENCES = {
    "SubprocessEnvManager.__init__(run_options): another default": "| `SubprocessEnvManager(env_factory, run_options, n_env)` |",
    "EnvironmentStep.__init__(environment_stats): another default": "| `EnvironmentStep(...)`, `StepResponse(...)` |",
    "StepResponse.__init__(environment_stats): another default": "| `EnvironmentStep(...)`, `StepResponse(...)` |",
}


@pytest.mark.covers("U-1/processes")
def test_the_signatures_are_mlagents_but_for_what_the_page_says() -> None:
    ours = importlib.import_module("stepmill.frontends.mlagents")
    found, compared = [], set()
    for home in ("subprocess_env_manager", "simple_env_manager", "env_manager"):
        original = importlib.import_module(f"mlagents.trainers.{home}")
        names = [
            name for name, value in vars(original).items() if getattr(value, "__module__", "") == original.__name__
        ]
        for name in names:
            if hasattr(ours, name):
                found += [f"{name}.{each}" for each in differences(getattr(ours, name), getattr(original, name))]
                compared.add(name)
    assert {"SubprocessEnvManager", "SimpleEnvManager", "EnvironmentStep", "UnityEnvWorker", "worker"} <= compared
    check_listed("mlagents", found, DIFFERENCES)
    names = ("SubprocessEnvManager", "SimpleEnvManager", "EnvManager", "UnityEnvWorker")
    check_protected("mlagents", [(getattr(ours, name), class_of(ORIGINAL, name)) for name in names])


@pytest.mark.covers("U-10/library", "U-18/timers", "U-B5")
def test_the_timers_of_workers_are_among_mlagents_own_once_it_is_closed(manager_of: Any) -> None:
    timers = importlib.import_module("mlagents_envs.timers")
    timers.reset_timers()

    class Timed(ScriptedBehaviors):
        @timers.timed
        def step(self) -> None:
            super().step()

    manager = SubprocessEnvManager(lambda worker_id, channels: Timed(), n_env=1, options=ManagerOptions(context="fork"))
    manager.reset()
    for _ in range(3):
        manager.get_steps()
    manager.close()
    root = timers.get_timer_tree()["children"]["workers"]["children"]["worker_root"]
    assert root["is_parallel"]
    # A worker that is in the middle of a step when it is closed sends no timers: this one is idle.
    assert sum(child["count"] for name, child in root["children"].items() if name.endswith("step")) == 3


@pytest.mark.covers("U-5")
def test_steps_are_instances_of_mlagents_own_classes(manager_of: Any) -> None:
    base_env = importlib.import_module("mlagents_envs.base_env")
    manager = manager_of(1)
    manager.reset()
    results = manager.first_step_infos[0].current_all_step_result
    for decision, terminal in results.values():
        assert isinstance(decision, base_env.DecisionSteps)
        assert isinstance(terminal, base_env.TerminalSteps)
        for agent in decision:
            assert isinstance(decision[agent], base_env.DecisionStep)
    ended = type(terminal)([], *(importlib.import_module("numpy").zeros(1, kind) for kind in ("f4", "?", "i4")))
    assert isinstance(ended[0], base_env.TerminalStep)


@pytest.mark.covers("G-16/mlagents")
@pytest.mark.parametrize("is_original", [False, True], ids=["stepmill", "ML-Agents"])
def test_the_program_of_the_page_runs_with_both(tmp_path: Path, is_original: bool) -> None:
    run_page("mlagents", tmp_path, is_original=is_original)


@pytest.mark.covers("U-10/library", "U-18/timers")
def test_decisions_are_timed_among_mlagents_own_timers_once_per_worker(manager_of: Any) -> None:
    timers = importlib.import_module("mlagents_envs.timers")
    manager = manager_of(2)
    manager.reset()
    timers.reset_timers()
    manager.get_steps()
    assert timers.get_timer_tree()["children"]["SubprocessEnvManager._take_step"]["count"] == 2


@pytest.mark.covers("U-18/trains", "U-18/timers")
def test_ppo_trains_and_timers_json_has_the_timers_of_workers(tmp_path: Path) -> None:
    run_training("mlagents", tmp_path, 6000)
