"""What follows the failure of an env (`Recovery`) and the death of a worker, by remedy. A fault policy is a remedy with a name.

    remedy   an env failed                                              its worker died
    RAISE    Settle(RAISE)                                              FailWorker
    CUT      Settle(CUT)                                                BeginRestart(CUT), Settle(CUT)
    KEEP     Settle(KEEP); BeginRestart if calls have changed the env   BeginRestart(KEEP)

RAISE is also the remedy for interrupts, and for failures over a limit. Decisions about commands that were lost in a death
that was handled before include no further restart. After KEEP, the replay begins as soon as the worker serves.

`decide_death` depends only on its arguments: it makes no calls, reads no clock and counts nothing.
"""

from __future__ import annotations

from stepmill.pool.events import BeginRestart, Death, Decision, FailWorker, FaultKind, Remedy, Settle
from stepmill.pool.faults import fault_info
from stepmill.pool.workers import DEAD, WorkerState
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import OnFault

REMEDIES = {OnFault.RAISE: Remedy.RAISE, OnFault.TRUNCATE: Remedy.CUT, OnFault.REPLAY: Remedy.KEEP}


def decide_death(death: Death, state: WorkerState, remedy: Remedy, error: StepmillError) -> list[Decision]:
    """Decide about the envs of a worker that has died, and about commands that were lost.

    Args:
        death: the death, with the lost commands to decide about.
        state: the state of the worker. DEAD_UNREPORTED: its death was not handled before.
        remedy: what happens to the episodes that its envs lose.
        error: the description of the death.
    """
    if remedy is Remedy.RAISE and state in DEAD:
        return [FailWorker(death.worker, death.generation)]
    decisions: list[Decision] = []
    if state is WorkerState.DEAD_UNREPORTED:
        decisions.append(BeginRestart(death.worker, death.generation, remedy, fault_info("neighbour", error)))
        if remedy is Remedy.KEEP:
            return decisions
    for fault in death.faults:
        info = fault_info((fault.kind or FaultKind.DIED).name.lower(), error)
        decisions.append(Settle(fault.env_id, fault.ticket, remedy, info))
    return decisions
