"""What docs/switching/mlagents.md lists as the same: programs that give the same results with ML-Agents' classes and with ours."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

from stepmill.frontends.mlagents import ActionInfo
from stepmill.testing.gates import Gate
from tests.frontends.mlagents.parts import Policy, raise_, wait
from tests.originals.either import assert_same_with_either
from tests.originals.mlagents.sides import (
    MARKS,
    Maker,
    class_of,
    constant,
    only_first,
    run_options,
    scripted,
    started,
    step_until,
)

pytestmark = MARKS
NEVER = -1  # no worker
FORK = multiprocessing.get_context("fork")


def plain(value: Any) -> Any:
    """Return a step, or a part of one, as values that can be compared."""
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    if hasattr(value, "agent_id"):
        names = ("obs", "reward", "agent_id", "action_mask", "interrupted", "group_id", "group_reward")
        return {name: plain(getattr(value, name, None)) for name in names}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    return getattr(value, "name", value) if not hasattr(value, "continuous") else value.continuous.tolist()


def episodes(make: Maker) -> Any:
    manager, all_agents = started(make, scripted())
    policy, agents = manager.policies["walk"], all_agents["walk"]
    found = [len(manager.env_workers), manager.restart_counts, [plain(step) for step in manager.first_step_infos]]
    for _ in range(4):
        steps = manager.get_steps()
        found += [[plain(step) for step in steps], manager.process_steps(steps)]
    found += [plain(agents.experiences), policy.asked, agents.stats, manager.reset({}), agents.num_ended]
    info = manager.get_steps()[0].brain_name_to_action_info["walk"]
    original = importlib.import_module("mlagents.trainers.action_info").ActionInfo
    assert type(info)._fields == ActionInfo._fields == original._fields
    return [
        *found,
        [list(step.name_behavior_ids) for step in manager.first_step_infos],
        list(manager.training_behaviors),
    ]


def parameters(make: Maker) -> Any:
    """Return the number of bytes that the env receives for each config, the engine's settings included."""
    settings = importlib.import_module("mlagents.trainers.settings")
    manager = make(scripted(script={"walk": [[1]]}))
    manager.on_training_started("walk", None)
    found = []
    for config in (
        {"a": constant(2.0)},
        {"b": settings.UniformSettings(seed=1, min_value=0.0, max_value=2.0)},
        {"c": settings.GaussianSettings(seed=1, mean=0.0, st_dev=2.0), "d": constant(1.0)},
        {"e": settings.MultiRangeUniformSettings(seed=1, intervals=[[0.0, 1.0], [2.0, 3.0]])},
    ):
        manager.reset(config)
        found.append(plain(manager.first_step_infos[0]))
        manager.set_env_parameters(config)
        found.append(plain(step_until(manager, {0})[0]))
    return found


def the_first_result(make: Maker) -> Any:
    with Gate() as gate:
        manager = make.reset(scripted(only_first({("step", 1): wait(gate.path)})), 2)
        found = [[step.worker_id for step in manager.get_steps()] for _ in range(3)]
        gate.open()
        step_until(manager, {0})
        return found


def quotas(make: Maker) -> Any:
    timeout = importlib.import_module("mlagents_envs.exception").UnityTimeOutException
    found = []
    for limits in ({}, {"restarts_rate_limit_n": -1, "max_lifetime_restarts": 3}, {"max_lifetime_restarts": 0}):
        options = run_options()
        for name, value in limits.items():
            setattr(options.env_settings, name, value)
        manager = make.reset(
            scripted(lambda worker_id: {("step", 2): raise_(lambda: timeout("late"))}), options=options
        )
        with pytest.raises(timeout):
            step_until(manager, {NEVER})
        found.append(manager.restart_counts)
    return found


def subclasses(make: Maker) -> Any:
    calls: list[str] = []
    base = class_of(make.whose)

    class Own(base):  # type: ignore[misc]
        def _take_step(self, last_step: Any) -> Any:
            calls.append("_take_step")
            return super()._take_step(last_step)

        def _step(self) -> Any:
            calls.append("_step")
            return super()._step()

        def _reset_env(self, config: Any = None) -> Any:
            calls.append("_reset_env")
            return super()._reset_env(config)

        @staticmethod
        def create_worker(worker_id: int, step_queue: Any, env_factory: Any, options: Any) -> Any:
            return base.create_worker(worker_id, step_queue, scripted(script={f"walk{worker_id}": [[1]]}), options)

    manager = make.reset(scripted(), 2, cls=Own)
    manager.set_policy("walk0", Policy())
    step_until(manager, {0, 1})
    known = isinstance(manager, importlib.import_module("mlagents.trainers.env_manager").EnvManager)
    original = importlib.import_module("mlagents.trainers.subprocess_env_manager")
    known &= isinstance(manager, original.SubprocessEnvManager)
    known &= all(isinstance(worker, original.UnityEnvWorker) for worker in manager.env_workers)
    return [calls[:4], sorted(manager.training_behaviors), known]


def workers_in_processes(make: Maker) -> Any:
    names = (
        "EnvironmentCommand",
        "EnvironmentRequest",
        "EnvironmentResponse",
        "StepResponse",
        "UnityEnvWorker",
        "worker",
    )
    module = {name: class_of(make.whose, name) for name in names}
    command = module["EnvironmentCommand"]
    asked = FORK.Queue()

    def answer(conn: Any, step_queue: Any, worker_id: int) -> None:
        while True:
            request = conn.recv()
            asked.put(request.cmd.name)
            if request.cmd is command.STEP:
                result = module["StepResponse"]({"count": request.payload}, None, {"speed": worker_id})
                step_queue.put(module["EnvironmentResponse"](command.STEP, worker_id, result))
            elif request.cmd is command.RESET:
                conn.send(module["EnvironmentResponse"](command.RESET, worker_id, {"arena": request.payload}))
            elif request.cmd is command.CLOSE:
                step_queue.put(module["EnvironmentResponse"](command.CLOSED, worker_id, None))
                return

    class Own(class_of(make.whose)):  # type: ignore[misc]
        @staticmethod
        def create_worker(worker_id: int, step_queue: Any, env_factory: Any, options: Any) -> Any:
            ours, theirs = FORK.Pipe()
            target: Callable[..., None] = answer
            args: tuple[Any, ...] = (theirs, step_queue, worker_id)
            if worker_id == 1:
                target, level = module["worker"], logging.INFO
                args = (theirs, step_queue, cloudpickle.dumps(env_factory), worker_id, options, level)
            process = FORK.Process(target=target, args=args)
            process.start()
            return module["UnityEnvWorker"](process, worker_id, ours)

    manager = make.reset(scripted(), 2, cls=Own)
    found = [plain(manager.first_step_infos)]
    steps = {step.worker_id: plain(step) for step in reversed(step_until(manager, {0, 1}))}  # the first of each
    manager.env_workers[1].send(command.BEHAVIOR_SPECS)
    return [*found, steps, list(manager.env_workers[1].recv().payload), [asked.get() for _ in range(3)]]


SAME = [episodes, parameters, the_first_result, quotas, subclasses, workers_in_processes]


@pytest.mark.covers("U-7", "U-17", "U-4/fields")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("program", SAME)
def test_this_program_gives_the_same_with_either(program: Callable[[Maker], Any]) -> None:
    assert_same_with_either(program, Maker)
