"""What a manager of Unity envs does when envs raise, die, hang or are stopped."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import psutil
import pytest

import stepmill
from stepmill.frontends.mlagents import (
    OnCrash,
    RestartLimits,
    UnityCommunicationException,
    UnityCommunicatorStoppedException,
    UnityEnvironmentException,
    UnityTimeOutException,
)
from stepmill.frontends.mlagents.failures import UnityStuckError
from stepmill.testing.faulty import OddSignatureError, UnpicklableError
from tests.frontends.mlagents.parts import (
    AgentManager,
    Policy,
    deciding,
    die,
    ended,
    once,
    raise_,
    step_until,
    wait,
    walking,
    with_hooks,
)
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.pools import kill_worker
from tests.harness.unity_envs import ScriptedBehaviors

MANY = RestartLimits(-1, -1)


class CustomError(Exception):
    """An env's own."""


def firsts_of(steps: list[Any], worker_id: int) -> list[Any]:
    """A worker's steps right after a reset: they have no actions."""
    return [step for step in steps if step.worker_id == worker_id and not step.brain_name_to_action_info]


# ---- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.covers("U-13", "U-B2")
@pytest.mark.parametrize("num_envs", [1, 4])
def test_subprocess_env_raises_errors_of_the_factory_at_reset(manager_of, num_envs):
    def factory(worker_id, channels):
        raise CustomError("no env today")

    manager = manager_of(factory, num_envs)
    with pytest.raises(CustomError, match="no env today") as caught:
        manager.reset()
    assert isinstance(caught.value.__cause__, stepmill.EnvError)
    assert "raise CustomError" in caught.value.__cause__.remote_traceback


class Late(ScriptedBehaviors):
    """Has no specs before its first reset, and never if `is_broken`."""

    is_broken = False

    @property
    def behavior_specs(self) -> Any:
        if not self.counts["reset"] or self.is_broken:
            raise UnityEnvironmentException("no specs yet")
        return super().behavior_specs


class Never(Late):
    is_broken = True


@pytest.mark.covers("U-13")
def test_an_env_that_has_specs_only_after_its_first_reset_can_be_used(manager_of):
    manager = manager_of(lambda worker_id, channels: Late())
    assert manager.training_behaviors == {}
    assert manager.reset() == 1
    assert list(manager.training_behaviors) == ["walk"]


@pytest.mark.covers("U-13")
def test_what_an_env_raises_when_it_is_asked_for_its_specs_is_raised_as_itself(manager_of):
    manager = manager_of(lambda worker_id, channels: Never())
    with pytest.raises(UnityEnvironmentException, match="no specs yet"):
        manager.reset()


@pytest.mark.covers("U-13")
@pytest.mark.parametrize("make", [lambda: OddSignatureError(7, detail="odd"), lambda: UnpicklableError("locked")])
def test_an_exception_that_cannot_travel_is_still_of_its_class(started_of, make):
    manager = started_of(with_hooks(ScriptedBehaviors, 0, {("step", 1): raise_(make)}))
    with pytest.raises(type(make())) as caught:
        manager.get_steps()
    assert isinstance(caught.value, stepmill.EnvError)
    assert caught.value.env_id == 0
    assert "raise error()" in caught.value.remote_traceback
    assert type(make()).__name__ in str(caught.value)


@pytest.mark.covers("U-11", "U-19/interrupt")
def test_an_env_that_raises_keyboard_interrupt_has_closed_and_works_again_after_a_reset(started_of, script, tmp_path):
    interrupted = once(tmp_path / "flag", raise_(KeyboardInterrupt))
    manager = started_of(with_hooks(script, 0, {("step", 1): interrupted}))
    with pytest.raises(UnityCommunicationException, match="At least one of the environments has closed") as caught:
        manager.get_steps()
    assert isinstance(caught.value.__cause__, stepmill.EnvError)
    manager.reset()
    assert [step.worker_id for step in manager.get_steps()] == [0]


@pytest.mark.covers("U-B2")
def test_an_env_that_exits_the_program_is_an_error_and_no_hang(started_of):
    manager = started_of(with_hooks(ScriptedBehaviors, 0, {("step", 1): raise_(lambda: SystemExit(3))}))
    with pytest.raises(stepmill.EnvError, match="SystemExit"):
        manager.get_steps()


@pytest.mark.covers("U-B2")
def test_a_failure_is_not_lost_in_a_reset_that_comes_after_it(started_of, script, gate):
    hooks = {("step", 1): lambda env: (wait(gate.path)(env), raise_(lambda: CustomError("late"))(env))}
    manager = started_of(with_hooks(script, 0, hooks), 2)
    manager.get_steps()
    gate.wait_arrivals(1)
    gate.open()
    with pytest.raises(CustomError, match="late"):
        manager.reset()
    manager.reset()  # reset() makes the env again, whatever its quota
    assert len(manager.first_step_infos) == 2


@pytest.mark.covers("U-13", "U-14")
def test_after_an_exception_the_others_continue_and_the_broken_env_waits_for_a_reset(started_of, script):
    manager = started_of(with_hooks(script, 0, {("step", 1): raise_(lambda: CustomError("once"))}), 2)
    with pytest.raises(CustomError, match="once"):
        step_until(manager, lambda _steps: False)  # raises
    assert {step.worker_id for step in step_until(manager, lambda steps: len(steps) >= 3)} == {1}
    assert manager.reset() == 2


# ---- crashes, and restarts within quotas --------------------------------------------------------------------------------


@pytest.mark.covers("U-14", "U-B4", "U-B9")
@pytest.mark.parametrize("hook", [die, raise_(lambda: UnityEnvironmentException("it broke"))])
def test_crashed_env_restarts_and_healthy_ones_are_not_reset(manager_of, script, tmp_path, hook):
    manager = manager_of(with_hooks(script, 1, {("step", 2): once(tmp_path / "flag", hook)}), 3)
    manager.set_policy("walk", Policy())
    manager.reset({"gravity": 9.5})
    pids = [psutil.Process(worker.pid) for worker in manager._pool.stats().workers]

    steps = step_until(manager, lambda steps: firsts_of(steps, 1) and len(steps) > 20)

    assert manager.restart_counts == [0, 1, 0]
    assert deciding(firsts_of(steps, 1)[0]) == [1, 2]
    healthy, renewed = (
        manager._pool.get_attr("counts", env_ids=[0])[0],
        manager._pool.get_attr("counts", env_ids=[1])[0],
    )
    assert healthy["reset"] == 1
    assert renewed["reset"] == 1
    assert (
        b"gravity" in manager._pool.get_attr("sent", env_ids=[1])[0][0]
    )  # parameters were sent again, before the reset
    assert not pids[1].is_running()
    assert pids[0].is_running()


@pytest.mark.covers("U-14", "G-5")
def test_a_crash_ends_the_episodes_of_its_agents_as_interrupted(started_of, script, tmp_path):
    manager = started_of(with_hooks(script, 0, {("step", 2): once(tmp_path / "flag", die)}))
    manager.set_policy("walk", Policy())
    (step,) = manager.get_steps()
    assert deciding(step) == [2]
    assert ended(step) == {1: False}

    (lost,) = manager.get_steps()
    assert ended(lost) == {2: True}
    assert deciding(lost) == []
    agents = lost.current_all_step_result["walk"]
    last = agents[1] if isinstance(agents, tuple) else agents
    assert last.reward.tolist() == [0.0]
    assert last.obs[0].tolist() == [[2.0] * 3]
    (first,) = manager.get_steps()
    assert deciding(first) == [1, 2]
    assert first.brain_name_to_action_info == {}


@pytest.mark.covers("U-14")
def test_all_envs_are_reset_after_a_crash_if_asked(manager_of, script, tmp_path):
    factory = with_hooks(script, 1, {("step", 2): once(tmp_path / "flag", die)})
    manager = manager_of(factory, 2, on_crash=OnCrash.RESET_ALL)
    agents = AgentManager()
    manager.set_agent_manager("walk", agents)
    manager.reset({"gravity": 9.5})

    step_until(manager, lambda steps: manager.restart_counts[1] == 1)

    assert agents.num_ended == 2
    assert [each["reset"] for each in manager._pool.get_attr("counts")] == [2, 1]
    assert b"gravity" in manager._pool.get_attr("sent", env_ids=[1])[0][0]


@pytest.mark.covers("U-14", "U-11")
@pytest.mark.parametrize(
    ("limits", "allowed"),
    [(RestartLimits(), 1), (RestartLimits(2, -1), 2), (RestartLimits(0, -1), 0)],
    ids=["rate", "lifetime", "none"],
)
def test_beyond_its_quota_a_crash_is_raised(started_of, limits, allowed):
    manager = started_of(with_hooks(ScriptedBehaviors, 0, {("step", 1): die}), restarts=limits)
    with pytest.raises(UnityCommunicationException, match=r"UnityEnvironment worker: recv failed\..*SIGKILL") as caught:
        step_until(manager, lambda _steps: False)  # raises
    assert manager.restart_counts == [allowed]
    assert isinstance(caught.value, stepmill.WorkerDied)
    assert caught.value.env_ids == (0,)
    with pytest.raises(stepmill.UsageError, match=r"workers \[0\] have failed"):
        manager.get_steps()


@pytest.mark.covers("U-B4")
def test_two_workers_that_died_in_between_are_both_restarted(started_of, script):
    manager = started_of(with_hooks(script, 0, {}), 3, is_deterministic=True)
    manager.set_policy("walk", Policy())
    for worker in (0, 1):
        kill_worker(manager._pool, worker)
    steps = step_until(manager, lambda steps: firsts_of(steps, 0) and firsts_of(steps, 1))
    assert manager.restart_counts == [1, 1, 0]
    assert {step.worker_id for step in steps} == {0, 1, 2}


@pytest.mark.covers("U-14")
def test_an_env_that_never_worked_is_not_restarted(manager_of):
    hooks = {("reset", 1): raise_(lambda: UnityTimeOutException("nobody is there"))}
    manager = manager_of(with_hooks(ScriptedBehaviors, 0, hooks), restarts=MANY)
    with pytest.raises(UnityTimeOutException, match="nobody is there"):
        manager.reset()
    assert manager.restart_counts == [0]


@pytest.mark.covers("U-14")
def test_a_hung_env_is_ended_by_its_time_limit_and_restarted(started_of, script, tmp_path, gate):
    hooks = {("step", 1): once(tmp_path / "flag", wait(gate.path))}
    manager = started_of(with_hooks(script, 0, hooks), 2, step_timeout_s=DEADLINE_S)
    manager.set_policy("walk", Policy())
    steps = step_until(manager, lambda steps: firsts_of(steps, 0))
    assert manager.restart_counts == [1, 0]
    assert len([step for step in steps if step.worker_id == 1]) > 1


@pytest.mark.covers("U-14")
def test_a_hung_env_without_quota_is_a_time_out(started_of, gate):
    hooks = {("step", 1): wait(gate.path)}
    manager = started_of(with_hooks(ScriptedBehaviors, 0, hooks), step_timeout_s=0.3, restarts=RestartLimits(0))
    with pytest.raises(UnityTimeOutException) as caught:
        manager.get_steps()
    assert isinstance(caught.value, stepmill.EnvTimeout)


@pytest.mark.covers("U-14")
def test_a_reset_waits_for_steps_for_a_limited_time(started_of, script, gate):
    manager = started_of(with_hooks(script, 0, {("step", 1): wait(gate.path)}), 2, drain_timeout_s=DEADLINE_S)
    manager.get_steps()
    gate.wait_arrivals(1)
    with pytest.raises(UnityStuckError, match=r"Workers \{0\} stuck in waiting state") as caught:
        manager.reset()
    assert isinstance(caught.value, TimeoutError)
    gate.open()
    assert manager.reset() == 2


@pytest.mark.covers("U-14")
def test_an_env_that_does_not_close_after_its_failure_is_ended(started_of, script, tmp_path, gate):
    broken = raise_(lambda: UnityEnvironmentException("it broke"))
    hooks = {("step", 1): once(tmp_path / "flag", broken), ("close", 1): once(tmp_path / "closing", wait(gate.path))}
    manager = started_of(with_hooks(script, 0, hooks), leave_timeout_s=0.2)
    manager.set_policy("walk", Policy())
    assert step_until(manager, lambda steps: firsts_of(steps, 0))
    assert manager.restart_counts == [1]


# ---- a stop on purpose ---------------------------------------------------------------------------------------------------

STOPS = [
    lambda: UnityCommunicatorStoppedException("Communicator has exited."),
    lambda: UnityCommunicationException("Communicator has stopped."),
]


@pytest.mark.covers("U-B9", "U-11")
@pytest.mark.parametrize("stop", STOPS, ids=["behaviors", "groups"])
def test_a_deliberate_stop_is_not_a_crash_and_the_others_continue(started_of, script, stop, caplog):
    manager = started_of(with_hooks(script, 1, {("step", 1): raise_(stop)}), 2)
    manager.set_policy("walk", Policy())
    steps = step_until(manager, lambda steps: manager.stopped_workers)
    after = step_until(manager, lambda steps: len(steps) > 2)

    assert {step.worker_id for step in after} == {0}
    assert manager.stopped_workers == [1]
    assert manager.restart_counts == [0, 0]
    assert [ended(step) for step in steps if step.worker_id == 1] == [{1: True, 2: True}]
    assert "was stopped" in caplog.text
    assert manager.reset() == 1


@pytest.mark.covers("U-B9")
def test_a_stopped_env_stays_out_if_a_call_finds_that_its_process_has_ended(started_of):
    manager = started_of(with_hooks(ScriptedBehaviors, 1, {("step", 1): raise_(STOPS[0])}), 2)
    step_until(manager, lambda steps: manager.stopped_workers)
    kill_worker(manager._pool, 1)
    with pytest.raises(stepmill.WorkerDied):
        manager.call_channel("StatsSideChannel", "get_and_reset_stats", worker_ids=[1])
    assert {step.worker_id for step in step_until(manager, lambda steps: len(steps) > 2)} == {0}
    assert (manager.stopped_workers, manager.restart_counts) == ([1], [0, 0])


@pytest.mark.covers("U-14", "U-B4")
def test_a_broken_env_whose_process_ends_is_restarted_by_the_next_reset_only(started_of, script):
    manager = started_of(with_hooks(script, 1, {("step", 1): raise_(lambda: CustomError("once"))}), 2)
    with pytest.raises(CustomError):
        step_until(manager, lambda _steps: False)  # raises
    kill_worker(manager._pool, 1)
    with pytest.raises(stepmill.WorkerDied):
        manager.call_channel("StatsSideChannel", "get_and_reset_stats", worker_ids=[1])
    assert {step.worker_id for step in step_until(manager, lambda steps: len(steps) > 2)} == {0}
    assert manager.reset() == 2
    assert manager.restart_counts == [0, 0]


@pytest.mark.covers("U-14")
def test_episodes_that_ended_with_a_reset_of_a_broken_env_are_not_interrupted_later(started_of, tmp_path):
    breaks = {("step", 2): raise_(lambda: CustomError("once"))}
    dies = {("step", 1): once(tmp_path / "died", die)}

    def factory(worker_id, channels):
        is_rebuilt = (tmp_path / "made").exists()
        (tmp_path / "made").touch()
        return ScriptedBehaviors({"walk": [[1], [1, 2]]}, hooks=dies if is_rebuilt else breaks)

    manager = started_of(factory)
    with pytest.raises(CustomError):
        step_until(manager, lambda _steps: False)  # raises, with agents 1 and 2 in their episodes
    manager.reset()
    (lost,) = manager.get_steps()
    assert ended(lost) == {1: True}


@pytest.mark.covers("U-B9", "U-11")
@pytest.mark.parametrize("stop", STOPS, ids=["behaviors", "groups"])
def test_when_the_last_env_is_stopped_that_is_raised(started_of, stop):
    manager = started_of(with_hooks(ScriptedBehaviors, 0, {("step", 1): raise_(stop)}))
    manager.get_steps()  # the ends of its agents' episodes
    is_new = isinstance(stop(), UnityCommunicatorStoppedException)
    with pytest.raises(UnityCommunicatorStoppedException if is_new else UnityCommunicationException) as caught:
        manager.get_steps()
    assert str(caught.value) == (
        "Communicator has exited." if is_new else "At least one of the environments has closed."
    )


# ---- waiting, and the end ------------------------------------------------------------------------------------------------


@pytest.mark.covers("U-B1", "G-15/waiting")
def test_a_manager_that_waits_uses_no_processor(started_of, script, gate):
    hooks = {("step", 1): wait(gate.path)}
    manager = started_of(walking(script, hooks=hooks), 2)
    waiting = _Opener(gate, 1.0)
    before = time.process_time()
    manager.get_steps()
    used = time.process_time() - before
    assert waiting.join()
    assert used < 0.25


class _Opener:
    """Opens a gate a while after both envs have come to it, from another process: this one only waits."""

    def __init__(self, gate: Any, after_s: float) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            try:
                gate.wait_arrivals(2)
                time.sleep(after_s)
                gate.open(2)
            finally:
                os._exit(0)

    def join(self) -> bool:
        return os.waitpid(self._pid, 0)[1] == 0


@pytest.mark.covers("U-12", "U-B8")
def test_close_closes_every_env_whatever_was_not_received_and_can_be_repeated(started_of, script, tmp_path):
    manager = started_of(walking(script, hooks={("close", 1): lambda env: (tmp_path / f"{os.getpid()}").touch()}), 3)
    manager.get_steps()
    manager._driver._queue_steps()  # results that are never received
    manager.close()
    manager.close()
    assert len(list(tmp_path.iterdir())) == 3  # a process each


@pytest.mark.covers("U-13", "U-B8")
def test_close_ends_a_worker_that_does_not_answer_and_tells(started_of, script, gate, caplog):
    hooks = {("step", 1): wait(gate.path)}
    manager = started_of(with_hooks(script, 0, hooks), 2, close_timeout_s=0.3)
    manager.get_steps()
    gate.wait_arrivals(1)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="was killed"), caplog.at_level(logging.ERROR, "stepmill.mlagents"):
        manager.close()
    assert time.monotonic() - began < HANG_GUARD_S
    assert "workers [0] did not close" in caplog.text


@pytest.mark.covers("U-12")
def test_an_env_that_raises_in_close_does_not_keep_the_others_open(started_of, script, tmp_path):
    def close(env):
        (tmp_path / f"{os.getpid()}").touch()
        raise CustomError("no")

    manager = started_of(walking(script, hooks={("close", 1): close}), 2)
    manager.close()
    assert len(list(tmp_path.iterdir())) == 2
