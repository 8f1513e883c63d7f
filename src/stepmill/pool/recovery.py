"""Handles faults: drains the events of the core, lets policies decide, and carries out the decisions and their effects.

    a wait ends with FAULT or EVENT ─► handle: drain ─► finished restarts, paused replays, failed envs, dead workers
                                                     ─► decisions of policies ─► apply ─► restarts, calls, errors, warnings

Each `handle` calls `drain` and `apply` once. Between the two, only counts, errors and records of workers change.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from stepmill.backends.base import Backend
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
    ResolveFault,
)
from stepmill.pool.fault_policies import REMEDIES, RETRYABLE, EnvErrorLimits, ResetAttempts, decide_death
from stepmill.pool.faults import fault_error, fault_info, kind_name, late_error
from stepmill.pool.replays import Replays
from stepmill.pool.workers import WorkerRecord, WorkerState, WorkerSupervisor
from stepmill.spec.errors import (
    ClosedPoolError,
    EnvTimeout,
    StepmillError,
    WorkerDied,
    add_clause,
    join_errors,
    name_envs,
    worker_died_error,
)
from stepmill.spec.notices import warn
from stepmill.spec.options import AutoresetMode, OnFault, PoolOptions
from stepmill.spec.received import EnvFault, faults_by_env
from stepmill.worker.messages import WorkerPlan
from stepmill.worker.signals import defer_signals

logger = logging.getLogger("stepmill")

# The worker no longer serves its envs. NEIGHBOUR: the worker was lost because of another of its envs.
WORKER_LOST = (FaultKind.DIED, FaultKind.TIMED_OUT, FaultKind.NEIGHBOUR)


class News:
    """Faults and warnings that the program has not had yet. They stay here until a call has raised, returned or issued them.

    An interrupt between a fault and its error therefore loses nothing. Others append to `faults` and `notices`, and change nothing else.

    Attributes:
        faults: the next call that can raises or returns these.
        raised: by env, faults that a call other than `recv` and `receive` has raised. `receive` returns them, too.
        notices: warnings that the same call issues.
    """

    def __init__(self) -> None:
        self.faults: list[EnvFault] = []
        self.raised: dict[int, EnvFault] = {}
        self.notices: list[str] = []

    def by_env(self) -> Mapping[int, EnvFault]:
        """Return the faults that `receive` must return, by env."""
        return faults_by_env(self.raised, self.faults) if self.faults or self.raised else {}

    def lost_envs(self) -> set[int]:
        """Return the envs that get no command before their fault is received or dropped."""
        return {env_id for fault in self.faults for env_id in fault.env_ids}

    def add_raised(self, faults: Sequence[EnvFault]) -> None:
        self.raised = faults_by_env(self.raised, faults)

    def forget_raised(self, env_ids: Collection[int]) -> None:
        self.raised = {env_id: fault for env_id, fault in self.raised.items() if env_id not in env_ids}

    def drop(self, env_ids: Collection[int]) -> None:
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

    def set_faults(self, faults: list[EnvFault], raised: dict[int, EnvFault]) -> None:
        """Replace all faults: by none when `receive` returns them, and by what they were if its result does not reach the caller."""
        self.faults, self.raised = faults, raised

    def warn(self) -> None:
        """Issue the warnings."""
        while self.notices:
            warn(self.notices.pop(0))

    def raise_errors(self, *, is_receiving: bool = True) -> None:
        """Issue the warnings, and raise the errors of `faults` as one error.

        Args:
            is_receiving: False lets the next `receive` return the faults, too.
        Raises:
            EnvError, BadOutput, EnvTimeout, WorkerDied: faults that the policies did not handle.
        """
        self.warn()
        if self.faults:
            error = join_errors([fault.error for fault in self.faults])
            if not is_receiving:
                self.add_raised(self.faults)
            self.faults = []  # no signal handler runs between this line and the next
            raise error


class Recovery:
    """Handles the faults of a pool's envs and workers, and stores in `news` what the program must know. Only the pool's thread uses it.

    No method waits.
    """

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.workers = WorkerSupervisor(plans, backend, options)
        self.crash_reporter = CrashReporter(self.workers, backend, options)
        self.news = News()
        self.remedy = REMEDIES[options.on_fault]  # for deaths
        self._env_remedy = REMEDIES[OnFault(options.restarts.on_raise or options.on_fault)]
        self._limits = {"step": options.step_timeout_s, "reset": options.reset_timeout_s}
        self._env_errors = EnvErrorLimits(options)
        self._attempts = ResetAttempts(options)
        self._num_absorbed: Counter[int] = Counter()
        self._repeats_resets = options.autoreset_mode is AutoresetMode.SAME_STEP
        self.replays = Replays(
            self.workers, backend, options, on_reset_repeated=self._record_retry, warn=self.news.notices.append
        )

    # ---- events to decisions ------------------------------------------------------------------------------------------

    def handle(self, *, has_faults: bool = True) -> None:
        """Handle all events without waiting. Store those for the user in `news`.

        `has_faults=False` leaves faults of pending commands to a later call.
        """
        events = self.workers.state.drain(acknowledge=True)  # the next wait finds the events that occur from here on
        decisions = self._finish_restarts()
        if events:
            deaths = self.workers.record_deaths(events)
            decisions += self._advance_replays(events, deaths)
            if has_faults:
                decisions += self._decide_faults([event for event in events if isinstance(event, EnvFailed)], deaths)
        self.replays.check_calls()
        self.carry_out(decisions)

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Apply decisions, and carry out their effects."""
        if decisions:
            self.workers.state.apply(decisions)
        for decision in decisions:
            if isinstance(decision, (BeginRestart, FailWorker)) and self.replays.is_on:
                self.replays.drop(decision.worker)
            if isinstance(decision, BeginRestart):
                self.workers.start_restart(decision.worker)
        while self.replays.after_apply:
            self.replays.after_apply.pop(0)()

    def _finish_restarts(self) -> list[Decision]:
        """Let restarted workers serve, and begin the replays of their envs. Repeat the calls of envs without an episode."""
        built, decisions = self.workers.finish_restarts()  # a restart that ends later wakes the next wait
        for record in built:
            for view in self.workers.views_of(record.plan.worker):
                if view.is_suspended:
                    error = record.error or self.workers.worker_died_error(self.workers.death_of(view.worker))
                    decisions += self.replays.begin(view, self._lost_info(error, view.env_id), is_new=True)
                elif record.remedy is Remedy.KEEP:
                    self.replays.repeat_waiting(view)
        return decisions

    def _advance_replays(self, events: Sequence[Event], deaths: Mapping[int, Death]) -> list[Decision]:
        decisions = self._follow(self.replays.advance(events))
        lost = {self.workers.worker_of(event.env_id) for event in events if isinstance(event, ReplayFailed)}
        for worker in sorted(lost):
            if self.workers.records[worker].state is WorkerState.DEAD_UNREPORTED:
                decisions += self._decide_death(worker, (), deaths.get(worker))
        return decisions

    def _decide_faults(self, faults: Sequence[EnvFailed], deaths: Mapping[int, Death]) -> list[Decision]:
        decisions: list[Decision] = []
        handled: set[int] = set()  # envs whose faults a decision about another fault includes
        if self._attempts.is_in_new_process:
            for worker in sorted({fault.worker for fault in faults}):
                own = [fault for fault in faults if fault.worker == worker]
                decisions += self._retry_resets(worker, own, handled)
        for fault in faults:
            if fault.kind not in WORKER_LOST and fault.env_id not in handled:
                decisions += self._decide_env_error(fault, handled)
        lost = [fault for fault in faults if fault.kind in WORKER_LOST and fault.env_id not in handled]
        for worker in sorted({fault.worker for fault in lost}):
            own = [fault for fault in lost if fault.worker == worker]
            decisions += self._decide_death(worker, own, deaths.get(worker))
        return decisions

    def _decide_env_error(self, fault: EnvFailed, handled: set[int]) -> list[Decision]:
        error = self.crash_reporter.report_fault(fault_error(fault), fault.env_id, fault.kind)
        remedy = self._env_remedy
        if self._attempts.is_last(fault, error):
            remedy, error = Remedy.RAISE, self._attempts.add_count(error)
        elif remedy is not Remedy.RAISE and (
            fault.kind is FaultKind.INTERRUPTED or not self._env_errors.allow(fault.env_id, error)
        ):
            remedy = Remedy.RAISE
        record, needs_new_object = self.workers.records[fault.worker], False
        if remedy is Remedy.KEEP:
            view = self.workers.view_of(fault.env_id)
            self.replays.record_failure(view, error)
            needs_new_object = record.state is not WorkerState.RESTARTING and self.replays.needs_new_object(view)
        info = fault_info("timed_out" if isinstance(error, EnvTimeout) else "raised", error)
        decision: Decision = ResolveFault(fault.env_id, fault.ticket, remedy, info)
        if needs_new_object:
            decision = BeginRestart(fault.worker, record.generation, remedy, info)
        self._add_fault(remedy, kind_name(fault.kind), error, fault.worker, [fault.env_id])
        return self._follow([decision], error, info, handled=handled)

    def _decide_death(self, worker: int, faults: Sequence[EnvFailed], death: Death | None) -> list[Decision]:
        """Decide about the death of a worker, or about commands that were lost in an earlier death.

        Args:
            worker: the number of the worker.
            faults: the lost commands to decide about. A later round decides about the others.
            death: the event, if `drain` has just returned one.
        """
        record = self.workers.records[worker]
        state, delay_s = record.state, 0.0
        death = death or self.workers.death_of(worker)
        if state is WorkerState.DEAD_UNREPORTED:
            remedy, error, delay_s = self._judge_new_death(record, death, faults)
        else:
            remedy, error = self._judge_known_death(record, death, faults)
        decisions = decide_death(replace(death, faults=faults), state, remedy, error)
        return self._follow(decisions, error, delay_s=delay_s, is_new_object=True)

    def _judge_known_death(
        self, record: WorkerRecord, death: Death, faults: Sequence[EnvFailed]
    ) -> tuple[Remedy, StepmillError]:
        """Return what happens to commands that were lost in a death that was handled before, and store its error again."""
        worker, remedy, error = death.worker, self.remedy, record.error
        lost = [fault.env_id for fault in faults] or death.env_ids
        is_dead = record.state is WorkerState.DEAD_REPORTED  # perhaps by a call, which does not change the envs
        if is_dead:
            remedy = Remedy.RAISE
            if isinstance(error, WorkerDied) and not {*lost} <= {*error.env_ids}:
                error = None  # its servers have become those of other envs
        elif remedy is Remedy.RAISE and record.remedy is Remedy.CUT:
            remedy = Remedy.CUT  # it is restarted to repeat a reset
        if error is None:
            error = self._death_error(death, faults)
            if is_dead and self.remedy is not Remedy.RAISE:
                error = self._over_limit(error, worker)
        self._add_death(remedy, error, worker, lost, is_logged=False)
        return remedy, error

    def _judge_new_death(
        self, record: WorkerRecord, death: Death, faults: Sequence[EnvFailed]
    ) -> tuple[Remedy, StepmillError, float]:
        """Return what happens to the envs of a worker that has just died, and the delay before a restart. Store the error."""
        worker, remedy, delay_s = death.worker, self.remedy, None
        error = record.error or self._death_error(death, faults)
        suspects = [*death.running, *[fault.env_id for fault in faults], *death.env_ids]
        error = self.crash_reporter.report_death(error, worker, suspects)
        if remedy is not Remedy.RAISE:
            delay_s = self.workers.count_restart(worker, error)
            if delay_s is None:
                error, remedy = self._over_limit(error, worker), Remedy.RAISE
            elif remedy is Remedy.KEEP:
                self._record_failure_of_running_env(death, error)
        self._add_death(remedy, error, worker, death.env_ids)
        if remedy is Remedy.RAISE:
            self.workers.mark_reported(worker, error)
        return remedy, error, delay_s or 0.0

    def _record_failure_of_running_env(self, death: Death, error: StepmillError) -> None:
        """Count the failure of the env that a worker was running when it died, if there is exactly one such env."""
        running = error.running_env_id if isinstance(error, WorkerDied) else None
        if isinstance(error, EnvTimeout) and error.env_id in death.running:
            running = error.env_id  # not if the worker was stopped, and took no command
        if running is not None and isinstance(error, (EnvTimeout, WorkerDied)):
            self.replays.record_failure(self.workers.view_of(running), error)

    def _retry_resets(self, worker: int, faults: Sequence[EnvFailed], handled: set[int]) -> list[Decision]:
        """Restart a worker in which resets failed, and repeat the resets. Its other envs are treated as after a death."""
        record = self.workers.records[worker]
        if record.state is WorkerState.RESTARTING:
            return []
        retried, decisions = [], list[Decision]()
        for fault in faults:
            if fault.kind not in RETRYABLE or not fault.begins_episode:
                continue
            handled.add(fault.env_id)
            if self._attempts.count(fault):
                retried.append(fault)
                continue
            error = self.crash_reporter.report_fault(self._error_of(fault), fault.env_id, fault.kind)
            decisions.append(ResolveFault(fault.env_id, fault.ticket, Remedy.RAISE, {}))
            error = self._attempts.add_count(error)
            self._add_fault(Remedy.RAISE, kind_name(fault.kind), error, worker, [fault.env_id])
        if not retried:
            return decisions
        self.replays.after_apply += [partial(self._record_retry, fault.env_id) for fault in retried]
        error = self._error_of(retried[0])
        remedy = Remedy.CUT if self.remedy is Remedy.RAISE else self.remedy
        death = Death(worker, record.generation, (), (), retried)
        restart = decide_death(death, WorkerState.DEAD_UNREPORTED, remedy, error)
        return decisions + self._follow(restart, error, {}, self._attempts.wait_s, handled=handled)

    def _record_retry(self, env_id: int) -> None:
        self._attempts.record_retry(self.workers.view_of(env_id))

    def _follow(
        self,
        decisions: list[Decision],
        error: StepmillError | None = None,
        info: Mapping[str, str] | None = None,
        delay_s: float = 0.0,
        *,
        handled: set[int] | None = None,
        is_new_object: bool = False,
    ) -> list[Decision]:
        """Plan the restarts among decisions, and begin the replays of envs that are kept.

        Args:
            decisions: the decisions to follow.
            error: the error that they are about. None if they are about workers that live.
            info: the `info["fault"]` of a replay that fails. None if `error` is the end of the env's worker.
            delay_s: how many seconds restarts wait.
            handled: a set to which the envs are added whose episodes are replayed after a restart.
            is_new_object: whether the objects of envs that are kept were rebuilt.
        Returns:
            The decisions, and those that begin replays.
        """
        for decision in tuple(decisions):
            if isinstance(decision, BeginRestart):
                worker, before = decision.worker, None
                if decision.remedy is Remedy.KEEP:
                    before = self.replays.wait_for_calls(worker)
                    (set() if handled is None else handled).update(self.workers.envs_of(worker))
                cause = error or self.workers.worker_died_error(self.workers.death_of(worker))
                self.workers.plan_restart(decision, cause, delay_s, before=before)
            elif isinstance(decision, ResolveFault) and decision.remedy is Remedy.KEEP:
                view = self.workers.view_of(decision.env_id)
                if self.workers.records[view.worker].state is not WorkerState.RESTARTING:  # else it follows the restart
                    known = info or (self._lost_info(error, view.env_id) if error else {})
                    decisions += self.replays.begin(view, known, is_new=is_new_object)
        return decisions

    # ---- errors -------------------------------------------------------------------------------------------------------

    def _add_fault(
        self,
        remedy: Remedy,
        kind: str,
        error: StepmillError,
        worker: int,
        env_ids: Sequence[int],
        *,
        is_logged: bool = True,
    ) -> None:
        """Store the error of a fault if the remedy is to raise it. If not, log it."""
        if remedy is Remedy.RAISE:
            self.news.faults.append(EnvFault(kind, error, worker, tuple(env_ids)))
        elif is_logged:
            self._num_absorbed.update(env_ids)
            counts = ", ".join([f"env {env_id}: {self._num_absorbed[env_id]}" for env_id in env_ids])
            logger.warning("handled by the fault policy, not raised (faults so far: %s): %s", counts, error.message)

    def _add_death(
        self, remedy: Remedy, error: StepmillError, worker: int, env_ids: Sequence[int], *, is_logged: bool = True
    ) -> None:
        """Store or log the error of a worker's end, which names all its envs, also if only one of them could not be rebuilt."""
        if not {*env_ids} <= {*getattr(error, "env_ids", ())}:
            error = join_errors([error, self.workers.worker_died_error(self.workers.death_of(worker))])
        kind = "timed_out" if isinstance(error, EnvTimeout) else "died"
        self._add_fault(remedy, kind, error, worker, env_ids, is_logged=is_logged)

    def _over_limit(self, error: StepmillError, worker: int) -> StepmillError:
        error.message = error.message.replace(f"; {self.workers.death_hint}", "")
        return add_clause(
            error,
            f"the limit of restarts of worker {worker} is reached (restarts.max_restarts), so it is not "
            "restarted automatically; call reset() or revive()",
        )

    def _lost_info(self, error: StepmillError, env_id: int | None) -> dict[str, str]:
        """Return the `info["fault"]` of an env whose worker ended, in case its episode cannot be replayed."""
        kind = "died"
        if isinstance(error, EnvTimeout):
            kind = "timed_out" if error.env_id == env_id else "neighbour"
        info = fault_info(kind, error)
        return {**info, "message": info["message"].replace(f"; {self.workers.death_hint}", "")}

    def _death_error(self, death: Death, faults: Sequence[EnvFailed]) -> StepmillError:
        """Return the error of a death with these faults, or with all of the worker if a call other than a wait found it."""
        late = next((fault for fault in faults or death.faults if fault.kind is FaultKind.TIMED_OUT), None)
        if late is None:
            return self.workers.worker_died_error(death)
        phase = "reset" if late.was_resetting else "step"
        return late_error(late.env_id, death.env_ids, phase, self._limits[phase], self.workers.death_hint)

    def _error_of(self, fault: EnvFailed) -> StepmillError:
        if fault.kind in WORKER_LOST:
            return self._death_error(self.workers.death_of(fault.worker), [fault])
        return fault_error(fault)

    # ---- called by other methods ----------------------------------------------------------------------------------------

    def handle_dead_workers(self, workers: Sequence[int], *, events_first: bool = False) -> None:
        """Handle dead workers, also if they had no commands, and workers that `send` has found due to be recycled.

        With `events_first`, this first handles all events, which may include these deaths.
        """
        records = self.workers.records
        with defer_signals():
            reported = {worker for worker in workers if records[worker].state is WorkerState.DEAD_REPORTED}  # by a call
            if events_first or self._attempts.is_in_new_process:
                self.handle()  # resets that were lost with these workers are repeated, and restart them
            deaths = self.workers.record_deaths()
            for worker in workers:
                state = records[worker].state
                if state is WorkerState.SERVING:
                    self._recycle(worker)
                elif state is WorkerState.DEAD_UNREPORTED or worker in reported:
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
            if self.remedy is Remedy.RAISE and workers.records[error.worker].generation == generation:
                record = workers.check_process(error.worker)
                if record.state is WorkerState.DEAD_UNREPORTED and record.error is None:
                    fault = EnvFault("died", error, error.worker, tuple(error.env_ids))
                    self.news.add_raised([fault])
                    workers.mark_reported(error.worker, error)

    def is_known_loss(self, fault: EnvFailed) -> bool:
        """Return whether a call has already raised the death in which a command was lost, without knowing the command."""
        return fault.kind in WORKER_LOST and self.workers.records[fault.worker].state is WorkerState.DEAD_REPORTED

    def report_failed_restart(self, worker: int) -> bool:
        """Return whether a worker could not be restarted. If so, make its envs FAULTED, and store the error in `news`."""
        record = self.workers.records[worker]
        if record.state is not WorkerState.DEAD_UNREPORTED or record.error is None:
            return False
        with defer_signals():
            error = self.crash_reporter.report_start_failure(record.error).with_traceback(None)
            self._add_death(Remedy.RAISE, error, worker, self.workers.envs_of(worker))
            self.workers.mark_reported(worker, error)
            self.carry_out([FailWorker(worker, record.generation)])
        return True
