"""Passes each fault to a policy, and stores those that are not handled until they are raised or returned.

a wait ends with FAULT or EVENT ─► handle() ─► drain ─┬ finished restarts  ─► workers.finish_restarts ─► policy.on_restarted
                                                      ├ paused replays     ─► policy.on_event
                                                      └ faults, by worker  ─► policy.on_env_error, policy.on_worker_death
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from stepmill import _native
from stepmill.backends.base import Backend
from stepmill.pool.crash_reporter import CrashReporter
from stepmill.pool.events import (
    EnvFailed,
    Event,
    FailWorker,
    FaultKind,
    MarkFaulted,
    MarkNew,
    ReplayFailed,
    ReplayPaused,
    read_faults,
)
from stepmill.pool.faults import after_attempts, fault_error, kind_name, late_error
from stepmill.pool.policies.base import EnvErrorLimits, FaultPolicy, WorkerDeath
from stepmill.pool.policies.basic import RaisePolicy, TruncatePolicy
from stepmill.pool.policies.replay import ReplayPolicy
from stepmill.pool.policies.replayer import EpisodeReplayer
from stepmill.pool.workers import DEAD, WorkerState, WorkerSupervisor
from stepmill.spec.errors import EnvError, EnvTimeout, StepmillError, join_errors
from stepmill.spec.notices import warn
from stepmill.spec.options import EnvState, OnFault, PoolOptions, RetryIn
from stepmill.spec.received import EnvFault, faults_by_env
from stepmill.worker.messages import WorkerPlan
from stepmill.worker.signals import defer_signals

logger = logging.getLogger("stepmill")

# The worker does not serve its envs any more. NEIGHBOUR: it was lost through another of its envs.
WORKER_LOST = (FaultKind.DIED, FaultKind.TIMED_OUT, FaultKind.NEIGHBOUR)
RETRYABLE = (
    FaultKind.RAISED,
    FaultKind.DIED,
    FaultKind.TIMED_OUT,
)  # faults of a reset that may not recur in a new process


class FaultHandler:
    """Handles the faults of a pool's envs and workers. Used by the pool's thread.

    Faults and warnings for the user are stored in `faults` and `notices`, so that an interrupt between a fault and its
    error loses nothing. Only `before_call`, `restart_all`, `prepare_reset` and `revive` wait.
    """

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.workers = WorkerSupervisor(plans, backend, options)
        self.crash_reporter = CrashReporter(plans, backend, options)
        self.faults: list[EnvFault] = []  # raised or returned by the next call that can
        self.raised: dict[int, EnvFault] = {}  # by env: raised by calls that do not receive; for `receive`
        self.notices: list[str] = []  # warnings, issued by the same call
        self.replayer: EpisodeReplayer | None = None
        self._limits = {"step": options.step_timeout_s, "reset": options.reset_timeout_s}
        self._attempts = ResetAttempts(options)
        self._num_absorbed: Counter[int] = Counter()
        self._replay_policy: ReplayPolicy | None = None
        self._worker_death_policy = self._make_policies(plans, backend, options)

    def _make_policies(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> FaultPolicy:
        on_raise = options.on_fault if options.on_raise is None else options.on_raise
        limits = EnvErrorLimits(options)
        self._raise_policy = RaisePolicy(self.workers)
        policies: dict[OnFault, FaultPolicy] = {
            OnFault.RAISE: self._raise_policy,
            OnFault.TRUNCATE: TruncatePolicy(self.workers, limits),
        }
        if OnFault.REPLAY in (options.on_fault, on_raise):
            self.replayer = EpisodeReplayer(self.workers, plans, backend, options)
            self._replay_policy = policies[OnFault.REPLAY] = ReplayPolicy(
                self.workers,
                limits,
                self.replayer,
                restarts_workers=options.on_fault is OnFault.REPLAY,
                on_reset_repeated=lambda env_id: self._attempts.record_retry(env_id, self._state.ticket_of(env_id)),
                warn=self.notices.append,
            )
        self._env_error_policy = policies[on_raise]
        self.workers.policy = policies[options.on_fault]
        return policies[options.on_fault]

    @property
    def _state(self) -> _native.PoolState:
        return self.workers.state

    @property
    def call_log_bytes(self) -> int:
        """Size of the log of env calls that replays repeat."""
        return 0 if self.replayer is None else self.replayer.log.size_bytes

    # ---- called after a wait ------------------------------------------------------------------------------------------

    def handle(self) -> None:
        """Handle all faults and events; those for the user are appended to `faults`. Never waits."""
        events = self._state.drain(acknowledge=True)
        self._handle_events(events)
        # Faults that occur from here on are found by the next wait.
        faults = [event for event in events if isinstance(event, EnvFailed)]
        if self._attempts.is_in_new_process:
            for worker in sorted({fault.worker for fault in faults}):
                self._retry_resets(worker, [fault for fault in faults if fault.worker == worker])
        for fault in faults:
            if fault.kind not in WORKER_LOST and self._is_unhandled(fault):
                self._handle_env_error(fault)
        deaths = [fault for fault in faults if fault.kind in WORKER_LOST]
        for worker in sorted({fault.worker for fault in deaths}):
            unhandled = [fault for fault in deaths if fault.worker == worker and self._is_unhandled(fault)]
            if unhandled:
                self.handle_death(worker, unhandled)

    def handle_events(self) -> None:
        """Handle finished restarts and replays that have paused, but not faults of pending commands."""
        self._handle_events(self._state.drain(acknowledge=True))

    def _handle_events(self, events: Sequence[Event]) -> None:
        self.workers.record_deaths(events)
        for worker in self.workers.finish_restarts():  # a restart that finishes later wakes the next wait
            self._worker_death_policy.on_restarted(worker)
        if self._replay_policy is None:
            return
        paused = [event for event in events if isinstance(event, ReplayPaused)]
        for event in paused:
            self._replay_policy.on_event(event)
        self._replay_policy.check_calls()
        lost = {self._state.worker_of(event.env_id) for event in paused if isinstance(event, ReplayFailed)}
        for worker in sorted(lost):
            if self.workers.state_of(worker) is WorkerState.DEAD_UNREPORTED:
                self.handle_death(worker)

    def _is_unhandled(self, fault: EnvFailed) -> bool:
        """Whether a fault is not handled yet: the restart for another fault of its worker may have handled it."""
        state, env_id = self._state, fault.env_id
        is_same = state.is_pending(env_id) and state.ticket_of(env_id) == fault.ticket
        return is_same and env_id not in state.suspended_envs()

    def handle_death(self, worker: int, faults: Sequence[EnvFailed] = ()) -> None:
        """Handle the death of a worker, or commands that were lost in an earlier death."""
        state, record = self._state, self.workers.record_of(worker)
        is_new = record.state in (WorkerState.DEAD_UNREPORTED, WorkerState.FAILED)
        if record.state is WorkerState.FAILED and record.error is not None:
            error = record.error
        elif is_new or record.error is None:
            error = self._death_error(worker, faults)
        else:
            error = record.error
        if is_new:
            state.count_death(worker)
            error = self.crash_reporter.report_death(error, worker, [fault.env_id for fault in faults])
            self.workers.record_cause(worker, error)
        errors = self._worker_death_policy.on_worker_death(WorkerDeath(worker, faults, error, is_new))
        if is_new and self._replay_policy is not None:
            self._replay_policy.drop_replays_of(worker)
        lost = state.envs_of(worker) if is_new or not faults else [fault.env_id for fault in faults]
        self._add_fault(FaultKind.TIMED_OUT if isinstance(error, EnvTimeout) else FaultKind.DIED, errors, worker, lost)
        if is_new and not errors:
            self._log(lost, error)

    def _add_fault(
        self, kind: FaultKind | None, errors: Sequence[StepmillError], worker: int, env_ids: Sequence[int]
    ) -> None:
        """Store a fault that the policy did not handle; without errors it did."""
        if errors:
            self.faults.append(EnvFault(kind_name(kind), join_errors(errors), worker, tuple(env_ids)))

    def _handle_env_error(self, fault: EnvFailed) -> None:
        error = self.crash_reporter.report_fault(fault_error(fault), fault.env_id, fault.kind)
        if self._attempts.is_last(fault, error):
            self._state.apply([MarkFaulted(fault.env_id, fault.ticket)])
            self._add_fault(
                fault.kind, [after_attempts(error, self._attempts.max_attempts)], fault.worker, [fault.env_id]
            )
            return
        policy = self._raise_policy if fault.kind is FaultKind.INTERRUPTED else self._env_error_policy
        errors = policy.on_env_error(fault, error)
        self._add_fault(fault.kind, errors, fault.worker, [fault.env_id])
        if not errors:
            self._log([fault.env_id], error)

    def _log(self, env_ids: Sequence[int], error: StepmillError) -> None:
        self._num_absorbed.update(env_ids)
        counts = ", ".join(f"env {env_id}: {self._num_absorbed[env_id]}" for env_id in env_ids)
        logger.warning("handled by the fault policy, not raised (faults so far: %s): %s", counts, error.message)

    def _death_error(self, worker: int, faults: Sequence[EnvFailed]) -> StepmillError:
        late = next((fault for fault in faults if fault.kind is FaultKind.TIMED_OUT), None)
        if late is None:
            return self.workers.worker_died_error(worker)
        phase = "reset" if late.was_resetting else "step"
        return late_error(late.env_id, self._state.envs_of(worker), phase, self._limits[phase])

    def _retry_resets(self, worker: int, faults: Sequence[EnvFailed]) -> None:
        """Restart a worker in which resets failed, and repeat them. Its other envs are treated as if the worker had died."""
        if self.workers.state_of(worker) is WorkerState.RESTARTING:
            return
        failed = [
            fault for fault in faults if fault.kind in RETRYABLE and fault.begins_episode and self._is_unhandled(fault)
        ]
        retried = []
        for fault in failed:
            if self._attempts.count(fault.env_id, fault.ticket):
                retried.append(fault)
                continue
            error = self.crash_reporter.report_fault(self._error_of(fault), fault.env_id, fault.kind)
            self._add_fault(fault.kind, [after_attempts(error, self._attempts.max_attempts)], worker, [fault.env_id])
            self._state.apply([MarkFaulted(fault.env_id, fault.ticket)])
        if not retried:
            return
        death = WorkerDeath(worker, retried, self._error_of(retried[0]), is_new=True)
        self.workers.record_cause(worker, death.error)
        self._worker_death_policy.restart_worker(death, self._attempts.wait_s)
        for fault in retried:
            self._attempts.record_retry(fault.env_id, self._state.ticket_of(fault.env_id))

    def _error_of(self, fault: EnvFailed) -> StepmillError:
        if fault.kind in WORKER_LOST:
            return self._death_error(fault.worker, [fault])
        return fault_error(fault)

    def warn(self) -> None:
        """Issue the warnings in `notices`."""
        while self.notices:
            warn(self.notices.pop(0))

    def raise_errors(self, *, is_receiving: bool = False) -> None:
        """Issue the warnings in `notices`, and raise the errors of `faults` as one error.

        Args:
            is_receiving: False lets the next `receive` return the faults, too.
        Raises:
            EnvError, BadOutput, EnvTimeout, WorkerDied: faults that the policies did not handle.
        """
        if self.notices:
            self.warn()
        if self.faults:
            error = join_errors([fault.error for fault in self.faults])
            if not is_receiving:
                self.raised = faults_by_env(self.raised, self.faults)
            self.faults = []  # no signal handler runs between this line and the next
            raise error

    # ---- called by other methods -------------------------------------------------------------------------------------

    def handle_dead_workers(self, workers: Iterable[int]) -> None:
        """Handle workers that `send` found dead. Nothing was sent."""
        self.workers.record_deaths()
        for worker in workers:
            self.handle_death(worker)

    def before_call(self, workers: Iterable[int], timeout_s: float | None) -> None:
        """Wait until replays have rebuilt the envs of these workers.

        Raises:
            EnvTimeout: the envs were not rebuilt within `timeout_s`.
        """
        policy = self._replay_policy
        if policy is None:
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for worker in sorted(set(workers)):
            while not policy.is_ready_for_call(worker) and not self.faults:
                self._wait_for_rebuild(worker, deadline, timeout_s)

    def _wait_for_rebuild(self, worker: int, deadline: float | None, timeout_s: float | None) -> None:
        """Handle the death of a worker, or wait for the next event of its restart or replay."""
        if self.workers.state_of(worker) is WorkerState.DEAD_UNREPORTED:
            with defer_signals():
                self.handle()
                if self.workers.state_of(worker) is WorkerState.DEAD_UNREPORTED:
                    self.handle_death(worker)
            return
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._wait_event(left_s)
        if deadline is not None and time.monotonic() >= deadline:
            raise EnvTimeout(
                f"the envs of worker {worker} were not rebuilt within {timeout_s:g} s, so the call was not sent to them; try again",
                phase="call",
                timeout_s=timeout_s or 0.0,
            )

    def _wait_event(self, timeout_s: float | None) -> None:
        self._state.wait_event(timeout_s)
        with defer_signals():
            self.handle_events()

    def restart_all(self) -> bool:
        """Restart every dead worker, those of spares included, and wait. Return whether any was restarted.

        Raises:
            WorkerDied: the death of a worker had not been reported yet.
            EnvError, EnvTimeout: a worker could not be started.
        """
        workers = self.workers
        before = workers.num_restarts
        for worker in range(workers.num_workers):
            if workers.check_process(worker).state in (WorkerState.DEAD_UNREPORTED, WorkerState.FAILED):
                with defer_signals():
                    self.handle_death(worker)
            self.raise_errors()
            if workers.state_of(worker) is WorkerState.DEAD_REPORTED:
                with defer_signals():
                    self._fail_and_restart(worker, self._state.envs_of(worker))
            self._wait_restart(worker)
        return workers.num_restarts > before

    def prepare_reset(self, env_ids: Sequence[int], *, wait: bool = True) -> None:
        """Before a reset of these envs, revive those that are FAULTED and those whose worker is known to be dead.

        A death that is found here and that has cost another env its episode is left to the fault policy. If the policy
        reports it, it is stored in `faults`, and nothing is revived.

        Raises:
            EnvError, EnvTimeout, WorkerDied: a worker could not be started.
        """
        state, workers = self._state, self.workers
        workers.record_deaths()
        states = state.states()
        reported = {
            env_id for env_id in env_ids if workers.state_of(state.worker_of(env_id)) is WorkerState.DEAD_REPORTED
        }
        lost = [env_id for env_id in env_ids if states[env_id] == EnvState.FAULTED or env_id in reported]
        exhausted = []
        # Other policies handle all envs of a worker that the reset itself finds dead.
        if self._worker_death_policy.reports_deaths:
            exhausted = [
                env_id
                for env_id in env_ids
                if states[env_id] == EnvState.EXHAUSTED
                and env_id not in reported
                and workers.state_of(state.worker_of(env_id)) in DEAD
            ]
        if lost or exhausted:
            self.revive([*lost, *exhausted], wait=wait, reset_ids=env_ids)
        if exhausted and not self.faults:
            self.notices.append(f"the worker of the exhausted envs {exhausted} has died; it is restarted")

    def revive(
        self,
        env_ids: Sequence[int],
        *,
        wait: bool = True,
        restart_living: bool = False,
        reset_ids: Sequence[int] | None = None,
    ) -> None:
        """Restart those workers of these envs that are dead, or all of them. All envs of restarted workers then need a reset.

        A death that is found here is handled as by `prepare_reset`, unless all envs of the worker are in `reset_ids`, which
        by default are `env_ids`, or the worker would be restarted even if it lived.

        Raises:
            EnvError, EnvTimeout, WorkerDied: the worker could not be started. Never raised if `wait` is False.
        """
        state = self._state
        owners = sorted({state.worker_of(env_id) for env_id in env_ids})
        # Each process is checked once: a worker that dies later is found by the next command for its envs.
        dead = [worker for worker in owners if self.workers.check_process(worker).state in DEAD]
        if not restart_living and self._report_losses(dead, env_ids if reset_ids is None else reset_ids):
            return
        for worker in owners:
            if self.workers.state_of(worker) is WorkerState.RESTARTING:
                if not wait:
                    continue
                self._wait_restart(worker)
            elif restart_living or worker in dead:
                with defer_signals():
                    self._fail_and_restart(worker, env_ids)
                if wait:
                    self._wait_restart(worker)
        states = state.states()
        state.apply([MarkNew(env_id) for env_id in env_ids if states[env_id] == EnvState.FAULTED])
        self.raised = {env_id: fault for env_id, fault in self.raised.items() if env_id not in env_ids}

    def _report_losses(self, dead: Sequence[int], env_ids: Sequence[int]) -> bool:
        """Handle deaths that were not handled yet, and that other envs than these have lost their episodes in.

        Return whether the policy reports one of them as an error.
        """
        num_faults = len(self.faults)
        for worker in dead:
            if self._lost_neighbours(worker, env_ids):
                with defer_signals():
                    self.handle_death(worker)
        return len(self.faults) > num_faults

    def _lost_neighbours(self, worker: int, env_ids: Sequence[int]) -> list[int]:
        """Return the other envs of a worker that have lost their episodes in a death that was not reported yet."""
        if self.workers.state_of(worker) not in (WorkerState.DEAD_UNREPORTED, WorkerState.FAILED):
            return []
        states = self._state.states()
        others = [env_id for env_id in self._state.envs_of(worker) if env_id not in env_ids]
        return [env_id for env_id in others if states[env_id] in (EnvState.IDLE, EnvState.READY)]

    def _fail_and_restart(self, worker: int, env_ids: Sequence[int]) -> None:
        """Fail the commands of a worker's envs, and restart it.

        Faults of envs that are not in `env_ids` are raised later, by the call that waits for them. No env goes on before a reset.
        """
        state = self._state
        self.workers.check_restartable(worker)
        faults = [fault for fault in read_faults(state) if fault.worker == worker and fault.env_id in env_ids]
        marks = [MarkFaulted(fault.env_id, fault.ticket) for fault in faults]
        if self._replay_policy is not None:
            self._replay_policy.drop_replays_of(worker)
        state.apply([*marks, FailWorker(worker, self.workers.record_of(worker).generation)])
        if self.replayer is not None:
            self.replayer.restart_log(worker)
        self.workers.begin_restart(worker, 0.0, is_retried=False)

    def _wait_restart(self, worker: int) -> None:
        while self.workers.state_of(worker) is WorkerState.RESTARTING:
            self._wait_event(None)
        record = self.workers.record_of(worker)
        if record.state is WorkerState.FAILED and record.error is not None:
            error = self.crash_reporter.report_start_failure(record.error).with_traceback(None)
            self._add_fault(FaultKind.DIED, [error], worker, self._state.envs_of(worker))
            self.workers.mark_reported(worker)
            self.raise_errors()


class ResetAttempts:
    """Counts attempts of failed resets. Depending on `reset_retry_in`, the worker repeats
    a reset in the same process, or the pool repeats it in a new one.
    """

    def __init__(self, options: PoolOptions) -> None:
        self.max_attempts = options.reset_retries + 1
        self.wait_s = options.reset_retry_wait_s
        self._retry_in = options.reset_retry_in
        self._attempts: dict[int, tuple[int, int]] = {}  # by env: ticket and number of the last attempt

    @property
    def is_in_new_process(self) -> bool:
        """Whether resets are repeated in new processes."""
        return self.max_attempts > 1 and self._retry_in is RetryIn.NEW

    def is_last(self, fault: EnvFailed, error: StepmillError) -> bool:
        """Whether this is the fault of the last attempt of a worker that repeats resets itself."""
        is_retried = self.max_attempts > 1 and self._retry_in is RetryIn.SAME
        return is_retried and fault.kind is FaultKind.RAISED and isinstance(error, EnvError) and error.phase == "reset"

    def count(self, env_id: int, ticket: int) -> bool:
        """Count a failed reset; return whether it may be repeated."""
        last, attempts = self._attempts.get(env_id, (ticket, 0))
        attempts = attempts + 1 if last == ticket else 1
        self._attempts[env_id] = (ticket, attempts)
        return attempts < self.max_attempts

    def record_retry(self, env_id: int, ticket: int) -> None:
        """Record the ticket of a command that repeats a reset."""
        if env_id in self._attempts:
            self._attempts[env_id] = (ticket, self._attempts[env_id][1])
