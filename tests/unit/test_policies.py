"""Each row of the policies' table: an event and what is known of it, and the decisions that follow."""

from __future__ import annotations

import pytest

from stepmill.pool.events import (
    BeginRestart,
    Death,
    Decision,
    EnvDecision,
    EnvFailed,
    FaultKind,
    Settle,
    WorkerDecision,
)
from stepmill.pool.policies import POLICIES, FaultPolicy
from stepmill.spec.errors import WorkerDied
from stepmill.spec.options import OnFault

WORKER, GENERATION, TICKETS = 3, 5, {4: 17, 6: 18}
RAISE, TRUNCATE, REPLAY = (POLICIES[each] for each in (OnFault.RAISE, OnFault.TRUNCATE, OnFault.REPLAY))
ALL = [RAISE, TRUNCATE, REPLAY]
ERROR = WorkerDied("worker 3 ended", worker=WORKER, env_ids=(4, 6, 7))


def fault(env_id: int = 4, kind: int = FaultKind.RAISED) -> EnvFailed:
    return EnvFailed(env_id, kind, None, WORKER, TICKETS[env_id], begins_episode=False, was_resetting=False)


def failed(policy: FaultPolicy, *, needs_new_object: bool = False) -> list[Decision]:
    return policy.env_failed(fault(), GENERATION, {"kind": "raised"}, needs_new_object=needs_new_object)


def death(*, kind: int = FaultKind.DIED) -> Death:
    return Death(WORKER, GENERATION, (4, 6, 7), (4,), [fault(4, kind), fault(6, FaultKind.NEIGHBOUR)])


def names(decisions: list[Decision]) -> list[str]:
    """Each decision's class, with its remedy."""
    return [
        f"{type(each).__name__}({each.remedy.name})"
        if isinstance(each, (Settle, BeginRestart))
        else type(each).__name__
        for each in decisions
    ]


def name_of(policy: FaultPolicy) -> str:
    return policy.remedy.name


@pytest.mark.parametrize(
    ("policy", "needs_new_object", "expected"),
    [
        (RAISE, False, "Settle(RAISE)"),
        (RAISE, True, "Settle(RAISE)"),
        (TRUNCATE, False, "Settle(CUT)"),
        (TRUNCATE, True, "Settle(CUT)"),
        (REPLAY, False, "Settle(KEEP)"),
        (REPLAY, True, "BeginRestart(KEEP)"),
    ],
)
def test_an_env_that_failed_gets_the_decision_of_its_row(
    policy: FaultPolicy, needs_new_object: bool, expected: str
) -> None:
    assert names(failed(policy, needs_new_object=needs_new_object)) == [expected]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RAISE, ["FailWorker"]),
        (TRUNCATE, ["BeginRestart(CUT)", "Settle(CUT)", "Settle(CUT)"]),
        (REPLAY, ["BeginRestart(KEEP)"]),
    ],
)
def test_the_death_of_a_worker_gets_the_decisions_of_its_row(policy: FaultPolicy, expected: list[str]) -> None:
    assert names(policy.worker_died(death(), ERROR)) == expected


@pytest.mark.parametrize(
    ("policy", "is_dead", "expected"),
    [
        (RAISE, True, ["FailWorker"]),
        (RAISE, False, ["Settle(RAISE)", "Settle(RAISE)"]),
        (TRUNCATE, False, ["Settle(CUT)", "Settle(CUT)"]),
        (REPLAY, False, ["Settle(KEEP)", "Settle(KEEP)"]),
    ],
)
def test_commands_that_an_earlier_death_affects_get_the_decisions_of_their_row(
    policy: FaultPolicy, is_dead: bool, expected: list[str]
) -> None:
    assert names(policy.commands_lost(death(), ERROR, is_dead=is_dead)) == expected


@pytest.mark.parametrize("policy", ALL, ids=name_of)
def test_a_restart_that_the_pool_asks_for_raises_nothing(policy: FaultPolicy) -> None:
    remedy = "CUT" if policy is RAISE else policy.remedy.name
    ends = [] if policy is REPLAY else [f"Settle({remedy})"] * 2
    assert names(policy.restart(death(), ERROR)) == [f"BeginRestart({remedy})", *ends]


@pytest.mark.parametrize("policy", ALL, ids=name_of)
def test_each_decision_has_the_key_of_its_event(policy: FaultPolicy) -> None:
    lost = policy.commands_lost(death(), ERROR, is_dead=False)
    for decision in (*policy.worker_died(death(), ERROR), *policy.restart(death(), ERROR), *lost, *failed(policy)):
        if isinstance(decision, WorkerDecision):
            assert (decision.worker, decision.generation) == (WORKER, GENERATION)
        elif isinstance(decision, EnvDecision):
            assert decision.ticket == TICKETS[decision.env_id]


def test_the_idle_envs_of_a_restarted_worker_learn_that_a_neighbour_failed() -> None:
    restarts = [each for policy in ALL for each in policy.restart(death(), ERROR) if isinstance(each, BeginRestart)]

    assert [each.info["kind"] for each in restarts] == ["neighbour"] * 3


@pytest.mark.parametrize(("kind", "name"), [(FaultKind.DIED, "died"), (FaultKind.TIMED_OUT, "timed_out"), (99, "died")])
def test_a_truncated_episode_says_how_its_own_command_was_lost(kind: int, name: str) -> None:
    ends = [each for each in TRUNCATE.worker_died(death(kind=kind), ERROR) if isinstance(each, Settle)]

    assert [(end.env_id, end.info["kind"]) for end in ends] == [(4, name), (6, "neighbour")]
