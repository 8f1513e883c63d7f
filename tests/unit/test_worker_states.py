"""The table of a worker's states: each transition has a method that makes it, and every other one is refused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

from stepmill import _native
from stepmill.backends.base import BackendTraits
from stepmill.pool.events import BeginRestart, Death, Decision, Remedy, ServeWorker
from stepmill.pool.workers import TRANSITIONS, RestartTask, WorkerState, WorkerSupervisor
from stepmill.spec.errors import EngineBug, EnvError, UsageError
from stepmill.spec.options import PoolOptions
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport
from tests.harness.hangs import HANG_GUARD_S

if TYPE_CHECKING:
    from typing_extensions import Self

SERVING, DEAD_UNREPORTED, DEAD_REPORTED, RESTARTING = WorkerState
ENDED_S = 60.0


class FakeState:
    """The part of the native pool state that a supervisor uses."""

    def __init__(self) -> None:
        self.has_died = False
        self.num_restarts = 0
        self.notified = threading.Event()
        self.calls: list[str] = []
        self.num_completed = 0

    def num_ended(self, worker: int) -> int:
        return self.num_completed

    def clear_dead_worker(self, worker: int) -> None:
        """Do nothing, because there are no commands."""

    def drain(self, acknowledge: bool) -> list[Death]:
        return [Death(0, self.num_restarts, (0,), ())] if self.has_died else []

    def notify(self) -> None:
        self.notified.set()

    def apply(self, decisions: Iterable[Decision]) -> int:
        for decision in decisions:
            if isinstance(decision, BeginRestart):
                self.has_died = False
            self.num_restarts += isinstance(decision, ServeWorker)
            self.calls.append(type(decision).__name__)
        return 0


class FakeBackend:
    """Restarts a worker, or fails to, once the test has decided which."""

    def __init__(self) -> None:
        self.can_restart = True
        self.is_decided = threading.Event()
        self.pidfds = {0: -1, 1: -1}

    def end_worker(self, worker: int) -> None:
        """Do nothing, because no process runs."""

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        self.is_decided.wait(ENDED_S)
        if not self.can_restart:
            raise EnvError("env 0 raised in its constructor", env_id=0, error_type="ValueError", phase="construct")
        return WorkerReport(worker, 2, ())


class OneWorker:
    """A supervisor of one worker, over fakes."""

    def __init__(self) -> None:
        self.state, self.backend = FakeState(), FakeBackend()
        self.supervisor = WorkerSupervisor([WorkerPlan(0, (0,), ())], cast("Any", self.backend), PoolOptions())
        self.supervisor.attach(cast("Any", self.state))

    def die(self) -> None:
        self.state.has_died = True
        self.supervisor.record_deaths()

    def report(self) -> None:
        self.supervisor.mark_reported(0, EngineBug("it died"))

    def begin_restart(self, *, is_retried: bool = False) -> None:
        restart = BeginRestart(0, self.state.num_restarts, Remedy.RAISE, {})
        self.supervisor.plan_restart(restart, is_retried=is_retried)
        self.state.apply([restart])
        self.supervisor.start_restart(0)

    def end_restart(self, *, succeeds: bool) -> None:
        self.backend.can_restart = succeeds
        self.backend.is_decided.set()
        assert self.state.notified.wait(ENDED_S)
        self.state.notified.clear()
        self.backend.is_decided.clear()
        self.state.apply(self.supervisor.finish_restarts()[1])

    def succeed(self) -> None:
        self.end_restart(succeeds=True)

    def fail(self) -> None:
        self.end_restart(succeeds=False)

    def prepare(self, state: WorkerState) -> None:
        """Bring the worker into a state, from SERVING."""
        if state in (DEAD_UNREPORTED, DEAD_REPORTED):
            self.die()
        if state is DEAD_REPORTED:
            self.report()
        if state is RESTARTING:
            self.begin_restart()
        assert self.supervisor.records[0].state is state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.is_decided.set()
        self.supervisor.stop()
        self.supervisor.join()


MOVES: dict[tuple[WorkerState, WorkerState], Callable[[OneWorker], object]] = {
    (SERVING, DEAD_UNREPORTED): OneWorker.die,
    (SERVING, RESTARTING): OneWorker.begin_restart,
    (DEAD_UNREPORTED, DEAD_REPORTED): OneWorker.report,
    (DEAD_UNREPORTED, RESTARTING): OneWorker.begin_restart,
    (DEAD_REPORTED, RESTARTING): OneWorker.begin_restart,
    (RESTARTING, SERVING): OneWorker.succeed,
    (RESTARTING, DEAD_UNREPORTED): OneWorker.fail,
}
REFUSED = [(old, new) for old in WorkerState for new in WorkerState if new not in TRANSITIONS[old]]


@pytest.fixture
def worker() -> Iterator[OneWorker]:
    with OneWorker() as worker:
        yield worker


def test_every_transition_of_the_table_has_a_method_that_makes_it() -> None:
    assert set(MOVES) == {(old, new) for old, allowed in TRANSITIONS.items() for new in allowed}


@pytest.mark.parametrize(("old", "new"), MOVES, ids=lambda state: state.name)
def test_a_transition_of_the_table_is_made(worker: OneWorker, old: WorkerState, new: WorkerState) -> None:
    worker.prepare(old)

    MOVES[old, new](worker)

    assert worker.supervisor.records[0].state is new


@pytest.mark.parametrize(("old", "new"), REFUSED, ids=lambda state: state.name)
def test_a_transition_that_is_not_in_the_table_is_refused_and_changes_nothing(
    worker: OneWorker, old: WorkerState, new: WorkerState
) -> None:
    worker.prepare(old)

    with pytest.raises(EngineBug, match=f"from {old.name} to {new.name}"):
        worker.supervisor._move(worker.supervisor.records[0], new)

    assert worker.supervisor.records[0].state is old


def test_a_restart_that_fails_is_tried_again_while_the_limit_allows_it(worker: OneWorker) -> None:
    worker.begin_restart(is_retried=True)

    worker.fail()
    is_tried_again = worker.supervisor.records[0].state is RESTARTING
    worker.succeed()

    assert is_tried_again
    assert worker.supervisor.records[0].state is SERVING


def count_deaths(
    worker: OneWorker, monkeypatch: pytest.MonkeyPatch, *, served_s: float, number: int
) -> list[float | None]:
    """Let a worker take 2 s to start, serve for a time and die, a number of times. Return the waits before its restarts."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    revive, waits = worker.backend.revive, []

    def revive_slowly(*args: Any) -> WorkerReport:
        nonlocal now
        report = revive(*args)
        now += 2.0
        return report

    monkeypatch.setattr(worker.backend, "revive", revive_slowly)
    for _ in range(number):
        worker.die()
        waits.append(worker.supervisor.count_restart(0, EngineBug("it died")))
        worker.begin_restart()
        worker.succeed()
        now += served_s
    return waits


def test_the_waits_of_a_worker_that_dies_soon_after_each_start_grow(
    worker: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = count_deaths(worker, monkeypatch, served_s=1.9, number=9)
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize(("served_s", "num_completed"), [(2.0, 0), (0.0, 1)])
def test_the_waits_start_afresh_after_a_worker_served_as_long_as_it_started_or_completed_an_episode(
    worker: OneWorker, monkeypatch: pytest.MonkeyPatch, served_s: float, num_completed: int
) -> None:
    assert count_deaths(worker, monkeypatch, served_s=0.5, number=3) == [0.0, 0.1, 0.2]
    monkeypatch.undo()
    worker.state.num_completed = num_completed
    assert count_deaths(worker, monkeypatch, served_s=served_s, number=3)[1:] == [0.0, 0.0]


def test_a_restart_that_fails_lengthens_the_wait_though_the_process_before_it_has_worked(worker: OneWorker) -> None:
    worker.state.num_completed = 1
    failure = EngineBug("it cannot start")
    assert worker.supervisor.count_restart(0, failure) == 0.0
    worker.begin_restart()
    assert [worker.supervisor.count_restart(0, failure) for _ in range(3)] == [0.1, 0.2, 0.4]


def test_the_limit_of_restarts_counts_those_of_workers_that_have_worked(worker: OneWorker) -> None:
    worker.state.num_completed = 1
    waits = [worker.supervisor.count_restart(0, EngineBug("it died")) for _ in range(11)]
    assert waits == [0.0] * 10 + [None]


def test_the_death_of_a_former_process_is_not_that_of_its_successor(worker: OneWorker) -> None:
    worker.begin_restart()
    worker.succeed()

    worker.supervisor.record_deaths([Death(0, 0, (0,), ())])
    after_stale = worker.supervisor.records[0].state
    worker.supervisor.record_deaths([Death(0, 1, (0,), ())])

    assert after_stale is SERVING
    assert worker.supervisor.records[0].state is DEAD_UNREPORTED


def test_a_restart_for_which_the_system_has_no_thread_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    notified: list[bool] = []
    task = RestartTask(1, lambda _: pytest.fail("it was started"), lambda: notified.append(True))
    task.start()
    assert notified == [True]
    assert isinstance(task.result, UsageError)
    assert "can't start new thread" in str(task.result)
    assert "ulimit -u" in str(task.result)


class MeetingBackend(FakeBackend):
    """Each restart waits up to `wait_s` for another one to begin."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s
        self.meeting = threading.Barrier(2)
        self.num_met = 0

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meeting.wait(self.wait_s)
            self.num_met += 1
        return WorkerReport(worker, 2, ())


@pytest.mark.parametrize(
    ("num_cores", "is_beside_loop", "is_remote", "num_met"),
    [(2, False, False, 2), (2, True, False, 0), (1, False, True, 2)],
    ids=["each has a core", "an event loop has one", "on other machines"],
)
def test_as_many_restarts_run_at_once_as_there_are_cores_for_them(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, is_beside_loop: bool, is_remote: bool, num_met: int
) -> None:
    monkeypatch.setattr(_native, "usable_cores", lambda: num_cores)
    state, backend = FakeState(), MeetingBackend(HANG_GUARD_S if num_met else 0.2)
    if is_remote:
        backend.traits = BackendTraits(nodes=cast("Any", backend))  # type: ignore[attr-defined]
    supervisor = WorkerSupervisor([WorkerPlan(w, (w,), ()) for w in range(2)], cast("Any", backend), PoolOptions())
    supervisor.attach(cast("Any", state))
    if is_beside_loop:
        supervisor.leave_core_free()

    for worker in range(2):
        supervisor.plan_restart(BeginRestart(worker, 0, Remedy.RAISE, {}))
        supervisor.start_restart(worker)
    supervisor.join()

    assert backend.num_met == num_met
