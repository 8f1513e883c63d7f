"""Handles faults: drains the events of the core, lets policies decide, and carries out the decisions and their effects.

    a wait ends with FAULT or EVENT ─► handle: drain ─► finished restarts, paused replays, failed envs, dead workers
                                                     ─► decisions of policies ─► apply ─► restarts, calls, errors, warnings

Each `handle` calls `drain` and `apply` once. Between the two, only counts, errors and records of workers change.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stepmill.backends.base import Backend, name_envs, worker_died_error
from stepmill.pool.crash_reporter import CrashReporter
from stepmill.pool.events import (
    BeginRestart,
    Death,
    Decision,
    EnvFailed,
    Event,
    FailWorker,
    FaultKind,
    Remedy,
    ReplayFailed,
    Settle,
)
from stepmill.pool.faults import fault_error, fault_info, kind_name, late_error
from stepmill.pool.limits import RETRYABLE, EnvErrorLimits, ResetAttempts
from stepmill.pool.policies import POLICIES, RAISE, FaultPolicy
from stepmill.pool.replays import Effect, Replays
from stepmill.pool.workers import WorkerRecord, WorkerState, WorkerSupervisor
from stepmill.spec.errors import ClosedPoolError, EnvTimeout, StepmillError, WorkerDied, add_clause, join_errors
from stepmill.spec.notices import warn
from stepmill.spec.options import AutoresetMode, OnFault, PoolOptions
from stepmill.spec.received import EnvFault, faults_by_env
from stepmill.worker.messages import WorkerPlan
from stepmill.worker.signals import defer_signals

logger = logging.getLogger("stepmill")

# The worker no longer serves its envs. NEIGHBOUR: the worker was lost because of another of its envs.
WORKER_LOST = (FaultKind.DIED, FaultKind.TIMED_OUT, FaultKind.NEIGHBOUR)


class Recovery:
    """Handles the faults of a pool's envs and workers. Only the pool's thread uses it.

    Faults and warnings for the user are stored in `faults` and `notices`, so that an interrupt between a fault and its
    error loses nothing. No method waits.
    """

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.workers = WorkerSupervisor(plans, backend, options)
        self.crash_reporter = CrashReporter(self.workers, backend, options)
        self.faults: list[EnvFault] = []  # the next call that can raises or returns these
        # By env: faults that a call other than `recv` and `receive` has raised. `receive` returns them, too.
        self.raised: dict[int, EnvFault] = {}
        self.notices: list[str] = []  # warnings that the same call issues
        self.policy = self.workers.policy  # for deaths
        self._env_policy = POLICIES[OnFault(options.restarts.on_raise or options.on_fault)]
        self._limits = {"step": options.step_timeout_s, "reset": options.reset_timeout_s}
        self._env_errors = EnvErrorLimits(options)
        self._attempts = ResetAttempts(options)
        self._num_absorbed: Counter[int] = Counter()
        self._repeats_resets = options.autoreset_mode is AutoresetMode.SAME_STEP
        self._after_apply: list[Effect] = []
        self.replays = Replays(
            self.workers,
            backend,
            options,
            after_apply=self._after_apply,
            on_reset_repeated=self._record_retry,
            warn=self.notices.append,
        )

    # ---- events to decisions ------------------------------------------------------------------------------------------

    def handle(self, *, has_faults: bool = True) -> None:
        """Handle all events without waiting. Append those for the user to `faults`.

        `has_faults=False` leaves faults of pending commands to a later call.
        """
        events = self.workers.state.drain(acknowledge=True)  # the next wait finds the events that occur from here on
        deaths = self.workers.record_deaths(events)
        decisions = [*self._finish_restarts(), *self._advance_replays(events, deaths)]
        if has_faults:
            decisions += self._decide_faults([event for event in events if isinstance(event, EnvFailed)], deaths)
        self.carry_out(decisions)

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions, and carry out their effects."""
        if decisions:
            self.workers.state.apply(decisions)
        for decision in decisions:
            if isinstance(decision, (BeginRestart, FailWorker)):
                self.replays.drop(decision.worker)
            if isinstance(decision, BeginRestart):
                self.workers.start_restart(decision.worker)
        while self._after_apply:
            self._after_apply.pop(0)()

    def _finish_restarts(self) -> list[Decision]:
        """Let restarted workers serve, and begin the replays of their envs, if there are any."""
        built, decisions = self.workers.finish_restarts()  # a restart that ends later wakes the next wait
        for record in built:
            worker = record.plan.worker
            views = self.workers.views_of(worker)
            if record.remedy is Remedy.KEEP:
                self.replays.repeat_waiting(views)
            decisions.append(self.workers.serve(record))
            error = record.error or self.workers.worker_died_error(self.workers.death_of(worker))
            for view in views:
                if view.is_suspended:
                    decisions += self.replays.begin(view, self._lost_info(error, view.env_id), is_new=True)
        return decisions

    def _advance_replays(self, events: Sequence[Event], deaths: Mapping[int, Death]) -> list[Decision]:
        decisions = self._follow(self.replays.advance(events))
        self.replays.check_calls()
        lost = {self.workers.worker_of(event.env_id) for event in events if isinstance(event, ReplayFailed)}
        for worker in sorted(lost):
            if self.workers.records[worker].state is WorkerState.DEAD_UNREPORTED:
                decisions += self._decide_death(worker, (), deaths.get(worker))
        return decisions

    def _decide_faults(self, faults: Sequence[EnvFailed], deaths: Mapping[int, Death]) -> list[Decision]:
        decisions: list[Decision] = []
        settled: set[int] = set()  # envs whose faults a decision about another fault includes
        if self._attempts.is_in_new_process:
            for worker in sorted({fault.worker for fault in faults}):
                own = [fault for fault in faults if fault.worker == worker]
                decisions += self._retry_resets(worker, own, settled)
        for fault in faults:
            if fault.kind not in WORKER_LOST and fault.env_id not in settled:
                decisions += self._decide_env_error(fault, settled)
        lost = [fault for fault in faults if fault.kind in WORKER_LOST and fault.env_id not in settled]
        for worker in sorted({fault.worker for fault in lost}):
            own = [fault for fault in lost if fault.worker == worker]
            decisions += self._decide_death(worker, own, deaths.get(worker))
        return decisions

    def _decide_env_error(self, fault: EnvFailed, settled: set[int]) -> list[Decision]:
        error = self.crash_reporter.report_fault(fault_error(fault), fault.env_id, fault.kind)
        policy = self._env_policy
        if self._attempts.is_last(fault, error):
            policy, error = RAISE, self._attempts.add_count(error)
        elif fault.kind is FaultKind.INTERRUPTED or not (policy.raises or self._env_errors.allow(fault.env_id, error)):
            policy = RAISE
        record, needs_new_object = self.workers.records[fault.worker], False
        if policy.replays:
            view = self.workers.view_of(fault.env_id)
            self.replays.record_failure(view, error)
            needs_new_object = record.state is not WorkerState.RESTARTING and self.replays.needs_new_object(view)
        info = fault_info("timed_out" if isinstance(error, EnvTimeout) else "raised", error)
        decisions = policy.env_failed(fault, record.generation, info, needs_new_object=needs_new_object)
        self._add_fault(policy, fault.kind, [error], fault.worker, [fault.env_id])
        return self._follow(decisions, error, info, settled=settled)

    def _decide_death(self, worker: int, faults: Sequence[EnvFailed], death: Death | None) -> list[Decision]:
        """Decide about the death of a worker, or about commands that were lost in an earlier death.

        Args:
            worker: the number of the worker.
            faults: the lost commands to decide about. A later round decides about the others.
            death: the event, if `drain` has just returned one.
        """
        record = self.workers.records[worker]
        death = death or self.workers.death_of(worker)
        if record.state is WorkerState.DEAD_UNREPORTED:
            return self._decide_new_death(record, death, faults)
        policy, error = self.policy, record.error
        lost = [fault.env_id for fault in faults] or death.env_ids
        is_dead = record.state is WorkerState.DEAD_REPORTED  # perhaps by a call, which does not change the envs
        if is_dead:
            policy = RAISE
            if isinstance(error, WorkerDied) and not {*lost} <= {*error.env_ids}:
                error = None  # its servers have become those of other envs
        elif policy.raises and record.remedy is Remedy.CUT:
            policy = POLICIES[OnFault.TRUNCATE]  # it is restarted to repeat a reset
        if error is None:
            error = self._death_error(death, faults)
            if is_dead and not self.policy.raises:
                error = self._over_limit(error, worker)
        self._add_death(policy, error, worker, lost, is_logged=False)
        decisions = policy.commands_lost(replace(death, faults=faults), error, is_dead=is_dead)
        return self._follow(decisions, error, is_new_object=True)

    def _decide_new_death(self, record: WorkerRecord, death: Death, faults: Sequence[EnvFailed]) -> list[Decision]:
        worker, policy, delay_s = death.worker, self.policy, 0.0
        error = record.error or self._death_error(death, faults)
        suspects = [*death.running, *(fault.env_id for fault in faults), *death.env_ids]
        error = self.crash_reporter.report_death(error, worker, suspects)
        if not policy.raises:
            delay = self.workers.count_restart(worker, error)
            if delay is None:
                error, policy = self._over_limit(error, worker), RAISE
            elif policy.replays:
                self._record_failure_of_running_env(death, error)
            delay_s = delay or 0.0
        self._add_death(policy, error, worker, death.env_ids)
        if policy.raises:
            self.workers.mark_reported(worker, error)
        decisions = policy.worker_died(replace(death, faults=faults), error)
        return self._follow(decisions, error, delay_s=delay_s, is_new_object=True)

    def _record_failure_of_running_env(self, death: Death, error: StepmillError) -> None:
        """Count the failure of the env that a worker was running when it died, if there is exactly one such env."""
        running = error.running_env_id if isinstance(error, WorkerDied) else None
        if isinstance(error, EnvTimeout) and error.env_id in death.running:
            running = error.env_id  # not if the worker was stopped, and took no command
        if running is not None and isinstance(error, (EnvTimeout, WorkerDied)):
            self.replays.record_failure(self.workers.view_of(running), error)

    def _retry_resets(self, worker: int, faults: Sequence[EnvFailed], settled: set[int]) -> list[Decision]:
        """Restart a worker in which resets failed, and repeat the resets. Its other envs are treated as after a death."""
        record = self.workers.records[worker]
        if record.state is WorkerState.RESTARTING:
            return []
        retried, decisions = [], list[Decision]()
        for fault in faults:
            if fault.kind not in RETRYABLE or not fault.begins_episode:
                continue
            settled.add(fault.env_id)
            if self._attempts.count(fault):
                retried.append(fault)
                continue
            error = self.crash_reporter.report_fault(self._error_of(fault), fault.env_id, fault.kind)
            decisions.append(Settle(fault.env_id, fault.ticket, Remedy.RAISE, {}))
            errors = [self._attempts.add_count(error)]
            self._add_fault(RAISE, fault.kind, errors, worker, [fault.env_id])
        if not retried:
            return decisions
        self._after_apply += [partial(self._record_retry, fault.env_id) for fault in retried]
        error = self._error_of(retried[0])
        restart = self.policy.restart(Death(worker, record.generation, (), (), retried), error)
        return decisions + self._follow(restart, error, {}, self._attempts.wait_s, settled=settled)

    def _record_retry(self, env_id: int) -> None:
        self._attempts.record_retry(self.workers.view_of(env_id))

    def _follow(
        self,
        decisions: list[Decision],
        error: StepmillError | None = None,
        info: Mapping[str, str] | None = None,
        delay_s: float = 0.0,
        *,
        settled: set[int] | None = None,
        is_new_object: bool = False,
    ) -> list[Decision]:
        """Plan the restarts among decisions, and begin the replays of envs that are kept.

        Args:
            decisions: the decisions to follow.
            error: the error that they are about. None if they are about workers that live.
            info: the `info["fault"]` of a replay that fails. None if `error` is the end of the env's worker.
            delay_s: how many seconds restarts wait.
            settled: a set to which the envs are added whose episodes are replayed after a restart.
            is_new_object: whether the objects of envs that are kept were rebuilt.
        Returns:
            The decisions, and those that begin replays.
        """
        for decision in tuple(decisions):
            if isinstance(decision, BeginRestart):
                worker, before = decision.worker, None
                if decision.remedy is Remedy.KEEP:
                    before = self.replays.wait_for_calls(worker)
                    (set() if settled is None else settled).update(self.workers.envs_of(worker))
                cause = error or self.workers.worker_died_error(self.workers.death_of(worker))
                self.workers.plan_restart(decision, cause, delay_s, before=before)
            elif isinstance(decision, Settle) and decision.remedy is Remedy.KEEP:
                view = self.workers.view_of(decision.env_id)
                if self.workers.records[view.worker].state is not WorkerState.RESTARTING:  # else it follows the restart
                    known = info or (self._lost_info(error, view.env_id) if error else {})
                    decisions += self.replays.begin(view, known, is_new=is_new_object)
        return decisions

    # ---- errors -------------------------------------------------------------------------------------------------------

    def _add_fault(
        self,
        policy: FaultPolicy,
        kind: FaultKind | None,
        errors: Sequence[StepmillError],
        worker: int,
        env_ids: Sequence[int],
        *,
        is_logged: bool = True,
    ) -> None:
        """Store the errors of a fault if the policy raises them. If not, log the first."""
        if policy.raises:
            self.faults.append(EnvFault(kind_name(kind), join_errors(errors), worker, tuple(env_ids)))
        elif is_logged:
            self._num_absorbed.update(env_ids)
            counts = ", ".join(f"env {env_id}: {self._num_absorbed[env_id]}" for env_id in env_ids)
            logger.warning("handled by the fault policy, not raised (faults so far: %s): %s", counts, errors[0].message)

    def _add_death(
        self, policy: FaultPolicy, error: StepmillError, worker: int, env_ids: Sequence[int], *, is_logged: bool = True
    ) -> None:
        """Do the same for the end of a worker. The errors name all envs, also if `error` is of the constructor of one."""
        errors = [error]
        if not {*env_ids} <= {*getattr(error, "env_ids", ())}:
            errors.append(self.workers.worker_died_error(self.workers.death_of(worker)))
        kind = FaultKind.TIMED_OUT if isinstance(error, EnvTimeout) else FaultKind.DIED
        self._add_fault(policy, kind, errors, worker, env_ids, is_logged=is_logged)

    def _over_limit(self, error: StepmillError, worker: int) -> StepmillError:
        error.message = error.message.replace(f"; {self.policy.death_hint}", "")
        return add_clause(
            error,
            f"the limit of restarts of worker {worker} is reached (restarts.max_restarts), so it is not "
            "restarted automatically; call reset() or revive()",
        )

    def _lost_info(self, error: StepmillError, env_id: int | None) -> dict[str, str]:
        """Return the `info["fault"]` of an env whose worker ended, in case its episode cannot be replayed."""
        kind = FaultKind.NEIGHBOUR if isinstance(error, EnvTimeout) else FaultKind.DIED
        if isinstance(error, EnvTimeout) and error.env_id == env_id:
            kind = FaultKind.TIMED_OUT
        info = fault_info(kind_name(kind), error)
        return {**info, "message": info["message"].replace(f"; {self.policy.death_hint}", "")}

    def _death_error(self, death: Death, faults: Sequence[EnvFailed]) -> StepmillError:
        """Return the error of a death with these faults, or with all of the worker if a call other than a wait found it."""
        late = next((fault for fault in faults or death.faults if fault.kind is FaultKind.TIMED_OUT), None)
        if late is None:
            return self.workers.worker_died_error(death)
        phase = "reset" if late.was_resetting else "step"
        return late_error(late.env_id, death.env_ids, phase, self._limits[phase], self.policy.death_hint)

    def _error_of(self, fault: EnvFailed) -> StepmillError:
        if fault.kind in WORKER_LOST:
            return self._death_error(self.workers.death_of(fault.worker), [fault])
        return fault_error(fault)

    def warn(self) -> None:
        """Issue the warnings in `notices`."""
        while self.notices:
            warn(self.notices.pop(0))

    def lost_envs(self) -> set[int]:
        """Return the envs that get no command before their fault is received or dropped."""
        return {env_id for fault in self.faults for env_id in fault.env_ids}

    def drop_faults(self, env_ids: Collection[int]) -> None:
        """Drop the faults of these envs that were not received yet, with a warning. The envs are reset or revived."""
        kept = []
        for fault in self.faults:
            left = tuple(env_id for env_id in fault.env_ids if env_id not in env_ids)
            if len(left) < len(fault.env_ids):
                self.notices.append(
                    f"{fault.error.message}; the fault is dropped by a reset, revive or restore of the env"
                )
            if left:
                kept.append(replace(fault, env_ids=left))
        self.faults = kept

    def raise_errors(self, *, is_receiving: bool = True) -> None:
        """Issue the warnings in `notices`, and raise the errors of `faults` as one error.

        Args:
            is_receiving: False lets the next `receive` return the faults, too.
        Raises:
            EnvError, BadOutput, EnvTimeout, WorkerDied: faults that the policies did not handle.
        """
        self.warn()
        if self.faults:
            error = join_errors([fault.error for fault in self.faults])
            if not is_receiving:
                self.raised = faults_by_env(self.raised, self.faults)
            self.faults = []  # no signal handler runs between this line and the next
            raise error

    # ---- called by other methods ----------------------------------------------------------------------------------------

    def handle_dead_workers(self, workers: Iterable[int]) -> None:
        """Handle dead workers, also if they had no commands, and workers that `send` has found due to be recycled."""
        with defer_signals():
            deaths = self.workers.record_deaths()
            for worker in workers:
                if self.workers.records[worker].state is WorkerState.SERVING:
                    self._recycle(worker)
                else:
                    self.carry_out(self._decide_death(worker, (), deaths.get(worker)))

    def _recycle(self, worker: int) -> None:
        """Restart a worker with no env in an episode. Under SAME_STEP, the resets that began episodes are replayed."""
        workers, replays = self.workers, self.replays
        remedy = Remedy.KEEP if self._repeats_resets else Remedy.CUT
        restart = BeginRestart(worker, workers.records[worker].generation, remedy, {}, is_recycling=True)
        if replays.is_on and not self._repeats_resets:
            replays.restart_log(worker)
        cause = worker_died_error(worker, workers.envs_of(worker), None, hint="", cause="was recycled")
        workers.plan_restart(restart, cause, before=workers.end_gently(worker))
        self.carry_out([restart])

    def report_death_in_call(self, error: WorkerDied, generation: int) -> None:
        """Add the envs of the dead worker to the error of a call that is about to raise it, and let `receive` return the fault.

        Only the error is changed if the policy does not raise deaths, or if the worker was restarted since `generation`, in which
        the call was sent to it.
        """
        workers = self.workers
        with suppress(ClosedPoolError):
            name_envs(error, workers.envs_of(error.worker))
            if self.policy.raises and workers.records[error.worker].generation == generation:
                record = workers.check_process(error.worker)
                if record.state is WorkerState.DEAD_UNREPORTED and record.error is None:
                    fault = EnvFault(kind_name(FaultKind.DIED), error, error.worker, tuple(error.env_ids))
                    self.raised = faults_by_env(self.raised, [fault])
                    workers.mark_reported(error.worker, error)

    def is_known_loss(self, fault: EnvFailed) -> bool:
        """Return whether a call has already raised the death in which a command was lost, without knowing the command."""
        return fault.kind in WORKER_LOST and self.workers.records[fault.worker].state is WorkerState.DEAD_REPORTED

    def is_failed_restart(self, worker: int) -> bool:
        """Return whether a worker could not be restarted. Its envs are then FAULTED, and the error is stored in `faults`."""
        record = self.workers.records[worker]
        if record.state is not WorkerState.DEAD_UNREPORTED or record.error is None:
            return False
        with defer_signals():
            error = self.crash_reporter.report_start_failure(record.error).with_traceback(None)
            self._add_death(RAISE, error, worker, self.workers.envs_of(worker))
            self.workers.mark_reported(worker, error)
            self.carry_out([FailWorker(worker, record.generation)])
        return True
