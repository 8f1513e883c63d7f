"""Fault policies: the decisions that follow the failure of an env and the death of a worker.

    policy     an env failed                                              its worker died
    raise      Settle(RAISE)                                              FailWorker
    truncate   Settle(CUT)                                                BeginRestart(CUT), Settle(CUT)
    replay     Settle(KEEP); BeginRestart if calls have changed the env   BeginRestart(KEEP)

A policy is the remedy for the episodes that are lost. "raise" decides about interrupts, and about failures over a
limit. Decisions about commands that were lost in a death that was handled before include no further restart. After
KEEP, the replay begins as soon as the worker serves.

Policies make no calls, read no clock and count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepmill.pool.events import BeginRestart, Death, Decision, EnvFailed, FailWorker, FaultKind, Remedy, Settle
from stepmill.pool.faults import fault_info
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import OnFault


@dataclass(frozen=True)
class FaultPolicy:
    """Decides what follows a fault.

    Attributes:
        remedy: what happens to the episode that is lost.
        death_hint: the last part of the text of WorkerDied errors, which says what happens to the envs.
    """

    remedy: Remedy
    death_hint: str

    @property
    def raises(self) -> bool:
        """Whether each fault is raised once as an error. Other policies handle a limited number per time window."""
        return self.remedy is Remedy.RAISE

    @property
    def replays(self) -> bool:
        """Whether restarted workers get all calls again, and not only the settings of their envs."""
        return self.remedy is Remedy.KEEP

    @property
    def leaves_settings(self) -> bool:
        """Whether the successor of a dead worker applies a setting that the worker did not apply, without an error."""
        return not (self.raises or self.replays)

    def env_failed(
        self, fault: EnvFailed, generation: int, info: Mapping[str, str], *, needs_new_object: bool
    ) -> list[Decision]:
        """Decide about an env that raised an exception or returned an invalid value, and whose worker continues.

        Args:
            fault: the event.
            generation: the generation of its worker.
            info: the `info["fault"]` of a result that ends the episode.
            needs_new_object: whether a replay needs a new env object, because calls have changed it.
        """
        if needs_new_object and self.replays:
            return [BeginRestart(fault.worker, generation, self.remedy, info)]
        return [Settle(fault.env_id, fault.ticket, self.remedy, info)]

    def worker_died(self, death: Death, error: StepmillError) -> list[Decision]:
        """Decide about the envs of a worker that has just died. `error` describes the death."""
        return self.commands_lost(death, error, is_dead=True) if self.raises else self.restart(death, error)

    def commands_lost(self, death: Death, error: StepmillError, *, is_dead: bool) -> list[Decision]:
        """Decide about commands that a death affects, which was handled before. `is_dead`: no successor is being started."""
        if self.raises and is_dead:
            return [FailWorker(death.worker, death.generation)]
        return _settle(death, error, self.remedy)

    def restart(self, death: Death, error: StepmillError) -> list[Decision]:
        """Decide to restart a worker, dead or alive, and decide about the episodes that its envs lose."""
        remedy = Remedy.CUT if self.raises else self.remedy
        info = fault_info("neighbour", error)
        lost = [] if self.replays else _settle(death, error, remedy)
        return [BeginRestart(death.worker, death.generation, remedy, info), *lost]


RAISE = FaultPolicy(Remedy.RAISE, "bring them back with reset() or revive(), or let on_fault='truncate' do it")
POLICIES: dict[OnFault, FaultPolicy] = {
    OnFault.RAISE: RAISE,
    OnFault.TRUNCATE: FaultPolicy(Remedy.CUT, "their episodes are cut short"),
    OnFault.REPLAY: FaultPolicy(Remedy.KEEP, "their episodes are replayed"),
}


def _settle(death: Death, error: StepmillError, remedy: Remedy) -> list[Decision]:
    """Decide about the commands that were lost in a death."""
    kinds = [(fault, FaultKind.DIED if fault.kind is None else fault.kind) for fault in death.faults]
    return [Settle(e.env_id, e.ticket, remedy, fault_info(kind.name.lower(), error)) for e, kind in kinds]
