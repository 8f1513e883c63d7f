"""The V2 managers and `EnvSupervisor` with the real treetensor, and the program of the page with both libraries."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from stepmill.frontends.di_engine import ChildType
from tests.frontends.di_engine.envs import ding_envs
from tests.originals.di_engine.sides import close_all
from tests.originals.pages import run_page
from tests.originals.rows import ORIGINAL, OURS
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of DI-engine, and of what it imports
    pytest.mark.skipif(
        importlib.util.find_spec("ding") is None, reason="DI-engine is not installed; make test-originals has it"
    ),
]
MODULES = {
    "BaseEnvManagerV2": "base_env_manager",
    "SubprocessEnvManagerV2": "subprocess_env_manager",
    "EnvSupervisor": "env_supervisor",
}


def theirs(name: str) -> Any:
    """Return DI-engine's class of that name."""
    return getattr(importlib.import_module(f"ding.envs.env_manager.{MODULES[name]}"), name)


def run_v2(whose: str, name: str) -> list[Any]:
    """Return the observations and timesteps of an episode of a V2 manager."""
    import treetensor.numpy as tnp

    cls = getattr(di_engine, name) if whose == OURS else theirs(name)
    manager = cls(ding_envs(3, length=2), cls.default_config())
    manager.seed(0)
    manager.launch()
    found: list[Any] = []
    try:
        for step in range(2):
            obs = manager.ready_obs
            assert isinstance(obs, (tnp.ndarray, np.ndarray))
            actions = tnp.array({"a": np.arange(3)})["a"] if step == 0 else [1, 2, 3]
            timesteps = manager.step(actions)
            assert all(type(timestep) is tnp.ndarray for timestep in timesteps)
            found.append(
                [obs.tolist(), *(_plain(timestep) for timestep in timesteps), [type(one.obs) for one in timesteps]]
            )
    finally:
        close_all([manager], whose)
    return found


def _plain(timestep: Any) -> Any:
    return {
        "obs": timestep.obs.tolist(),
        "reward": timestep.reward.tolist(),
        "done": timestep.done,
        "info": timestep.info.json() if hasattr(timestep.info, "json") else timestep.info,
        "env_id": timestep.env_id,
    }


# "CLASS.METHOD(PARAMETER): how it differs", and words of the row of the page that says so.
DIFFERENCES = {
    "EnvSupervisor.TYPE_MAPPING: missing": "`register`, `change_state` and `TYPE_MAPPING` of `EnvSupervisor`",
    "EnvSupervisor.change_state: missing": "`register`, `change_state` and `TYPE_MAPPING` of `EnvSupervisor`",
    "EnvSupervisor.register: missing": "`register`, `change_state` and `TYPE_MAPPING` of `EnvSupervisor`",
    "EnvSupervisor.__init__(reset_timeout): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it",
    "EnvSupervisor.__init__(step_timeout): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it",
    "EnvSupervisor.__init__(retry_waiting_time): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it",
    "EnvSupervisor.__init__(episode_num): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it",
    "EnvSupervisor.__init__(shared_memory): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it",
    "EnvSupervisor.__init__(copy_on_get): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it",
    "GymVectorEnvManager.__init__(cfg): another default": "| Managers: `cfg` |",
}


@pytest.mark.covers("D-1")
def test_the_signatures_are_di_engines_but_for_what_the_page_says() -> None:
    original = importlib.import_module("ding.envs.env_manager")
    found = []
    for name in di_engine.__all__:
        if hasattr(original, name):
            found += [f"{name}.{each}" for each in differences(getattr(di_engine, name), getattr(original, name))]
    assert {"BaseEnvManager", "EnvSupervisor", "SyncSubprocessEnvManager"} <= {*di_engine.__all__} & {*vars(original)}
    check_listed("di_engine", found, DIFFERENCES)


@pytest.mark.covers("D-40")
def test_protected_methods_that_take_no_effect_are_refused_and_named_by_the_page() -> None:
    original = importlib.import_module("ding.envs.env_manager")
    for name in ("BaseEnvManager", "AsyncSubprocessEnvManager", "SubprocessEnvManagerV2", "EnvSupervisor"):
        # In the original, too, only the base managers call `_step`.
        inert = () if name == "BaseEnvManager" else ("_step",)
        check_protected("di_engine", [(getattr(di_engine, name), getattr(original, name))], inert=inert)


@pytest.mark.covers("D-28/original", "D-37", "G-16/di_engine")
@pytest.mark.parametrize("name", ["BaseEnvManagerV2", "SubprocessEnvManagerV2"])
def test_v2_gives_the_same_tree_arrays_as_the_original(name: str) -> None:
    assert run_v2(OURS, name) == run_v2(ORIGINAL, name)


@pytest.mark.covers("D-31/original", "D-37")
@pytest.mark.parametrize("child", ["PROCESS", "THREAD"])
def test_a_supervisor_gives_the_same_tree_arrays_as_the_original(child: str) -> None:
    import treetensor.numpy as tnp

    found = []
    original_type = importlib.import_module("ding.framework.supervisor").ChildType
    ours = (OURS, di_engine.EnvSupervisor, ChildType[child])
    for whose, cls, kind in (ours, (ORIGINAL, theirs("EnvSupervisor"), original_type[child])):
        supervisor = cls(kind, ding_envs(2, length=9), **cls.default_config() if hasattr(cls, "default_config") else {})
        supervisor.launch()
        try:
            timesteps = supervisor.step({0: 1, 1: 2})
            assert all(type(timestep) is tnp.ndarray for timestep in timesteps)
            by_env = sorted(timesteps, key=lambda timestep: int(timestep.env_id))
            found.append([_plain(timestep) for timestep in by_env] + [supervisor.ready_obs.tolist()])
        finally:
            close_all([supervisor], whose)
    assert found[0] == found[1]


@pytest.mark.covers("D-1", "D-8")
@pytest.mark.parametrize("is_original", [True, False])
def test_the_pages_program_runs_with_either(tmp_path: Path, is_original: bool) -> None:
    run_page("di_engine", tmp_path, is_original=is_original)


@pytest.mark.covers("D-40")
def test_our_managers_are_instances_of_di_engines_base_class() -> None:
    original = importlib.import_module("ding.envs").BaseEnvManager
    for cls in (di_engine.BaseEnvManager, di_engine.AsyncSubprocessEnvManager, di_engine.SubprocessEnvManagerV2):
        manager = cls(ding_envs(1), cls.default_config())
        assert isinstance(manager, original)
        with pytest.raises(AssertionError, match="env manager is closed"):
            manager.reset()
        manager.close()
