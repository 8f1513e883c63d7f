"""The policies "raise" and "truncate"."""

from __future__ import annotations

from collections.abc import Sequence

from stepmill.pool.events import EndEpisode, EnvFailed, MarkFaulted
from stepmill.pool.faults import fault_info
from stepmill.pool.policies.base import EnvErrorLimits, WorkerDeath, fail_lost_envs, fail_over_limit
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.errors import StepmillError


class WithoutReplays:
    """The common part of policies without replays: the envs of a restarted worker lose their episodes."""

    def __init__(self, workers: WorkerSupervisor) -> None:
        self._workers = workers

    def restart_worker(self, death: WorkerDeath, delay_s: float) -> None:
        restart_and_truncate(self._workers, death, delay_s)

    def on_restarted(self, worker: int) -> None:
        self._workers.serve(worker)

    def repeats_settings(self, server: int) -> bool:
        return False


class RaisePolicy(WithoutReplays):
    """Raises each fault once. The user makes the envs usable again, with reset() or revive()."""

    reports_deaths = True
    death_hint = "bring them back with reset() or revive(), or let on_fault='truncate' do it"

    def on_env_error(self, fault: EnvFailed, error: StepmillError) -> list[StepmillError]:
        self._workers.state.apply([MarkFaulted(fault.env_id, fault.ticket)])
        return [error]

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        return fail_lost_envs(self._workers, death)


class TruncatePolicy(WithoutReplays):
    """Truncates episodes. An env that raised is reset in its worker; a dead worker is restarted in the background."""

    reports_deaths = False
    death_hint = "their episodes are cut short"

    def __init__(self, workers: WorkerSupervisor, limits: EnvErrorLimits) -> None:
        super().__init__(workers)
        self._limits = limits

    def on_env_error(self, fault: EnvFailed, error: StepmillError) -> list[StepmillError]:
        if self._limits.allow(fault.env_id, error) is None:
            self._workers.state.apply([MarkFaulted(fault.env_id, fault.ticket)])
            return [error]
        self._workers.state.apply([EndEpisode(fault.env_id, fault.ticket, fault_info("raised", error))])
        return []

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        if not death.is_new:
            truncate_all(self._workers, death.faults, death.error)
            return []
        delay_s = self._workers.count_restart(death.worker)
        if delay_s is None:
            return fail_over_limit(self._workers, death)
        restart_and_truncate(self._workers, death, delay_s)
        return []


def truncate_all(workers: WorkerSupervisor, faults: Sequence[EnvFailed], error: StepmillError) -> None:
    """Cut short the episodes of lost commands; a lost reset is repeated."""
    kinds = [(fault, "died" if fault.kind is None else fault.kind.name.lower()) for fault in faults]
    workers.state.apply([EndEpisode(each.env_id, each.ticket, fault_info(kind, error)) for each, kind in kinds])


def restart_and_truncate(workers: WorkerSupervisor, death: WorkerDeath, delay_s: float) -> None:
    """Restart a worker, and cut short the episodes of all its envs."""
    workers.begin_restart(death.worker, delay_s, info=fault_info("neighbour", death.error))
    truncate_all(workers, death.faults, death.error)
