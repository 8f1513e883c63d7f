"""Revives FAULTED envs and dead workers for resets and `revive`, and waits for rebuilt envs before calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepmill.pool.events import BeginRestart, EnvFailed, MarkNew, Remedy, ResolveFault
from stepmill.pool.receiving import PoolWait
from stepmill.pool.recovery import Recovery
from stepmill.pool.resets import ResetPlan
from stepmill.pool.workers import DEAD, WorkerState
from stepmill.spec.errors import EnvTimeout
from stepmill.spec.options import EnvState, PoolOptions
from stepmill.worker.signals import defer_signals


class Revival:
    """Restarts workers for the user, and waits for restarts and replays. Only the pool's thread uses it."""

    def __init__(self, waits: PoolWait, recovery: Recovery, options: PoolOptions) -> None:
        self.waits = waits
        self.recovery = recovery
        self.workers = recovery.workers
        self._has_spares = options.resets.spare_envs > 0
        self._recycles = options.restarts.recycles

    def prepare_reset(self, plan: ResetPlan) -> ResetPlan:
        """Wait for the envs of a reset, drop their results, and restart the workers of those that are lost.

        Return the plan without the envs whose faults this has found. The faults are stored.
        """
        lost_envs = self.recovery.news.lost_envs
        self.waits.drain(plan.env_ids)
        self._revive_before_reset(plan.without(lost_envs()).env_ids)
        self.waits.drain(plan.env_ids)  # the policy may replay envs that this has found to be lost
        if not (self._has_spares and plan.is_whole):
            plan = plan.without(lost_envs())
        if not self._has_spares:
            return plan
        while plan.is_whole and not lost_envs() and self._restart_all():  # before any env is given another object
            self.waits.drain(plan.env_ids)
        if not (plan.is_whole and lost_envs()):
            plan.release_staged(self.workers.state)
            self.waits.drain(plan.env_ids_to_reset)
            self._revive_before_reset(plan.env_ids_to_reset, wait=not plan.is_whole)
        return plan.without(plan.env_ids if plan.is_whole and lost_envs() else lost_envs())

    def _restart_all(self) -> bool:
        """Restart every dead worker, including those of spares, and wait. Return whether any was restarted.

        This ends at the first death that the policy reports, and at the first worker that could not be started.
        """
        workers = self.workers
        before = workers.num_restarts
        for worker in range(len(workers.records)):
            if workers.check_process(worker).state is WorkerState.DEAD_UNREPORTED:
                self.recovery.handle_dead_workers([worker])
            if self.recovery.news.faults:
                return False
            if workers.records[worker].state is WorkerState.DEAD_REPORTED:
                self._fail_and_restart(worker, workers.envs_of(worker))
            if not self._wait_restart(worker):
                return False
        return workers.num_restarts > before

    def _revive_before_reset(self, env_ids: Sequence[int], *, wait: bool = True) -> None:
        """Before a reset of these envs, revive those that are FAULTED or whose worker is known to be dead.

        If this finds a death in which another env has lost its episode, the fault policy decides about it. If the
        policy reports the death, or a worker could not be started, the error is stored in the faults.
        """
        workers, recovery = self.workers, self.recovery
        workers.record_deaths()
        states, lost, exhausted = workers.state.states(), list[int](), list[int]()
        # Other policies handle all envs of a worker that the reset itself finds dead.
        dead = WorkerState.DEAD_UNREPORTED if recovery.remedy is Remedy.RAISE else None
        for env_id, worker in workers.workers_of(env_ids).items():
            state = workers.records[worker].state
            if states[env_id] == EnvState.FAULTED or state is WorkerState.DEAD_REPORTED:
                lost.append(env_id)
            elif states[env_id] == EnvState.EXHAUSTED and state is dead:
                exhausted.append(env_id)
        if lost or exhausted:
            self.revive([*lost, *exhausted], wait=wait, reset_ids=env_ids)
        if exhausted and not recovery.news.faults:
            recovery.news.notices.append(f"the worker of the exhausted envs {exhausted} has died; it is restarted")

    def revive(
        self,
        env_ids: Sequence[int],
        *,
        wait: bool = True,
        restart_living: bool = False,
        reset_ids: Sequence[int] | None = None,
    ) -> None:
        """Restart the dead workers of these envs, or all their workers. All envs of restarted workers then need a reset.

        A death that this finds is handled as in `_revive_before_reset`, unless all envs of the worker are in `reset_ids`, or
        the worker would be restarted even if it lived. The default of `reset_ids` is `env_ids`. With `wait`, the error of a
        worker that could not be started is stored in the faults.
        """
        state, worker_of = self.workers.state, self.workers.workers_of(env_ids)
        owners = sorted({*worker_of.values()})
        # Each process is checked once. The next command for its envs finds a worker that dies later.
        dead = [worker for worker in owners if self.workers.check_process(worker).state in DEAD]
        reported = () if restart_living else self._report_losses(dead, env_ids if reset_ids is None else reset_ids)
        asked = [worker for worker in owners if worker not in reported]
        for worker in asked:
            if self.workers.records[worker].state is not WorkerState.RESTARTING and (restart_living or worker in dead):
                self._fail_and_restart(worker, env_ids)
        rebuilt = {worker for worker in asked if not wait or self._wait_restart(worker)}
        states = state.states()
        faulted = [each for each in env_ids if worker_of[each] in rebuilt and states[each] == EnvState.FAULTED]
        state.apply([MarkNew(env_id) for env_id in faulted])
        self.recovery.news.forget_raised(env_ids)

    def revive_only(self, env_ids: Sequence[int], *, wait: bool = True, restart_living: bool = False) -> None:
        """Drop the faults of these envs and revive them. Raise what this finds, and no earlier fault of another env."""
        news = self.recovery.news
        news.drop(env_ids)
        num_known = len(news.faults)
        self.revive(env_ids, wait=wait, restart_living=restart_living)
        if len(news.faults) > num_known:
            news.raise_errors(is_receiving=False)
        news.warn()

    def _report_losses(self, dead: Sequence[int], env_ids: Sequence[int]) -> list[int]:
        """Handle deaths that were not handled yet and in which other envs than these have lost their episodes.

        Return the workers whose deaths the policy reports as errors.
        """
        reported = []
        for worker in dead:
            states = self.workers.state.states()
            others = [env_id for env_id in self.workers.envs_of(worker) if env_id not in env_ids]
            is_new = self.workers.records[worker].state is not WorkerState.DEAD_REPORTED
            if is_new and any(states[env_id] in (EnvState.IDLE, EnvState.READY) for env_id in others):
                self.recovery.handle_dead_workers([worker])
                if self.workers.records[worker].state is WorkerState.DEAD_REPORTED:
                    reported.append(worker)
        return reported

    def _fail_and_restart(self, worker: int, env_ids: Sequence[int]) -> None:
        """Fail the commands of a worker's envs, and restart it.

        The call that waits for envs outside `env_ids` raises their faults later. No env continues before a reset.
        """
        workers, replays = self.workers, self.recovery.replays
        with defer_signals():
            workers.check_restartable(worker)
            marks = [
                ResolveFault(each.env_id, each.ticket, Remedy.RAISE, {})
                for each in workers.state.drain(acknowledge=False)
                if isinstance(each, EnvFailed) and each.worker == worker and each.env_id in env_ids
            ]
            if replays.is_on:
                replays.restart_log(worker)
            restart = BeginRestart(worker, workers.records[worker].generation, Remedy.RAISE, {})
            workers.plan_restart(restart, is_retried=False)
            self.recovery.carry_out([*marks, restart])

    def _wait_restart(self, worker: int) -> bool:
        """Wait until a worker is no longer being restarted. Return False, and store the error, if it could not be started."""
        self.waits.run_until(lambda: self.workers.records[worker].state is not WorkerState.RESTARTING)
        return not self.recovery.report_failed_restart(worker)

    # ---- before a call ------------------------------------------------------------------------------------------------

    def wait_until_rebuilt(self, workers: Iterable[int], timeout_s: float | None) -> None:
        """Wait until replays have rebuilt the envs of these workers, and until those that are recycled serve again.

        Raises:
            EnvTimeout: the envs were not rebuilt within `timeout_s`.
        """
        if not (self.recovery.replays.is_on or self._recycles):
            return
        owners = sorted(set(workers))
        if not self.waits.run_until(lambda: all(map(self._is_rebuilt, owners)), timeout_s):
            late = [worker for worker in owners if not self._is_rebuilt(worker)]
            raise EnvTimeout(
                f"the envs of workers {late} were not rebuilt within {timeout_s:g} s, so the call was not sent to them; try again",
                phase="call",
                timeout_s=timeout_s or 0.0,
            )

    def _is_rebuilt(self, worker: int) -> bool:
        """Return whether calls can be sent to a worker, or there is an error to raise. Handle a death that this finds."""
        recovery, workers = self.recovery, self.workers
        is_replayed = recovery.remedy is Remedy.KEEP
        if is_replayed and workers.check_process(worker).state is WorkerState.DEAD_UNREPORTED:
            recovery.handle_dead_workers([worker], events_first=True)
        is_awaited = is_replayed or workers.records[worker].is_recycling
        is_restarting = is_awaited and workers.records[worker].state is WorkerState.RESTARTING
        is_suspended = any(view.is_suspended for view in workers.views_of(worker))
        return bool(recovery.news.faults) or not (is_restarting or is_suspended)
