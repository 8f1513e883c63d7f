"""The front-ends of DI-engine and ML-Agents take options by keyword, as settings of their own or for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, BaseEnvManager, EnvSupervisor
from stepmill.frontends.mlagents import ManagerOptions, OnCrash, SubprocessEnvManager
from stepmill.spec.errors import UsageError
from tests.frontends.di_engine.envs import ding_envs
from tests.harness.unity_envs import ScriptedBehaviors


def script(worker_id: int, channels: Any) -> Any:
    return ScriptedBehaviors({"walk": [[1, 2]]}, side_channels=channels)


def supervisor_of(env_fns: Any, **keywords: Any) -> Any:
    return EnvSupervisor(env_fn=env_fns, **keywords)


MANAGERS = [BaseEnvManager, AsyncSubprocessEnvManager, supervisor_of]


@pytest.mark.parametrize("make", MANAGERS)
def test_a_manager_of_di_engine_gives_its_pool_the_options_that_it_has_no_setting_for(make, tmp_path):
    manager = make(ding_envs(2), crash_dir=tmp_path, tuning={"slots": 7})
    try:
        manager.launch()
        options = manager._client.pool.options
        assert (options.crash_dir, options.tuning.slots) == (str(tmp_path), 7)
    finally:
        manager.close()


@pytest.mark.parametrize("make", [AsyncSubprocessEnvManager, supervisor_of])
def test_options_that_are_settings_by_another_name_are_those_settings(make):
    manager = make(ding_envs(2), num_workers=1, step_timeout_s=33, copy=False)
    try:
        manager.launch()
        options = manager._client.pool.options
        assert (options.num_workers, options.step_timeout_s, options.copy) == (1, 33, False)
    finally:
        manager.close()


@pytest.mark.parametrize("make", MANAGERS)
def test_an_option_that_a_manager_chooses_itself_is_refused(make):
    with pytest.raises(UsageError, match=r"on_fault, seeding: a manager sets"):
        make(ding_envs(2), seeding="fixed", on_fault="truncate")


@pytest.mark.parametrize("make", MANAGERS[:2])
def test_a_typo_of_an_option_names_the_nearest_to_users_of_di_engine(make):
    with pytest.raises(UsageError, match="num_worker is not an option of stepmill; did you mean num_workers"):
        make(ding_envs(2), num_worker=2)


def test_every_option_of_an_ml_agents_manager_is_a_keyword_that_goes_over_options():
    options = ManagerOptions(on_crash=OnCrash.GO_ON, seed=3)
    manager = SubprocessEnvManager(script, n_env=1, options=options, on_crash="reset_all", context="fork")
    try:
        assert (manager.options.on_crash, manager.options.seed) == (OnCrash.RESET_ALL, 3)
    finally:
        manager.close()


def test_a_typo_of_an_option_names_the_nearest_to_users_of_ml_agents():
    with pytest.raises(UsageError, match="on_crahs is not an option of stepmill; did you mean on_crash"):
        SubprocessEnvManager(script, on_crahs="reset_all")
    with pytest.raises(UsageError, match="zzz is not an option of stepmill; there are restarts, on_crash"):
        SubprocessEnvManager(script, zzz=1)
