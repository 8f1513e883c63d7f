"""Sends commands to the engine's workers, and handles failures.

result "failed"  ─┬ stopped deliberately ─► STOPPED, left out; when all are, the env's exception is raised
                  ├ restartable, quota left ─► LEAVING (closes its env, ends) ─┐
                  └ else ─► BROKEN, the exception is raised                     ├► RESETTING, in a new process
process dead ─────┬ quota left ────────────────────────────────────────────────┘
                  └ else ─► DEAD, UnityWorkerDied is raised
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
from stepmill.frontends.mlagents.workers import EngineWorker, EngineWorkerState, RestartQuota
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import EnvState
from stepmill.spec.received import EnvFault

_ENDED = (EngineWorkerState.DEAD, EngineWorkerState.STOPPED)


class Supervisor:
    """Owns the states of the workers of one manager. Steps and resets run in its `with` block.

    Args:
        parameters: all env parameters so far, for envs that are rebuilt. The caller adds to them.

    Attributes:
        quota: the quota of restarts.
        was_crash: whether a worker crashed and was restarted since the last `take_results`.
    """

    def __init__(
        self,
        pool: Pool,
        workers: Sequence[EngineWorker],
        limits: RestartLimits,
        options: ManagerOptions,
        parameters: Mapping[str, Any],
    ) -> None:
        self.quota = RestartQuota(limits, len(workers))
        self.was_crash = False
        self._pool = pool
        self._workers = workers
        self._options = options
        self._parameters = parameters
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
        """Correct the state of a worker with that of its env.

        Ctrl-C may have come after the pool sent a command or returned a result, and before the worker's state followed.
        """
        is_pending = state in (EnvState.BUSY, EnvState.READY)
        if is_pending and not worker.waiting:
            self._record_step(worker)
        elif worker.waiting and state is EnvState.FAULTED:
            self._on_loss(worker, failures.UnityCommunicationException("UnityEnvironment worker: recv failed."))
        elif worker.waiting and not is_pending:  # its result is lost, or its command was not sent
            self._end_episodes(worker)
            self._restart(worker)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Mapping[str, Any]]) -> None:
        """Send actions by worker id. If a worker is found dead, the others still get their actions."""
        stepping = {self._workers[worker_id]: action for worker_id, action in actions.items()}
        commands = [(action, worker.parameters, worker.calls) for worker, action in stepping.items()]
        self._unsent |= actions.keys() - set(self._pool.send(commands, list(actions)))
        for worker in stepping:
            self._record_step(worker)

    def _record_step(self, worker: EngineWorker) -> None:
        if worker.worker_id not in self._unsent:
            worker.take_pending_updates()
            worker.is_fresh = False
        worker.move(EngineWorkerState.STEPPING)

    def reset(self, worker: EngineWorker) -> None:
        """Command a reset, unless the env was rebuilt and reset, and has not stepped since."""
        if not worker.is_fresh or worker.parameters or worker.calls:
            self._send_reset(worker)

    def _send_reset(self, worker: EngineWorker) -> None:
        parameters, calls = worker.take_pending_updates()
        worker.live_agents.clear()
        worker.previous_all_action_info = {}
        worker.move(EngineWorkerState.RESETTING)
        options = {"parameters": parameters, "calls": calls}
        if not self._pool.reset_async(env_ids=[worker.worker_id], options=options):
            self._unsent.add(worker.worker_id)

    def rebuild_env(self, worker: EngineWorker) -> None:
        """Rebuild the env of a broken or dead worker without using its quota, because the user has called reset()."""
        if worker.state is EngineWorkerState.DEAD:
            self._restart(worker)
        else:
            self._end_process(worker)

    def _end_process(self, worker: EngineWorker) -> None:
        """Command the worker to close its env and to end its process."""
        worker.move(EngineWorkerState.LEAVING)
        self._pool.reset_async(env_ids=[worker.worker_id], options={"leave": self._options.leave_timeout_s})

    def _restart(self, worker: EngineWorker) -> None:
        """Start a process if that of the worker is dead, without waiting for it, and command a reset."""
        worker.is_fresh = True
        worker.parameters = dict(self._parameters)
        self._unsent.discard(worker.worker_id)
        self._pool.revive([worker.worker_id], wait=False)
        self._send_reset(worker)

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
        worker.move(EngineWorkerState.READY)
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
            self._fail(worker, EngineWorkerState.BROKEN, exception)

    def on_fault(self, worker: EngineWorker, fault: EnvFault) -> None:
        """Handle a death, a deadline that is over, or a malformed result."""
        error: Exception = fault.error
        if isinstance(error, WorkerDied):
            error = failures.died(error, "send" if worker.worker_id in self._unsent else "recv")
        elif isinstance(error, EnvTimeout):
            error = failures.timed_out(error)
        if fault.is_loss:
            self._on_loss(worker, error)
        else:
            self._fail(worker, EngineWorkerState.BROKEN, error)

    def _on_loss(self, worker: EngineWorker, exception: Exception) -> None:
        """Handle the end of a worker's process. Its env's players are killed: one that hangs does not notice the death."""
        end_players(worker.players)
        worker.players = []
        if worker.state is EngineWorkerState.BROKEN:  # a call to its env has raised this
            worker.move(EngineWorkerState.DEAD)
        elif worker.state is EngineWorkerState.LEAVING or self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._restart(worker)
        elif worker.state not in _ENDED:
            self._fail(worker, EngineWorkerState.DEAD, exception)

    def _fail(self, worker: EngineWorker, state: EngineWorkerState, exception: Exception) -> None:
        worker.move(state)
        self._failures.append(exception)

    def _may_restart(self, worker: EngineWorker, exception: Exception) -> bool:
        if not worker.has_answered or worker.state in _ENDED:
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
        worker.move(EngineWorkerState.STOPPED)
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
        failed = (EngineWorkerState.BROKEN, EngineWorkerState.DEAD)
        broken = [worker.worker_id for worker in self._workers if worker.state in failed]
        if broken:
            raise UsageError(f"workers {broken} have failed, and no other worker is left to step; call reset()")
        self.check_not_all_stopped()

    def check_not_all_stopped(self) -> None:
        """Raise if all envs were stopped deliberately."""
        if self._stop is None or any(worker.state is not EngineWorkerState.STOPPED for worker in self._workers):
            return
        if isinstance(self._stop, failures.UnityCommunicatorStoppedException):
            raise self._stop
        raise failures.closed() from self._stop

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close_envs(self, timeout_s: float) -> list[int]:
        """Close all envs at the same time. Return the ids of workers that take longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        left_to_the_pool = (EngineWorkerState.LEAVING, EngineWorkerState.RESETTING, EngineWorkerState.DEAD)
        ids = [worker.worker_id for worker in self._workers if worker.state not in left_to_the_pool]
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
