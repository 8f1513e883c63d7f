"""The front-ends of DI-engine and ML-Agents take options by keyword, as settings of their own or for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, BaseEnvManager, EnvSupervisor
from stepmill.frontends.mlagents import ManagerOptions, OnCrash, SubprocessEnvManager
from stepmill.spec.errors import UsageError
from tests.frontends.di_engine.envs import ding_envs
from tests.frontends.mlagents.parts import walking
from tests.harness.unity_envs import ScriptedBehaviors


def supervisor_of(env_fns: Any, **keywords: Any) -> Any:
    return EnvSupervisor(env_fn=env_fns, **keywords)


MANAGERS = [BaseEnvManager, AsyncSubprocessEnvManager, supervisor_of]


@pytest.mark.parametrize("make", MANAGERS)
def test_a_manager_of_di_engine_gives_its_pool_the_options_that_it_has_no_setting_for(made, make, tmp_path):
    manager = made(make(ding_envs(2), crash_dir=tmp_path, tuning={"slots": 7}))
    manager.launch()
    options = manager._client.pool.options
    assert (options.crash_dir, options.tuning.slots) == (str(tmp_path), 7)


@pytest.mark.parametrize("make", [AsyncSubprocessEnvManager, supervisor_of])
def test_options_that_are_settings_by_another_name_are_those_settings(made, make):
    manager = made(make(ding_envs(2), num_workers=1, step_timeout_s=33, copy=False))
    manager.launch()
    options = manager._client.pool.options
    assert (options.num_workers, options.step_timeout_s, options.copy) == (1, 33, False)


@pytest.mark.parametrize("make", MANAGERS)
def test_an_option_that_a_manager_chooses_itself_is_refused(make):
    with pytest.raises(UsageError, match=r"on_fault, seeding: a manager sets"):
        make(ding_envs(2), seeding="fixed", on_fault="truncate")


def test_every_option_of_an_ml_agents_manager_is_a_keyword_that_goes_over_options(made):
    options = ManagerOptions(on_crash=OnCrash.GO_ON, seed=3)
    manager = made(
        SubprocessEnvManager(walking(ScriptedBehaviors), options=options, on_crash="reset_all", context="fork")
    )
    assert (manager.options.on_crash, manager.options.seed) == (OnCrash.RESET_ALL, 3)
