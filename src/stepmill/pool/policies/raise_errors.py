"""The policy "raise": each fault is an error, raised once."""

from __future__ import annotations

from stepmill.pool.policies.base import EnvFault, WorkerDeath, fail_death, restart_and_truncate
from stepmill.pool.workers import WorkerSupervisor
from stepmill.spec.errors import StepmillError


class RaisePolicy:
    """Leaves every repair to the user: reset() or revive()."""

    reports_deaths = True
    death_hint = "bring them back with reset() or revive(), or let on_fault='truncate' do it"

    def __init__(self, workers: WorkerSupervisor) -> None:
        self._workers = workers

    def on_env_error(self, fault: EnvFault, error: StepmillError) -> list[StepmillError]:
        self._workers.state.fail([fault.env_id])
        return [error]

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        return fail_death(self._workers, death)

    def replace_worker(self, death: WorkerDeath, delay_s: float) -> None:
        restart_and_truncate(self._workers, death, delay_s)

    def on_restarted(self, worker: int) -> None:
        self._workers.serve(worker)

    def repeats_settings(self, server: int) -> bool:
        return False
