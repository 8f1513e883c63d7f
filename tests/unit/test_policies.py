"""Each row of the policies' table: an event and what is known of it, and the decisions that follow."""

from __future__ import annotations

import itertools

import pytest

from stepmill.pool.events import (
    BeginRestart,
    Decision,
    EndEpisode,
    EnvDecision,
    EnvFailed,
    FaultKind,
    WorkerDecision,
)
from stepmill.pool.policies import Death, Failure, FaultPolicy, RaisePolicy, ReplayPolicy, TruncatePolicy
from stepmill.spec.errors import WorkerDied

WORKER, GENERATION, TICKETS = 3, 5, {4: 17, 6: 18}
POLICIES: list[FaultPolicy] = [RaisePolicy(), TruncatePolicy(), ReplayPolicy()]
ERROR = WorkerDied("worker 3 ended", worker=WORKER, env_ids=(4, 6, 7))


def fault(env_id: int = 4, kind: int = FaultKind.RAISED) -> EnvFailed:
    return EnvFailed(env_id, kind, None, WORKER, TICKETS[env_id], begins_episode=False, was_resetting=False)


def failure(*, is_allowed: bool = True, needs_new_object: bool = False) -> Failure:
    return Failure(fault(), GENERATION, {"kind": "raised"}, is_allowed, needs_new_object)


def death(*, is_new: bool = True, is_dead: bool = True, is_allowed: bool = True, kind: int = FaultKind.DIED) -> Death:
    faults = [fault(4, kind), fault(6, FaultKind.NEIGHBOUR)]
    return Death(WORKER, GENERATION, faults, ERROR, is_new, is_dead, is_allowed)


def names(decisions: list[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


@pytest.mark.parametrize(
    ("policy", "known", "expected"),
    [
        (RaisePolicy(), failure(), "MarkFaulted"),
        (RaisePolicy(), failure(needs_new_object=True), "MarkFaulted"),
        (TruncatePolicy(), failure(), "EndEpisode"),
        (TruncatePolicy(), failure(needs_new_object=True), "EndEpisode"),
        (TruncatePolicy(), failure(is_allowed=False), "MarkFaulted"),
        (ReplayPolicy(), failure(), "Suspend"),
        (ReplayPolicy(), failure(needs_new_object=True), "BeginRestart"),
        (ReplayPolicy(), failure(is_allowed=False), "MarkFaulted"),
        (ReplayPolicy(), failure(is_allowed=False, needs_new_object=True), "MarkFaulted"),
    ],
)
def test_an_env_that_failed_gets_the_decision_of_its_row(policy: FaultPolicy, known: Failure, expected: str) -> None:
    assert names(policy.env_failed(known)) == [expected]


@pytest.mark.parametrize(
    ("policy", "known", "expected"),
    [
        (RaisePolicy(), death(), ["FailWorker", "MarkFaulted", "MarkFaulted"]),
        (RaisePolicy(), death(is_new=False), ["FailWorker", "MarkFaulted", "MarkFaulted"]),
        (RaisePolicy(), death(is_new=False, is_dead=False), ["MarkFaulted", "MarkFaulted"]),
        (TruncatePolicy(), death(), ["BeginRestart", "EndEpisode", "EndEpisode"]),
        (TruncatePolicy(), death(is_allowed=False), ["FailWorker", "MarkFaulted", "MarkFaulted"]),
        (TruncatePolicy(), death(is_new=False, is_dead=False), ["EndEpisode", "EndEpisode"]),
        (ReplayPolicy(), death(), ["BeginRestart"]),
        (ReplayPolicy(), death(is_allowed=False), ["FailWorker", "MarkFaulted", "MarkFaulted"]),
        (ReplayPolicy(), death(is_new=False, is_dead=False), ["Suspend", "Suspend"]),
    ],
)
def test_the_death_of_a_worker_gets_the_decisions_of_its_row(
    policy: FaultPolicy, known: Death, expected: list[str]
) -> None:
    assert names(policy.worker_died(known)) == expected


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_restart_that_the_pool_asks_for_is_decided_whatever_the_limit(policy: FaultPolicy) -> None:
    decisions = policy.restart(death(is_allowed=False, is_dead=False))

    ends = [] if isinstance(policy, ReplayPolicy) else ["EndEpisode", "EndEpisode"]
    assert names(decisions) == ["BeginRestart", *ends]


@pytest.mark.parametrize(("policy", "is_new"), [*itertools.product(POLICIES, [True, False])])
def test_each_decision_has_the_key_of_its_event(policy: FaultPolicy, is_new: bool) -> None:
    for decision in (
        *policy.worker_died(death(is_new=is_new)),
        *policy.restart(death()),
        *policy.env_failed(failure()),
    ):
        if isinstance(decision, WorkerDecision):
            assert (decision.worker, decision.generation) == (WORKER, GENERATION)
        elif isinstance(decision, EnvDecision):
            assert decision.ticket == TICKETS[decision.env_id]


def test_only_replays_suspend_the_envs_of_a_restarted_worker() -> None:
    restarts = [each for policy in POLICIES for each in policy.restart(death()) if isinstance(each, BeginRestart)]

    assert [(each.is_replayed, each.info is None) for each in restarts] == [
        (False, False),
        (False, False),
        (True, True),
    ]
    assert [each.info and each.info["kind"] for each in restarts] == ["neighbour", "neighbour", None]


@pytest.mark.parametrize(("kind", "name"), [(FaultKind.DIED, "died"), (FaultKind.TIMED_OUT, "timed_out"), (99, "died")])
def test_a_truncated_episode_says_how_its_own_command_was_lost(kind: int, name: str) -> None:
    ends = [each for each in TruncatePolicy().worker_died(death(kind=kind)) if isinstance(each, EndEpisode)]

    assert [(end.env_id, end.info["kind"]) for end in ends] == [(4, name), (6, "neighbour")]


def test_policies_have_no_state_so_that_pools_can_share_them() -> None:
    assert [vars(policy) for policy in POLICIES] == [{}] * 3
