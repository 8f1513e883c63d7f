"""The V2 managers and `EnvSupervisor` with the real treetensor; the page's program and DI-engine's own pipeline with both libraries."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from tests.frontends.di_engine.envs import ding_envs
from tests.originals.di_engine.sides import MARKS, Maker, class_of
from tests.originals.either import assert_same_with_either
from tests.originals.pages import run_page, run_program
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = MARKS
_LIMITS = ("reset_timeout", "step_timeout", "retry_waiting_time", "episode_num", "shared_memory", "copy_on_get")


def run_v2(name: str, make: Maker) -> list[Any]:
    """Return the observations and timesteps of an episode of a V2 manager."""
    import treetensor.numpy as tnp

    manager = make(name, ding_envs(3, length=2))
    manager.seed(0)
    manager.launch()
    found: list[Any] = []
    for step in range(2):
        obs = manager.ready_obs
        assert isinstance(obs, (tnp.ndarray, np.ndarray))
        actions = tnp.array({"a": np.arange(3)})["a"] if step == 0 else [1, 2, 3]
        timesteps = manager.step(actions)
        assert all(type(timestep) is tnp.ndarray for timestep in timesteps)
        found.append([obs.tolist(), *map(_plain, timesteps), [type(one.obs) for one in timesteps]])
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
    **{
        f"EnvSupervisor.{name}: missing": "`register`, `change_state` and `TYPE_MAPPING` of `EnvSupervisor`"
        for name in ("TYPE_MAPPING", "change_state", "register")
    },
    **{
        f"EnvSupervisor.__init__({name}): by keyword only": "`EnvSupervisor`: `reset_timeout` and the arguments after it"
        for name in _LIMITS
    },
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
    assert_same_with_either(partial(run_v2, name), Maker)


@pytest.mark.covers("D-31/original", "D-37")
@pytest.mark.parametrize("child", ["PROCESS", "THREAD"])
def test_a_supervisor_gives_the_same_tree_arrays_as_the_original(child: str) -> None:
    import treetensor.numpy as tnp

    def step(make: Maker) -> Any:
        module = di_engine if make.is_ours else importlib.import_module("ding.framework.supervisor")
        supervisor = make.keep(class_of(make.whose, "EnvSupervisor")(module.ChildType[child], ding_envs(2, length=9)))
        supervisor.launch()
        timesteps = supervisor.step({0: 1, 1: 2})
        assert all(type(timestep) is tnp.ndarray for timestep in timesteps)
        by_env = sorted(timesteps, key=lambda timestep: int(timestep.env_id))
        return [*map(_plain, by_env), supervisor.ready_obs.tolist()]

    assert_same_with_either(step, Maker)


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


@pytest.mark.timeout(500)
@pytest.mark.covers("D-29/registry")
@pytest.mark.parametrize(
    ("whose", "manager", "cls"),
    [
        ("ours", "subprocess", "stepmill.frontends.di_engine.managers.SyncSubprocessEnvManager"),
        ("ours", "base", "stepmill.frontends.di_engine.managers.BaseEnvManager"),
        ("original", "subprocess", "ding.envs.env_manager.subprocess_env_manager.SyncSubprocessEnvManager"),
    ],
)
def test_di_engines_own_pipeline_trains_with_a_manager_of_its_factory(
    tmp_path: Path, whose: str, manager: str, cls: str
) -> None:
    out = run_program(tmp_path, "-m", "tests.originals.di_engine.train", whose, manager, "20", limit_s=480)
    assert json.loads(out.splitlines()[-1])["manager"] == cls
    assert list(tmp_path.glob("cartpole_dqn_seed0*/ckpt/*.pth.tar"))
