"""Subclasses of SubprocessEnvManager: decisions, factories per worker, and workers in processes of their own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

import stepmill
from stepmill.frontends.mlagents import (
    ConstantSettings,
    EnvironmentCommand,
    EnvironmentResponse,
    EnvironmentStep,
    RestartLimits,
    StepResponse,
    SubprocessEnvManager,
    UnityCommunicationException,
    UnityEnvironmentException,
    UnityEnvWorker,
    UnityTimeOutException,
    worker,
)
from tests.frontends.mlagents.parts import (
    Policy,
    decided,
    deciding,
    die,
    once,
    raise_,
    step_workers,
    wait,
    walking,
    with_hooks,
)
from tests.harness.pools import keep_closed
from tests.harness.unity_envs import ScriptedBehaviors

FORK = multiprocessing.get_context("fork")


class OwnWorkers(SubprocessEnvManager):
    """Starts its workers itself, as subclasses of ML-Agents' manager do."""

    target: Callable[..., None] = staticmethod(worker)

    @staticmethod
    def create_worker(worker_id: int, step_queue: Any, env_factory: Any, run_options: Any) -> UnityEnvWorker:
        return start(OwnWorkers.target, worker_id, step_queue, env_factory, run_options)


def start(target: Any, worker_id: int, step_queue: Any, env_factory: Any, run_options: Any) -> UnityEnvWorker:
    ours, theirs = FORK.Pipe()
    factory = cloudpickle.dumps(env_factory)
    process = FORK.Process(target=target, args=(theirs, step_queue, factory, worker_id, run_options, logging.INFO))
    process.start()
    return UnityEnvWorker(process, worker_id, ours)


@pytest.fixture
def own_workers() -> Iterator[Callable[..., Any]]:
    """Build managers with workers of their own; closed at the end of the test."""
    yield from keep_closed(lambda factory, n_env=1, cls=OwnWorkers, **options: cls(factory, None, n_env, **options))


walkers = walking(ScriptedBehaviors)


def failing(worker_id: int, channels: Any) -> Any:
    raise LookupError("no player")


@pytest.mark.covers("U-15/take_step")
@pytest.mark.parametrize("is_of_instance", [False, True])
def test_a_take_step_that_was_replaced_is_called_for_each_worker(manager_of, monkeypatch, is_of_instance):
    asked = []

    def take_step(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments[-1].worker_id)
        return {}

    manager = manager_of(walkers, 2, is_deterministic=True)
    monkeypatch.setattr(manager if is_of_instance else type(manager), "_take_step", take_step)
    manager.reset()
    manager.get_steps()
    assert asked == [0, 1]


@pytest.mark.covers("U-17", "U-19/overrides")
@pytest.mark.parametrize("name", ["_queue_steps", "_postprocess_steps", "_drain_step_queue"])
def test_an_override_of_a_method_that_nothing_calls_is_refused_by_its_name(name):
    own = type("Own", (SubprocessEnvManager,), {name: lambda self, *arguments: None})
    with pytest.raises(TypeError, match=f"Own overrides {name}, which stepmill's SubprocessEnvManager does not call"):
        own(walkers)


@pytest.mark.covers("U-1/create_worker")
def test_a_subclass_may_change_the_factory_of_a_worker_and_leave_the_rest_to_the_engine():
    class Various(SubprocessEnvManager):
        @staticmethod
        def create_worker(worker_id: int, step_queue: Any, env_factory: Any, run_options: Any) -> UnityEnvWorker:
            def factory(number: int, channels: Any) -> Any:
                return ScriptedBehaviors({f"walk{worker_id}": [[1]]})

            return SubprocessEnvManager.create_worker(worker_id, step_queue, factory, run_options)

    manager = Various(walkers, None, 2, context="fork")
    assert sorted(manager.training_behaviors) == ["walk0", "walk1"]
    assert len(manager._pool.states) == 2
    manager.close()


@pytest.mark.covers("U-1/create_worker", "U-3/messages", "U-4/actions")
def test_workers_of_a_subclass_step_reset_and_close(own_workers):
    manager = own_workers(walkers, 2)
    manager.set_policy("walk", Policy(3.0))
    assert list(manager.training_behaviors) == ["walk"]
    assert manager.reset({"gravity": ConstantSettings(9.5)}) == 2
    assert [deciding(step) for step in manager.first_step_infos] == [[1, 2]] * 2

    steps = step_workers(manager, {0, 1})
    assert {(deciding(step)[0], decided(step)) for step in steps} == {(2, 3.0)}
    pids = [each.process.pid for each in manager.env_workers]
    assert len({*pids, os.getpid()}) == 3
    manager.close()
    assert [each.process.exitcode for each in manager.env_workers] == [0, 0]


@pytest.mark.covers("U-3/messages", "U-4/fields")
def test_a_subclass_may_reset_by_messages_and_make_steps_of_three_fields(own_workers):
    class ByMessages(OwnWorkers):
        def _reset_env(self, config: Any = None) -> list[EnvironmentStep]:
            while any(each.waiting for each in self.env_workers):
                if not self.step_queue.empty():
                    self.env_workers[self.step_queue.get_nowait().worker_id].waiting = False
            for each in self.env_workers:
                each.send(EnvironmentCommand.RESET, config)
            for each in self.env_workers:
                each.previous_step = EnvironmentStep(each.recv().payload, each.worker_id, {})
            return [each.previous_step for each in self.env_workers]

    manager = own_workers(walkers, 2, ByMessages)
    for _ in range(2):
        assert manager.reset() == 2
        assert [step.environment_stats for step in manager.first_step_infos] == [{}, {}]
        step_workers(manager, {0, 1})


def answer_fixed_results(conn: Any, step_queue: Any, factory: bytes, worker_id: int, options: Any, level: int) -> None:
    """A worker that a user wrote: answers with fixed results."""
    while True:
        command, payload = conn.recv()
        if command is EnvironmentCommand.CLOSE:
            step_queue.put(EnvironmentResponse(EnvironmentCommand.CLOSED, worker_id, None))
            return
        if command is EnvironmentCommand.STEP:
            result = StepResponse({"count": payload}, None, {"speed": worker_id})
            step_queue.put(EnvironmentResponse(command, worker_id, result))
        elif command is EnvironmentCommand.RESET:
            conn.send(EnvironmentResponse(command, worker_id, {"arena": payload}))


@pytest.mark.covers("U-3/messages")
def test_a_worker_function_of_the_user_gets_configs_and_actions_as_they_are(own_workers, monkeypatch):
    monkeypatch.setattr(OwnWorkers, "target", staticmethod(answer_fixed_results))
    manager = own_workers(walkers, 2)
    monkeypatch.setattr(manager, "_take_step", lambda last: {"last": list(last.current_all_step_result)})
    manager.reset("three walls")
    assert [step.current_all_step_result for step in manager.first_step_infos] == [{"arena": "three walls"}] * 2
    steps = step_workers(manager, {0, 1})
    assert steps[0].current_all_step_result == {"count": {"last": ["arena"]}}
    assert {step.worker_id: step.environment_stats["speed"] for step in steps} == {0: 0, 1: 1}


@pytest.mark.covers("U-13")
@pytest.mark.parametrize("hook", [die, raise_(lambda: UnityTimeOutException("late"))], ids=["killed", "raises"])
def test_a_crashed_worker_of_a_subclass_is_created_again_and_all_envs_are_reset(own_workers, tmp_path, hook):
    manager = own_workers(with_hooks(ScriptedBehaviors, 0, {("step", 1): once(tmp_path / "flag", hook)}), 2)
    manager.reset()
    first = manager.env_workers[0]
    step_workers(manager, {0, 1})
    assert manager.env_workers[0] is not first
    assert manager.restart_counts == [1, 0]
    assert first.process.exitcode is not None


@pytest.mark.covers("U-13")
def test_workers_of_a_subclass_that_die_at_the_same_time_are_restarted_once_each(own_workers, gate):
    factory = walking(ScriptedBehaviors, hooks={("step", 1): wait(gate.path)})
    manager = own_workers(factory, 2, restarts=RestartLimits(restarts_rate_limit_n=-1))
    manager.reset()
    manager._driver._queue_steps()
    gate.wait_arrivals(2)
    for each in manager.env_workers:
        os.kill(each.process.pid, signal.SIGKILL)
        each.process.join()
    gate.open(2)
    step_workers(manager, {0, 1})
    assert manager.restart_counts == [1, 1]


@pytest.mark.covers("U-14")
def test_a_worker_of_a_subclass_without_quota_raises_what_its_env_raised(own_workers):
    factory = walking(ScriptedBehaviors, hooks={("step", 1): raise_(lambda: UnityEnvironmentException("gone"))})
    manager = own_workers(factory, restarts=RestartLimits(max_lifetime_restarts=0))
    manager.reset()
    with pytest.raises(UnityEnvironmentException, match="gone"):
        manager.get_steps()


@pytest.mark.covers("U-2")
def test_other_exceptions_and_failing_factories_of_such_workers_are_raised(own_workers):
    with pytest.raises(LookupError, match="no player"):
        own_workers(failing, 2).reset()
    manager = own_workers(walking(ScriptedBehaviors, hooks={("step", 1): raise_(lambda: LookupError("lost"))}))
    manager.reset()
    with pytest.raises(LookupError, match="lost"):
        manager.get_steps()


def test_the_exception_of_a_process_that_has_ended_is_raised_by_the_next_request(own_workers):
    manager = own_workers(failing)
    manager.set_env_parameters({"speed": 2.0})
    manager.env_workers[0].process.join()
    with pytest.raises(LookupError, match="no player"):
        manager.reset()


def test_a_process_that_ends_before_it_answers_is_an_error_and_not_a_hang(own_workers, monkeypatch):
    monkeypatch.setattr(OwnWorkers, "target", staticmethod(lambda *arguments: os._exit(3)))
    manager = own_workers(walkers)
    with pytest.raises(UnityCommunicationException, match=r"exit code 3"):
        manager.reset()


def test_a_worker_that_does_not_end_is_terminated_at_close(own_workers, gate):
    factory = walking(ScriptedBehaviors, hooks={("close", 1): wait(gate.path)})
    manager = own_workers(factory, close_timeout_s=0.2)
    manager.reset()
    manager.close()
    assert manager.env_workers[0].process.exitcode == -signal.SIGKILL


def test_a_reset_raises_for_a_step_that_does_not_end(own_workers, gate):
    factory = with_hooks(ScriptedBehaviors, 0, {("step", 1): wait(gate.path)})
    manager = own_workers(factory, 2, drain_timeout_s=0.1)
    manager.reset()
    step_workers(manager, {1})
    with pytest.raises(TimeoutError, match=r"Workers \{0"):
        manager.reset()
    gate.open()
    assert step_workers(manager, {0})


def test_workers_of_both_kinds_and_misuse_are_refused(manager_of, own_workers):
    class Mixed(SubprocessEnvManager):
        @staticmethod
        def create_worker(worker_id: int, step_queue: Any, env_factory: Any, run_options: Any) -> UnityEnvWorker:
            if worker_id:
                return SubprocessEnvManager.create_worker(worker_id, step_queue, env_factory, run_options)
            return start(worker, worker_id, step_queue, env_factory, run_options)

    with pytest.raises(stepmill.UsageError, match="one kind"):
        Mixed(walkers, None, 2)
    with pytest.raises(stepmill.UsageError, match="processes of their own"):
        own_workers(walkers).get_timer_tree()
    of_engine = manager_of(walkers).env_workers[0]
    for use in (lambda: of_engine.send(EnvironmentCommand.STEP), of_engine.recv):
        with pytest.raises(stepmill.UsageError, match="create_worker"):
            use()
