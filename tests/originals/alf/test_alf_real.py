"""FastParallelEnvironment and ProcessEnvironment with the real ALF: its base class, configuration, device and schedulers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepmill.frontends import alf as front_end
from stepmill.frontends.alf import parallel
from tests.harness import alf_envs
from tests.originals.alf.sides import MARKS
from tests.originals.pages import run_page, run_program, run_training
from tests.originals.signatures import check_listed, check_protected, differences

pytestmark = MARKS
CLASS = "FastParallelEnvironment"


@pytest.fixture
def alf() -> Iterator[Any]:
    """The module alf. The test's configuration is removed at the end."""
    module = importlib.import_module("alf")
    importlib.import_module("alf.environments.fast_parallel_environment")
    importlib.import_module("alf.environments.random_alf_environment")
    yield module
    module.reset_configs()
    importlib.import_module("gin").clear_config()


@pytest.fixture
def constructor(alf: Any) -> Any:
    """The constructor of ALF's random env, with episodes of two steps."""
    torch = importlib.import_module("torch")
    return functools.partial(
        alf.environments.random_alf_environment.RandomAlfEnvironment,
        alf.TensorSpec((3, 3), torch.float32),
        alf.BoundedTensorSpec([7], torch.float32, minimum=-1.0, maximum=1.0),
        episode_end_probability=0,
        max_duration=2,
    )


@pytest.mark.covers("A-27/base", "A-28", "A-32")
def test_code_that_asks_for_alfs_environments_recognises_it_and_nothing_abstract_is_left(constructor: Any) -> None:
    homes = {"Alf": "alf_", "FastParallel": "fast_parallel_"}
    cls = front_end.FastParallelEnvironment
    for name, home in homes.items():
        original = getattr(importlib.import_module(f"alf.environments.{home}environment"), f"{name}Environment")
        assert issubclass(cls, original)
        assert {each for each in getattr(original, "__abstractmethods__", ()) if each not in dir(cls)} == set()
        with cls([constructor]) as env:
            assert isinstance(env, original)
    assert cls.__abstractmethods__ == frozenset()


@pytest.mark.covers("A-27/trainer", "A-32")
def test_alfs_trainer_knows_what_the_envs_in_processes_have_used(whose: str, tmp_path: Path) -> None:
    conf = Path(__file__).with_name("cart_pole_conf.py")
    arguments = ("-m", "alf.bin.train", "--nostore_snapshot", f"--root_dir={tmp_path}", f"--conf={conf}")
    out = run_program(tmp_path, *arguments, WHOSE=whose)
    assert json.loads(out.splitlines()[-1]) == {"inoperative": []}


@pytest.mark.covers("A-27/config")
@pytest.mark.parametrize("is_gin", [False, True])
def test_what_is_configured_for_alfs_class_is_configured_for_ours(alf: Any, constructor: Any, is_gin: bool) -> None:
    if is_gin:  # a gin file that names the class stays unambiguous
        importlib.import_module("gin").parse_config(f"{CLASS}.start_method = 'thread'")
    else:
        alf.config(CLASS, start_method="thread")
    with pytest.raises(AssertionError, match="Unrecognized start method 'thread'"):
        front_end.FastParallelEnvironment([constructor])
    with front_end.FastParallelEnvironment([constructor], start_method="fork") as env:
        assert env.envs[0].call("reset")().step_type == 0


def _pid(env: Any) -> int:
    return os.getpid()


@pytest.mark.covers("A-27/config", "A-29")
def test_a_value_that_the_class_has_used_cannot_be_configured_any_more(alf: Any, constructor: Any) -> None:
    front_end.FastParallelEnvironment([constructor]).close()
    with pytest.raises(ValueError, match="has already been used"):
        alf.config(CLASS, start_method="spawn")


@pytest.mark.covers("A-27/config", "A-29")
def test_our_own_keywords_are_configurable_by_the_same_name(alf: Any, constructor: Any) -> None:
    alf.config(CLASS, num_workers=1, step_timeout_s=20.0)
    with front_end.FastParallelEnvironment([constructor] * 2) as env:
        assert len({handle.call(_pid)() for handle in env.envs}) == 1


def test_a_reference_in_a_gin_file_is_alfs_class(alf: Any, constructor: Any) -> None:
    utils = importlib.import_module("alf.environments.utils")
    gin = importlib.import_module("gin")
    assert front_end.FastParallelEnvironment
    gin.parse_config("create_environment.parallel_environment_ctor = @FastParallelEnvironment")
    env = utils.create_environment("random", lambda name, env_id=None: constructor(env_id), num_parallel_environments=1)
    assert isinstance(env.envs[0], importlib.import_module("alf.environments.process_environment").ProcessEnvironment)
    env.close()


@pytest.mark.covers("A-9", "A-25")
def test_the_default_device_is_alfs(alf: Any, constructor: Any) -> None:
    torch = importlib.import_module("torch")
    get_default_device = alf.get_default_device
    alf.get_default_device = lambda: "meta"  # a device that every torch has
    try:
        with front_end.FastParallelEnvironment([constructor] * 2) as env:
            time_step = env.reset()
            assert (time_step.reward.device.type, time_step._cpu.reward.tolist()) == ("meta", [0, 0])
            time_step = env.step(torch.zeros(2, 7))
            assert time_step._cpu.step_type.tolist() == [1, 1]
    finally:
        alf.get_default_device = get_default_device


@pytest.mark.covers("A-1")
def test_the_signatures_are_alfs_but_for_what_the_page_says(alf: Any) -> None:
    original = importlib.import_module("alf.environments.fast_parallel_environment").FastParallelEnvironment
    check_listed(
        "alf",
        differences(front_end.FastParallelEnvironment, original),
        {"__init__(start_serially): another default": "| `start_serially=` |"},
    )
    check_protected("alf", [(parallel.FastParallelEnvironment, original)])
    original = importlib.import_module("alf.environments.process_environment").ProcessEnvironment
    check_listed("alf", differences(front_end.ProcessEnvironment, original), {})
    check_protected("alf", [(front_end.ProcessEnvironment, original)])
    original = importlib.import_module("alf.environments.alf_wrappers").BatchEnvironmentWrapper
    of_env_0 = ("action_spec", "env_info_spec", "get_info", "metadata", "num_tasks", "observation_spec", "render")
    of_env_0 += ("reward_spec", "task_names", "time_step_spec")
    check_listed(
        "alf",
        differences(front_end.BatchEnvironmentWrapper, original),
        {f"{name}: missing": "| `BatchEnvironmentWrapper`: specs, tasks, `metadata`, `render` |" for name in of_env_0},
    )


@pytest.mark.covers("G-16/alf")
@pytest.mark.parametrize("is_original", [False, True], ids=["stepmill", "ALF"])
def test_the_program_of_the_page_runs_with_both(tmp_path: Path, is_original: bool) -> None:
    spec = importlib.util.find_spec("alf")
    assert spec is not None
    assert spec.origin is not None
    run_page("alf", tmp_path, is_original=is_original, path=str(Path(spec.origin).resolve().parents[1]))


def test_our_test_envs_have_the_time_step_and_the_methods_of_alf(alf: Any) -> None:
    real = importlib.import_module("alf.data_structures").TimeStep
    base = importlib.import_module("alf.environments.alf_environment").AlfEnvironment
    assert alf_envs.TimeStep._fields == real._fields
    public = {name for name in vars(alf_envs.AlfCounter) if not name.startswith("_") and callable(vars(base).get(name))}
    assert {"step", "reset", "action_spec", "observation_spec", "time_step_spec", "env_info_spec"} <= public
    for name in sorted(public - {"render"}):
        theirs = list(inspect.signature(getattr(base, name)).parameters)
        assert list(inspect.signature(getattr(alf_envs.AlfCounter, name)).parameters) == theirs, name


@pytest.mark.covers("A-31")
def test_an_algorithm_of_alf_trains(tmp_path: Path) -> None:
    run_training("alf", tmp_path, 300)
