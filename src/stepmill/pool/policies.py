"""Fault policies: the decisions that follow an env's failure and a worker's death.

    policy     an env failed                                           its worker died
    raise      MarkFaulted                                             FailWorker, MarkFaulted
    truncate   EndEpisode                                              BeginRestart, EndEpisode
    replay     Suspend; BeginRestart if calls have changed the object  BeginRestart, with replays

A failure over a limit, and an interrupt, is decided as by "raise". Commands that were lost in a death that was handled before are decided
without another restart. Decisions that contain MarkFaulted or FailWorker raise the error; after Suspend the replay begins as soon as the
worker serves.

Policies make no calls, read no clock and count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepmill.pool.events import (
    BeginRestart,
    Decision,
    EndEpisode,
    EnvFailed,
    FailWorker,
    FaultKind,
    MarkFaulted,
    Suspend,
)
from stepmill.pool.faults import fault_info
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import OnFault


@dataclass(frozen=True)
class Failure:
    """A command that ended in a fault. Its worker goes on.

    Attributes:
        fault: the event.
        generation: of its worker.
        info: the `info["fault"]` of a result that ends the episode.
        is_allowed: whether `restarts.max_env_errors` is not reached.
        needs_new_object: whether calls have changed the env object, so that a reset does not restore it, and its worker can be
            restarted.
    """

    fault: EnvFailed
    generation: int
    info: Mapping[str, str]
    is_allowed: bool
    needs_new_object: bool


@dataclass(frozen=True)
class Death:
    """A worker that has ended or was given up.

    Attributes:
        worker, generation: its number, and how often it was restarted.
        faults: pending commands that were lost.
        error: describes the death.
        is_new: False if the death was handled before, and these are further commands of it.
        is_dead: whether no successor serves or is being started.
        is_allowed: whether `restarts.max_restarts` is not reached.
    """

    worker: int
    generation: int
    faults: Sequence[EnvFailed]
    error: StepmillError
    is_new: bool
    is_dead: bool
    is_allowed: bool


class FaultPolicy(Protocol):
    """Decides what follows a fault.

    Attributes:
        reports_deaths: whether a death is raised as an error, once, by the call that finds it.
        is_limited: whether it handles only so many faults in a window of time.
        death_hint: the last part of the text of WorkerDied errors: what happens to the envs.
    """

    reports_deaths: bool
    is_limited: bool
    death_hint: str

    def env_failed(self, failure: Failure) -> list[Decision]:
        """Decide about an env that raised or returned an invalid value."""

    def worker_died(self, death: Death) -> list[Decision]:
        """Decide about the envs of a worker that died."""

    def restart(self, death: Death) -> list[Decision]:
        """Decide to restart a worker, dead or alive, and about the episodes that its envs lose."""


class RaisePolicy:
    """Raises each fault once. The user makes the envs usable again, with reset() or revive()."""

    reports_deaths = True
    is_limited = False
    death_hint = "bring them back with reset() or revive(), or let on_fault='truncate' do it"

    def env_failed(self, failure: Failure) -> list[Decision]:
        return _mark_faulted([failure.fault])

    def worker_died(self, death: Death) -> list[Decision]:
        return _fail(death)

    def restart(self, death: Death) -> list[Decision]:
        return _restart_and_truncate(death)


class TruncatePolicy:
    """Truncates episodes. An env that raised is reset in its worker; a dead worker is restarted in the background."""

    reports_deaths = False
    is_limited = True
    death_hint = "their episodes are cut short"

    def env_failed(self, failure: Failure) -> list[Decision]:
        fault = failure.fault
        return [EndEpisode(fault.env_id, fault.ticket, failure.info)] if failure.is_allowed else _mark_faulted([fault])

    def worker_died(self, death: Death) -> list[Decision]:
        if not death.is_new:
            return _end_episodes(death)
        return self.restart(death) if death.is_allowed else _fail(death)

    def restart(self, death: Death) -> list[Decision]:
        return _restart_and_truncate(death)


class ReplayPolicy:
    """Replays episodes. Those that cannot be replayed are cut short, with the reason in `info["fault"]`."""

    reports_deaths = False
    is_limited = True
    death_hint = "their episodes are replayed"

    def env_failed(self, failure: Failure) -> list[Decision]:
        fault = failure.fault
        if not failure.is_allowed:
            return _mark_faulted([fault])
        if failure.needs_new_object:
            return [BeginRestart(fault.worker, failure.generation, True, None)]
        return [Suspend(fault.env_id, fault.ticket)]

    def worker_died(self, death: Death) -> list[Decision]:
        if not death.is_new:
            return [Suspend(fault.env_id, fault.ticket) for fault in death.faults]
        return self.restart(death) if death.is_allowed else _fail(death)

    def restart(self, death: Death) -> list[Decision]:
        return [BeginRestart(death.worker, death.generation, True, None, death.is_dead)]


POLICIES: dict[OnFault, FaultPolicy] = {
    OnFault.RAISE: RaisePolicy(),
    OnFault.TRUNCATE: TruncatePolicy(),
    OnFault.REPLAY: ReplayPolicy(),
}


def _mark_faulted(faults: Sequence[EnvFailed]) -> list[Decision]:
    return [MarkFaulted(fault.env_id, fault.ticket) for fault in faults]


def _fail(death: Death) -> list[Decision]:
    """The envs are FAULTED until reset() or revive(): those of the lost commands, and all if the worker stays dead."""
    worker: list[Decision] = [FailWorker(death.worker, death.generation, death.is_new)] if death.is_dead else []
    return [*worker, *_mark_faulted(death.faults)]


def _restart_and_truncate(death: Death) -> list[Decision]:
    info = fault_info("neighbour", death.error)
    return [BeginRestart(death.worker, death.generation, False, info, death.is_dead), *_end_episodes(death)]


def _end_episodes(death: Death) -> list[Decision]:
    """Cut short the episodes of lost commands; a lost reset is repeated."""
    kinds = [(fault, FaultKind.DIED if fault.kind is None else fault.kind) for fault in death.faults]
    return [EndEpisode(each.env_id, each.ticket, fault_info(kind.name.lower(), death.error)) for each, kind in kinds]
