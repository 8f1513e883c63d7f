"""Who was told of which death, under the policy "raise": each is told once, by the call that finds it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from stepmill.pool.capsules import CapsuleDesk
from stepmill.pool.restarts import Restarts
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import EnvState, OnFault, PoolOptions


class Tidings:
    """Says what a reset has to bring back, or to tell first."""

    def __init__(self, restarts: Restarts, capsules: CapsuleDesk, options: PoolOptions) -> None:
        self._restarts = restarts
        self._capsules = capsules
        self._is_raising = options.on_fault is OnFault.RAISE

    def note(self, worker: int) -> None:
        """The death of this worker is being told."""
        if self._is_raising:
            self._restarts.told.add(worker)

    def lost_among(self, env_ids: Sequence[int]) -> list[int]:
        """Return which of the envs that are to be reset are FAULTED, or without a worker as is known or does no harm.

        Raises:
            WorkerDied: a worker of theirs has died, which nobody was told, and another env waited there in the middle of
                an episode, which is lost. The same reset brings back its own envs once that was told.
        """
        ledger, is_dead = self._restarts.ledger, self._restarts.is_dead
        states = ledger.states()
        told = {env_id for worker in self._restarts.told for env_id in ledger.envs_of(worker)}
        lost = [env_id for env_id in env_ids if states[env_id] == EnvState.FAULTED or env_id in told]
        if not self._is_raising:
            return lost  # the reset finds a dead worker, and all of its envs are dealt with
        over = [env_id for env_id in env_ids if states[env_id] == EnvState.EXHAUSTED and env_id not in told]
        over = [env_id for env_id in over if is_dead(ledger.worker_of(env_id))]
        for worker in sorted({ledger.worker_of(env_id) for env_id in (*lost, *over)}):
            if self._lost_beside(worker, env_ids):
                raise self._tell(worker)
        if over:
            text = f"the worker of envs {over}, which were exhausted, has died since; it is started again"
            warnings.warn(text, RuntimeWarning, stacklevel=6)
        return [*lost, *over]

    def warn_of(self, env_ids: Sequence[int]) -> None:
        """Dead workers are about to be replaced for these envs: tell whose episode is lost beside them."""
        for worker in sorted({self._restarts.ledger.worker_of(env_id) for env_id in env_ids}):
            beside = self._lost_beside(worker, env_ids)
            if beside:
                text = f"worker {worker} has died since it was last heard of, and with it the episodes of envs {beside}; reset them, too"
                warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _lost_beside(self, worker: int, env_ids: Sequence[int]) -> list[int]:
        """Whose episode a death has cost that nobody was told of, but for these."""
        is_over = worker in self._restarts.told or self._restarts.is_restarting(worker)
        if is_over or not self._restarts.is_dead(worker):
            return []
        states = self._restarts.ledger.states()
        others = [env_id for env_id in self._restarts.ledger.envs_of(worker) if env_id not in env_ids]
        return [env_id for env_id in others if states[env_id] == EnvState.IDLE]

    def _tell(self, worker: int) -> StepmillError:
        self.note(worker)
        self._restarts.ledger.fail_worker(worker)
        return self.obituary(worker)

    def obituary(self, worker: int) -> StepmillError:
        """Return what tells of a death that no command of its envs has met, with its crash capsule."""
        error = self._restarts.take_failure(worker) or self._restarts.obituary(worker)
        return self._capsules.keep_death(error, worker, ())
