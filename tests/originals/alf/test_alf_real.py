"""FastParallelEnvironment and ProcessEnvironment with the real ALF: its base class, configuration, device and schedulers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.frontends import alf as front_end
from stepmill.frontends.alf import parallel
from tests.harness import alf_envs
from tests.originals.alf.sides import MARKS
from tests.originals.pages import ROOT, run_page, run_training
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


@pytest.mark.covers("A-27/base", "A-28")
def test_it_is_an_alf_environment_with_nothing_abstract_left(alf: Any, constructor: Any) -> None:
    base = alf.environments.alf_environment.AlfEnvironment
    assert issubclass(front_end.FastParallelEnvironment, base)
    missing = {name for name in base.__abstractmethods__ if name not in dir(front_end.FastParallelEnvironment)}
    assert (missing, front_end.FastParallelEnvironment.__abstractmethods__) == (set(), frozenset())
    with front_end.FastParallelEnvironment([constructor] * 2) as env:
        assert isinstance(env, base)
        assert env.reset().step_type.tolist() == [0, 0]


@pytest.mark.covers("A-27/base", "A-32")
def test_code_that_asks_for_alfs_parallel_environments_recognises_it(alf: Any, constructor: Any) -> None:
    modules = [importlib.import_module(f"alf.environments.{name}parallel_environment") for name in ("", "fast_")]
    parallel = (modules[0].ParallelAlfEnvironment, modules[1].FastParallelEnvironment)
    assert issubclass(front_end.FastParallelEnvironment, parallel)
    with front_end.FastParallelEnvironment([constructor]) as env:
        assert isinstance(env, parallel)


@pytest.mark.covers("A-27/trainer", "A-32")
def test_alfs_trainer_knows_what_the_envs_in_processes_have_used(whose: str, tmp_path: Path) -> None:
    conf = Path(__file__).with_name("cart_pole_conf.py")
    command = [sys.executable, "-m", "alf.bin.train", "--nostore_snapshot", f"--root_dir={tmp_path}", f"--conf={conf}"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "WHOSE": whose}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {"inoperative": []}


@pytest.mark.covers("A-27/base")
def test_methods_of_subclasses_are_called_as_alf_calls_them(constructor: Any) -> None:
    calls = []

    class Noted(front_end.FastParallelEnvironment):  # type: ignore[misc, unused-ignore]
        def _step(self, action: Any) -> Any:
            calls.append("step")
            return super()._step(action)

        def _reset(self) -> Any:
            calls.append("reset")
            return super()._reset()

        def start(self) -> None:
            calls.append("start")
            super().start()

    with Noted([constructor] * 2) as env:
        env.step(env.reset().prev_action)
        with pytest.raises(AssertionError, match="multiple times"):
            env.start()
    assert calls == ["start", "reset", "step", "start"]


@pytest.mark.covers("A-27/config")
def test_what_is_configured_for_alfs_class_is_configured_for_ours(alf: Any, constructor: Any) -> None:
    alf.config(CLASS, start_method="thread", torch_num_threads_per_env=3)
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


@pytest.mark.covers("A-27/config")
def test_gin_files_that_name_the_class_stay_unambiguous(alf: Any, constructor: Any) -> None:
    gin = importlib.import_module("gin")
    gin.parse_config(f"{CLASS}.start_method = 'thread'")
    with pytest.raises(AssertionError, match="Unrecognized start method 'thread'"):
        front_end.FastParallelEnvironment([constructor])


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


@pytest.mark.covers("A-24", "A-25")
def test_envs_compute_on_the_cpu_and_see_progress_once_it_is_synced(alf: Any) -> None:
    torch = importlib.import_module("torch")
    schedulers = importlib.import_module("alf.utils.schedulers")
    base = importlib.import_module("alf.environments.random_alf_environment").RandomAlfEnvironment
    spec = alf.TensorSpec((2,), torch.float32)

    class Progress(base):  # type: ignore[misc, unused-ignore]
        def _get_observation(self) -> Any:
            numpy = importlib.import_module("numpy")
            is_cpu = alf.get_default_device() == "cpu"
            return numpy.array([is_cpu, schedulers.get_progress("global_counter")], numpy.float32)

    make = functools.partial(Progress, spec, alf.BoundedTensorSpec([1], torch.float32, minimum=-1.0, maximum=1.0))
    schedulers.update_progress("global_counter", 1)
    with front_end.FastParallelEnvironment([make] * 2) as env:
        time_step = env.reset()
        for progress in (4, 9):
            schedulers.update_progress("global_counter", progress)
            env.sync_progress()
            time_step = env.step(time_step.prev_action)
            assert time_step.observation.tolist() == [[1, progress]] * 2


@pytest.mark.covers("A-17", "A-18", "A-30")
def test_a_handle_steps_resets_calls_and_closes_its_env_alone(constructor: Any) -> None:
    with front_end.FastParallelEnvironment([constructor] * 2) as env:
        action = env.reset().prev_action[1].numpy()
        handle = env.envs[1]
        types = [int(handle.step(action).step_type) for _ in range(3)]
        assert types == [1, 2, 0]
        promise = handle.step(action, blocking=False)
        assert promise().observation.shape == promise().observation.shape == (3, 3)
        assert handle.reset().step_type == 0
        assert handle.call("step", action)().env_id == 1
        assert env.step(env.current_time_step().prev_action).step_type.tolist() == [
            1,
            0,
        ]  # its last step ended its episode
        handle.close()


@pytest.mark.covers("A-22")
def test_an_env_of_which_only_reset_is_there_fails_when_it_is_used() -> None:
    class Bare:
        def __init__(self, env_id: int | None) -> None: ...
        def action_spec(self) -> list[Any]:
            return []

        def _reset(self) -> None:
            raise RuntimeError

    with front_end.ProcessEnvironment(Bare) as env:
        env.start()
        with pytest.raises(stepmill.StepmillError, match="is not an ALF environment"):
            env.reset()


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
