"""What is decided about replays, without processes."""

from __future__ import annotations

from typing import Any, cast

from stepmill.pool.events import BeginRestart, Decision, Remedy, Replay, ReplayFailed, ServerView
from stepmill.pool.replays import Replays
from stepmill.pool.workers import WorkerState
from stepmill.spec.options import PoolOptions
from stepmill.worker.messages import WorkerPlan


class FakeWorkers:
    """One worker with two envs, which serves and can be restarted while it lives."""

    can_restart_living = True
    state = WorkerState.SERVING
    generation = 4
    plan = WorkerPlan(0, (0, 1), ())

    @property
    def records(self) -> list[FakeWorkers]:
        return [self]

    def view_of(self, env_id: int) -> ServerView:
        return ServerView(env_id, 0, env_id, 7, "PAUSED", True, 1, 3, 0, 0, True, False, False, False, False, 0)

    def check_process(self, worker: int) -> FakeWorkers:
        return self


def begin_two() -> Replays:
    replays = Replays(
        cast("Any", FakeWorkers()),
        cast("Any", None),
        PoolOptions(on_fault="replay", seeding="per_episode"),
        after_apply=[],
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

    assert decisions == [Replay(env_id, 7, [], True) for env_id in range(2)]


def test_failed_replays_of_earlier_episodes_are_not_counted_any_more(monkeypatch: Any) -> None:
    replays = begin_two()
    monkeypatch.setattr(replays, "needs_new_object", lambda view: False)
    view = FakeWorkers().view_of
    for episode in range(20):
        monkeypatch.setattr(FakeWorkers, "view_of", lambda _, env_id: view(env_id)._replace(episode=episode))  # noqa: B023
        assert all(isinstance(decision, Replay) for decision in replays.advance(failures()))
    assert len(replays._num_raised) == 2
