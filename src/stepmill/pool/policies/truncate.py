"""The policy "truncate": a fault ends the episode, marked, and the next one begins in a rebuilt env."""

from __future__ import annotations

from stepmill.pool.faults import fault_info
from stepmill.pool.policies.base import (
    EnvErrorLimits,
    EnvFault,
    WithoutReplays,
    WorkerDeath,
    fail_death,
    restart_and_truncate,
    truncate_all,
)
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.errors import StepmillError


class TruncatePolicy(WithoutReplays):
    """Cuts episodes short. An env that raised is reset where it lives; a dead worker restarts meanwhile."""

    reports_deaths = False
    death_hint = "their episodes are cut short"

    def __init__(self, workers: WorkerSupervisor, limits: EnvErrorLimits) -> None:
        super().__init__(workers)
        self._limits = limits

    def on_env_error(self, fault: EnvFault, error: StepmillError) -> list[StepmillError]:
        if self._limits.allow(fault.env_id, error) is None:
            self._workers.state.fail([fault.env_id])
            return [error]
        self._workers.state.truncate(fault.env_id, fault_info("raised", error))
        return []

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        if not death.is_new:
            truncate_all(self._workers, death.faults, death.error)
            return []
        delay_s = self._workers.take_repair(death.worker)
        if delay_s is None:
            return fail_death(self._workers, death)
        restart_and_truncate(self._workers, death, delay_s)
        return []
