"""Each row of the remedies' table: an event and what is known of it, and the decisions that follow."""

from __future__ import annotations

import pytest

from stepmill.pool.events import (
    BeginRestart,
    Death,
    Decision,
    EnvDecision,
    EnvFailed,
    FaultKind,
    Remedy,
    ResolveFault,
    WorkerDecision,
)
from stepmill.pool.fault_policies import REMEDIES, decide_death
from stepmill.pool.workers import WorkerState
from stepmill.spec.errors import WorkerDied
from stepmill.spec.options import OnFault

WORKER, GENERATION, TICKETS = 3, 5, {4: 17, 6: 18}
RAISE, TRUNCATE, REPLAY = (REMEDIES[each] for each in (OnFault.RAISE, OnFault.TRUNCATE, OnFault.REPLAY))
ALL = [RAISE, TRUNCATE, REPLAY]
SERVING, DEAD_UNREPORTED, DEAD_REPORTED, RESTARTING = WorkerState
ERROR = WorkerDied("worker 3 ended", worker=WORKER, env_ids=(4, 6, 7))


def fault(env_id: int = 4, kind: int = FaultKind.RAISED) -> EnvFailed:
    return EnvFailed(env_id, kind, None, WORKER, TICKETS[env_id], begins_episode=False, was_resetting=False)


def died(remedy: Remedy, state: WorkerState = DEAD_UNREPORTED, *, kind: int = FaultKind.DIED) -> list[Decision]:
    death = Death(WORKER, GENERATION, (4, 6, 7), (4,), [fault(4, kind), fault(6, FaultKind.NEIGHBOUR)])
    return decide_death(death, state, remedy, ERROR)


def names(decisions: list[Decision]) -> list[str]:
    """Each decision's class, with its remedy."""
    return [
        f"{type(each).__name__}({each.remedy.name})"
        if isinstance(each, (ResolveFault, BeginRestart))
        else type(each).__name__
        for each in decisions
    ]


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        (RAISE, ["FailWorker"]),
        (TRUNCATE, ["BeginRestart(CUT)", "ResolveFault(CUT)", "ResolveFault(CUT)"]),
        (REPLAY, ["BeginRestart(KEEP)"]),
    ],
)
def test_the_death_of_a_worker_gets_the_decisions_of_its_row(remedy: Remedy, expected: list[str]) -> None:
    assert names(died(remedy)) == expected


@pytest.mark.parametrize("state", [SERVING, RESTARTING])
@pytest.mark.parametrize("remedy", ALL)
def test_commands_that_an_earlier_death_affects_restart_no_worker(remedy: Remedy, state: WorkerState) -> None:
    assert names(died(remedy, state)) == [f"ResolveFault({remedy.name})"] * 2


def test_commands_of_a_worker_whose_death_was_raised_fail_with_it() -> None:
    assert names(died(RAISE, DEAD_REPORTED)) == ["FailWorker"]


@pytest.mark.parametrize("remedy", ALL)
def test_each_decision_has_the_key_of_its_event(remedy: Remedy) -> None:
    for decision in (*died(remedy), *died(remedy, SERVING)):
        if isinstance(decision, WorkerDecision):
            assert (decision.worker, decision.generation) == (WORKER, GENERATION)
        elif isinstance(decision, EnvDecision):
            assert decision.ticket == TICKETS[decision.env_id]


def test_the_idle_envs_of_a_restarted_worker_learn_that_a_neighbour_failed() -> None:
    restarts = [each for remedy in ALL for each in died(remedy) if isinstance(each, BeginRestart)]

    assert [each.info["kind"] for each in restarts] == ["neighbour"] * 2


@pytest.mark.parametrize(("kind", "name"), [(FaultKind.DIED, "died"), (FaultKind.TIMED_OUT, "timed_out"), (99, "died")])
def test_a_truncated_episode_says_how_its_own_command_was_lost(kind: int, name: str) -> None:
    ends = [each for each in died(TRUNCATE, kind=kind) if isinstance(each, ResolveFault)]

    assert [(end.env_id, end.info["kind"]) for end in ends] == [(4, name), (6, "neighbour")]
