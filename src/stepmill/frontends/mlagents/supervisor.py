"""Sends commands to the engine's workers, and handles failures.

result "failed"  ─┬ stopped deliberately ─► STOPPED, left out; when all are, the env's exception is raised
                  ├ restartable, quota left ─► LEAVING (closes its env, ends) ─┐
                  └ else ─► BROKEN, the exception is raised                     ├► RESETTING, in a new process
process dead ─────┬ quota left ────────────────────────────────────────────────┘
                  └ else ─► BROKEN, UnityWorkerDied is raised
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from stepmill.frontends.mlagents import failures
from stepmill.frontends.mlagents.channels import with_methods
from stepmill.frontends.mlagents.manager import logger
from stepmill.frontends.mlagents.settings import ManagerOptions, RestartLimits
from stepmill.frontends.mlagents.steps import AllStepResult, EnvironmentStep
from stepmill.frontends.mlagents.unity_worker import end_players
from stepmill.frontends.mlagents.workers import EngineWorker, RestartQuota, WorkerState
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import EnvState
from stepmill.spec.received import EnvFault


class Supervisor:
    """Owns the states of the workers of one manager. Steps and resets run in its `with` block.

    Attributes:
        parameters: all env parameters, for envs that are rebuilt.
        quota: the quota of restarts.
        was_crash: whether a worker crashed and was restarted since the last `take_results`.
    """

    def __init__(
        self, pool: Pool, workers: Sequence[EngineWorker], limits: RestartLimits, options: ManagerOptions
    ) -> None:
        self.parameters: dict[str, Any] = {}
        self.quota = RestartQuota(limits, len(workers))
        self.was_crash = False
        self._pool = pool
        self._workers = workers
        self._options = options
        self._results: list[EnvironmentStep] = []
        self._failures: list[Exception] = []
        self._stop: Exception | None = None
        self._was_interrupted = False
        self._unsent: set[int] = set()  # workers to which a command could not be sent, until they are restarted

    # ---- after Ctrl-C -----------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Begin a step or a reset. If Ctrl-C ended the last one, correct the workers' states with those of the pool."""
        if self._was_interrupted:
            self._was_interrupted = False
            states = self._pool.states
            for worker in self._workers:
                self._correct(worker, states[worker.worker_id])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._was_interrupted = kind is not None and not issubclass(kind, Exception)

    def _correct(self, worker: EngineWorker, state: EnvState) -> None:
        """Correct a worker's state. Ctrl-C may have come between a command, or the receipt of a result, and its change."""
        is_pending = state in (EnvState.BUSY, EnvState.READY)
        if worker.waiting and state is EnvState.FAULTED:
            worker.is_gone = True  # its fault was received, but not processed
            self._crash(worker, failures.UnityCommunicationException("UnityEnvironment worker: recv failed."))
        elif worker.waiting and not is_pending:
            self._end_episodes(worker)  # its result was received, but not processed
            self.reset(worker)
        elif is_pending and worker.state is WorkerState.READY:
            worker.take_pending_updates()
            worker.move(WorkerState.STEPPING)
        elif is_pending and worker.state is WorkerState.NEW:
            worker.take_pending_updates()
            worker.move(WorkerState.RESETTING)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Mapping[str, Any]]) -> None:
        """Send actions by worker id. If a worker is found dead, the others still get their actions."""
        updates = {each: (self._workers[each].parameters, self._workers[each].calls) for each in actions}
        commands = [(action, *updates[each]) for each, action in actions.items()]
        self._unsent |= actions.keys() - set(self._pool.send(commands, list(actions)))
        for worker in [self._workers[worker_id] for worker_id in actions]:
            if worker.worker_id not in self._unsent:
                worker.take_pending_updates()
                worker.is_fresh = False
            worker.move(WorkerState.STEPPING)

    def reset(self, worker: EngineWorker) -> None:
        """Command a reset, unless the env was rebuilt and reset, and has not stepped since."""
        if worker.is_fresh and not worker.parameters and not worker.calls:
            return
        parameters, calls = worker.take_pending_updates()
        worker.live_agents.clear()
        worker.previous_all_action_info = {}
        worker.move(WorkerState.RESETTING)
        options = {"parameters": parameters, "calls": calls}
        if not self._pool.reset_async(env_ids=[worker.worker_id], options=options):
            self._unsent.add(worker.worker_id)

    def rebuild_env(self, worker: EngineWorker) -> None:
        """Rebuild a broken worker's env without using its quota, because the user has called reset()."""
        if worker.is_gone:
            self._restart(worker)
        else:
            self._end_process(worker)

    def _end_process(self, worker: EngineWorker) -> None:
        """Command the worker to close its env and to end its process."""
        worker.move(WorkerState.LEAVING)
        self._pool.reset_async(env_ids=[worker.worker_id], options={"leave": self._options.leave_timeout_s})

    def _restart(self, worker: EngineWorker) -> None:
        """Start a process in place of a dead one, without waiting for it. Its first command is a reset."""
        worker.move(WorkerState.RESETTING)
        worker.is_gone = False
        worker.is_fresh = True
        self._unsent.discard(worker.worker_id)
        worker.parameters = dict(self.parameters)
        _, calls = worker.take_pending_updates()
        worker.previous_all_action_info = {}
        self._pool.revive([worker.worker_id], wait=False)
        options = {"parameters": dict(self.parameters), "calls": calls}
        self._pool.reset_async(env_ids=[worker.worker_id], options=options)

    # ---- results ----------------------------------------------------------------------------------------------------

    @property
    def has_results(self) -> bool:
        """Whether `take_results` would return a result."""
        return bool(self._results)

    def take_results(self) -> list[EnvironmentStep]:
        """Return and clear the results that were received, in the order in which they came."""
        results, self._results = self._results, []
        self.was_crash = False
        return results

    def on_step(self, worker: EngineWorker, results: AllStepResult, stats: Mapping[str, Any]) -> None:
        """Store the result of a step or a reset."""
        worker.move(WorkerState.READY)
        worker.has_answered = True
        worker.live_agents.update(results)
        infos = worker.previous_all_action_info
        worker.previous_step = EnvironmentStep(results, worker.worker_id, infos, with_methods(stats))
        self._results.append(worker.previous_step)

    def on_failure(self, worker: EngineWorker, failure: failures.Failure) -> None:
        """Handle an exception that an env raised."""
        exception = failures.rebuild(failure, worker.worker_id)
        if failures.is_interrupt(failure):
            exception, cause = failures.closed(), exception
            exception.__cause__ = cause
        if failures.is_stop(failure):
            self._on_stop(worker, exception)
        elif failures.is_restartable(failure) and self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._end_process(worker)
        else:
            worker.move(WorkerState.BROKEN)
            self._failures.append(exception)

    def on_fault(self, worker: EngineWorker, fault: EnvFault) -> None:
        """Handle a death, a deadline that is over, or a malformed result."""
        error: Exception = fault.error
        verb = "send" if worker.worker_id in self._unsent else "recv"
        worker.is_gone = fault.is_loss
        if worker.state is WorkerState.LEAVING and worker.is_gone:
            self._end_players(worker)
            self._restart(worker)
        elif isinstance(error, WorkerDied):
            self._crash(worker, failures.died(error, verb))
        else:
            self._crash(worker, failures.timed_out(error) if isinstance(error, EnvTimeout) else error)

    def _crash(self, worker: EngineWorker, exception: Exception) -> None:
        """Handle a worker whose process has ended, or whose result is malformed."""
        if worker.is_gone:
            self._end_players(worker)
        if worker.is_gone and self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._restart(worker)
        else:
            worker.move(WorkerState.BROKEN)
            self._failures.append(exception)

    def _end_players(self, worker: EngineWorker) -> None:
        """Kill the processes that a dead worker's env has started, because a hung player does not notice the death."""
        end_players(worker.players)
        worker.players = []

    def _may_restart(self, worker: EngineWorker, exception: Exception) -> bool:
        if not worker.has_answered:
            return False  # an env that has never worked needs the user, and not a restart
        if not self.quota.take(worker.worker_id):
            logger.error("Worker %d exceeded the allowed number of restarts.", worker.worker_id)
            return False
        logger.warning("Restarting worker[%d] after '%s'", worker.worker_id, exception)
        self.was_crash = True
        return True

    def _end_episodes(self, worker: EngineWorker) -> None:
        """Add the result that ends all episodes of a worker as interrupted, with the agents' last observations."""
        results = worker.live_agents.make_interrupted()
        worker.live_agents.clear()
        if results:
            infos = worker.previous_all_action_info
            self._results.append(EnvironmentStep(results, worker.worker_id, infos, {}))

    def _on_stop(self, worker: EngineWorker, exception: Exception) -> None:
        self._end_episodes(worker)
        worker.move(WorkerState.STOPPED)
        logger.warning("worker[%d] was stopped (%s) and is left out; the others continue", worker.worker_id, exception)
        self._stop = exception

    # ---- failures ---------------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise the first failure that could not be handled, and log the others."""
        if not self._failures:
            return
        first, *rest = self._failures
        self._failures = []
        for other in rest:
            logger.error("and at the same time: %s: %s", type(other).__name__, other)
        raise first

    def check_waiting(self) -> None:
        """Raise if no worker is busy, so that there is no result to wait for.

        Raises:
            UnityCommunicatorStoppedException, UnityCommunicationException: all envs were stopped.
            UsageError: the other envs have failed before, and their errors were raised.
        """
        if any(worker.waiting for worker in self._workers):
            return
        broken = [worker.worker_id for worker in self._workers if worker.state is WorkerState.BROKEN]
        if broken:
            raise UsageError(f"workers {broken} have failed, and no other worker is left to step; call reset()")
        self.check_not_all_stopped()

    def check_not_all_stopped(self) -> None:
        """Raise if all envs were stopped deliberately."""
        if self._stop is None or any(worker.state is not WorkerState.STOPPED for worker in self._workers):
            return
        if isinstance(self._stop, failures.UnityCommunicatorStoppedException):
            raise self._stop
        raise failures.closed() from self._stop

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close_envs(self, timeout_s: float) -> list[int]:
        """Close all envs at the same time. Return the ids of workers that take longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        starting_or_ending = (WorkerState.LEAVING, WorkerState.RESETTING)  # the pool ends these
        ids = [w.worker_id for w in self._workers if not w.is_gone and w.state not in starting_or_ending]
        asked = [(worker_id, self._pool.call_async("close_env", env_ids=[worker_id])) for worker_id in ids]
        late = []
        for worker_id, future in asked:
            try:
                future.result(max(deadline - time.monotonic(), 0.0))
            except EnvTimeout:
                late.append(worker_id)
            except StepmillError as error:  # the worker has died, or its env raised: the env is closed either way
                logger.warning("worker[%d]: %s", worker_id, error.message)
        return late
