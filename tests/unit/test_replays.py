"""What is decided about replays, without processes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stepmill.pool.call_log import CallLog
from stepmill.pool.events import (
    BeginRestart,
    ContinueReplay,
    Decision,
    Remedy,
    Replay,
    ReplayFailed,
    ReplayPlayed,
    ResolveFault,
    ServerView,
)
from stepmill.pool.replays import MAX_PLAYS, Replays
from stepmill.pool.workers import WorkerState
from stepmill.spec.options import PoolOptions
from stepmill.worker.messages import WorkerPlan


class FakeWorkers:
    """One worker with two envs, which serves and can be restarted while it lives."""

    can_restart_living = True
    state = WorkerState.SERVING
    generation = 4
    plan = WorkerPlan(0, (0, 1), ())
    log = CallLog(2, 1 << 20)
    worker_of_server = {0: 0, 1: 0}

    @property
    def records(self) -> list[FakeWorkers]:
        return [self]

    def view_of(self, env_id: int) -> ServerView:
        return ServerView(env_id, 0, env_id, 7, "PAUSED", True, 1, 3, 0, 0, True, False, False, False, False, 0)

    def reapply_settings(self, worker: int, servers: list[int]) -> None:
        """Nothing was set."""

    def check_process(self, worker: int) -> FakeWorkers:
        return self


def begin_two() -> Replays:
    replays = Replays(
        cast("Any", FakeWorkers()),
        cast("Any", None),
        PoolOptions(on_fault="replay", seeding="per_episode"),
        on_reset_repeated=lambda view: None,
        warn=lambda text: None,
    )
    for env_id in range(2):
        replays.begin(FakeWorkers().view_of(env_id), {}, is_new=True)
    return replays


def failures() -> list[ReplayFailed]:
    return [ReplayFailed(env_id, 7, 2) for env_id in range(2)]


def test_two_replays_that_fail_together_and_need_new_objects_restart_their_worker_once(monkeypatch: Any) -> None:
    replays = begin_two()
    monkeypatch.setattr(replays, "needs_new_object", lambda view: True)

    decisions: list[Decision] = replays.advance(failures())

    assert decisions == [BeginRestart(0, 4, Remedy.KEEP, {})]


def test_replays_that_fail_and_need_no_new_objects_are_played_again_each(monkeypatch: Any) -> None:
    replays = begin_two()
    monkeypatch.setattr(replays, "needs_new_object", lambda view: False)

    decisions = replays.advance(failures())

    assert decisions == [Replay(env_id, 7, [], False) for env_id in range(2)]


def test_failed_replays_of_earlier_episodes_are_not_counted_any_more(monkeypatch: Any) -> None:
    replays = begin_two()
    monkeypatch.setattr(replays, "needs_new_object", lambda view: False)
    view = FakeWorkers().view_of
    for episode in range(20):
        monkeypatch.setattr(FakeWorkers, "view_of", lambda _, env_id: view(env_id)._replace(episode=episode))  # noqa: B023
        assert all(isinstance(decision, Replay) for decision in replays.advance(failures()))
    assert len(replays._num_raised) == 2


@pytest.mark.parametrize("num_failures", [1, MAX_PLAYS - 1])
def test_the_failures_of_a_replay_are_forgotten_when_it_succeeds(monkeypatch: Any, num_failures: int) -> None:
    replays = begin_two()
    monkeypatch.setattr(replays, "needs_new_object", lambda view: False)
    for _ in range(num_failures):
        replays.advance(failures())

    decisions = replays.advance([ReplayPlayed(env_id, 7, 3) for env_id in range(2)])

    assert decisions == [ContinueReplay(env_id, 7) for env_id in range(2)]
    assert not replays._num_raised


def test_the_failures_of_a_replay_are_forgotten_when_it_is_cut(monkeypatch: Any) -> None:
    replays = begin_two()
    monkeypatch.setattr(replays, "needs_new_object", lambda view: False)
    for _ in range(MAX_PLAYS):
        decisions = replays.advance(failures())

    assert all(isinstance(decision, ResolveFault) and decision.remedy is Remedy.CUT for decision in decisions)
    assert not replays._num_raised
