"""SubprocessEnvManager with the real ML-Agents trainers: timers, classes, subclasses, and the program of the page."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepmill.frontends.mlagents import ManagerOptions, SubprocessEnvManager
from tests.harness.unity_envs import ScriptedBehaviors
from tests.originals.mlagents.sides import MARKS, class_of
from tests.originals.pages import run_page, run_training
from tests.originals.rows import ORIGINAL
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = MARKS


@pytest.fixture
def settings() -> Any:
    return importlib.import_module("mlagents.trainers.settings")


@pytest.fixture
def manager_of(settings: Any) -> Iterator[Callable[..., Any]]:
    """Build managers of scripted envs from ML-Agents' own RunOptions."""
    made = []

    def make(num: int, cls: type[SubprocessEnvManager] = SubprocessEnvManager) -> Any:
        made.append(cls(lambda worker_id, channels: ScriptedBehaviors(), settings.RunOptions(), num))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


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


@pytest.mark.covers("U-15/policies")
def test_a_take_step_of_a_subclass_is_called_for_each_worker(manager_of: Any) -> None:
    asked: list[int] = []

    class Noted(SubprocessEnvManager):
        def _take_step(self, last_step: Any) -> dict[str, Any]:
            asked.append(last_step.worker_id)
            return super()._take_step(last_step)

    manager = manager_of(2, Noted)
    manager.reset()
    manager.get_steps()
    assert sorted(asked) == [0, 1]


@pytest.mark.covers("U-6/order", "U-7")
def test_a_reset_gives_one_step_per_worker_and_samplers_of_the_trainers_are_taken(
    manager_of: Any, settings: Any
) -> None:
    manager = manager_of(3)
    sampler = settings.UniformSettings(min_value=1.0, max_value=2.0)
    manager.reset(config={"wind": sampler, "gravity": settings.ConstantSettings(seed=0, value=9.0)})
    assert [step.worker_id for step in manager.first_step_infos] == [0, 1, 2]
    assert all(step.brain_name_to_action_info == {} for step in manager.first_step_infos)
    assert set(manager.training_behaviors) == set(manager.first_step_infos[0].current_all_step_result)


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
