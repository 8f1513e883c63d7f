"""The policy "raise": each fault is an error, raised once."""

from __future__ import annotations

from stepmill.pool.policies.base import EnvFault, WithoutReplays, WorkerDeath, fail_death
from stepmill.spec.errors import StepmillError


class RaisePolicy(WithoutReplays):
    """Leaves every repair to the user: reset() or revive()."""

    reports_deaths = True
    death_hint = "bring them back with reset() or revive(), or let on_fault='truncate' do it"

    def on_env_error(self, fault: EnvFault, error: StepmillError) -> list[StepmillError]:
        self._workers.state.fail([fault.env_id])
        return [error]

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        return fail_death(self._workers, death)
