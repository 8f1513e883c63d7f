"""Gives commands to the workers and decides what becomes of those that fail.

answer "failed"  ─┬ stopped on purpose ─► STOPPED, left out; when all are, the env's exception is raised
                  ├ recoverable, quota left ─► LEAVING (closes its env, ends) ─┐
                  └ else ─► BROKEN, the exception is raised as itself           ├► RESETTING, in a new process
process dead ─────┬ quota left ────────────────────────────────────────────────┘
                  └ else ─► BROKEN, UnityWorkerDied is raised
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from stepmill.frontends.mlagents import failures
from stepmill.frontends.mlagents.channels import StatsAggregationMethod
from stepmill.frontends.mlagents.manager import logger
from stepmill.frontends.mlagents.optional_imports import load
from stepmill.frontends.mlagents.players import end_players
from stepmill.frontends.mlagents.settings import ManagerOptions, RestartLimits
from stepmill.frontends.mlagents.steps import AllStepResult, EnvironmentStep
from stepmill.frontends.mlagents.workers import RestartQuota, UnityEnvWorker, WorkerState
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import EnvState


class Supervisor:
    """The workers of one manager. Steps and resets are done within its `with` block.

    Attributes:
        parameters: env parameters, all of them, for envs that are made anew.
        quota: of restarts.
        was_crash: whether a worker crashed and was restarted since the last `take_answers`.
    """

    def __init__(
        self, pool: Pool, workers: Sequence[UnityEnvWorker], limits: RestartLimits, options: ManagerOptions
    ) -> None:
        self.parameters: dict[str, Any] = {}
        self.quota = RestartQuota(limits, len(workers))
        self.was_crash = False
        self._pool = pool
        self._workers = workers
        self._options = options
        self._answers: list[EnvironmentStep] = []
        self._failures: list[Exception] = []
        self._stop: Exception | None = None
        self._is_torn = False
        self._method: Any = load("side_channel.stats_side_channel", "StatsAggregationMethod") or StatsAggregationMethod

    # ---- after Ctrl-C -----------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Begin a step or a reset: if the last was broken off, between a command and its note, the pool knows better."""
        if self._is_torn:
            self._is_torn = False
            states = self._pool.states
            for worker in self._workers:
                self._mend(worker, states[worker.worker_id])

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_torn = kind is not None and not issubclass(kind, Exception)

    def _mend(self, worker: UnityEnvWorker, state: EnvState) -> None:
        is_pending = state in (EnvState.BUSY, EnvState.READY)
        if worker.waiting and state is EnvState.FAULTED:
            worker.is_gone = True  # its fault was told, and not taken in
            self._crash(worker, failures.UnityCommunicationException("UnityEnvironment worker: recv failed."))
        elif worker.waiting and not is_pending:
            self._end_episodes(worker)  # its answer was received, and not taken in
            self.reset(worker)
        elif is_pending and worker.state is WorkerState.READY:
            worker.take_pending_updates()
            worker.move(WorkerState.STEPPING)
        elif is_pending and worker.state is WorkerState.NEW:
            worker.take_pending_updates()
            worker.move(WorkerState.RESETTING)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Mapping[str, Any]]) -> None:
        """Give workers their actions. One that turns out to be dead is dealt with; the others get theirs."""
        todo = dict(actions)
        while todo:
            try:
                updates = [(self._workers[each].parameters, self._workers[each].calls) for each in todo]
                orders = [(action, *pending) for action, pending in zip(todo.values(), updates, strict=True)]
                self._pool.send(orders, list(todo))
            except WorkerDied as error:
                for worker_id in error.env_ids:
                    todo.pop(worker_id)
                self._on_death(error, "send")
                continue
            for worker_id in todo:
                self._workers[worker_id].take_pending_updates()
                self._workers[worker_id].is_fresh = False
                self._workers[worker_id].move(WorkerState.STEPPING)
            todo.clear()
        self.raise_failure()

    def reset(self, worker: UnityEnvWorker) -> None:
        """Command a reset. An env that was made anew and has done nothing since needs none."""
        if worker.is_fresh and not worker.parameters and not worker.calls:
            return
        parameters, calls = worker.take_pending_updates()
        worker.alive.clear()
        worker.previous_all_action_info = {}
        worker.move(WorkerState.RESETTING)
        try:
            self._pool.reset_async(env_ids=[worker.worker_id], options={"parameters": parameters, "calls": calls})
        except WorkerDied as error:
            self._on_death(error, "send")
            self.raise_failure()

    def renew(self, worker: UnityEnvWorker) -> None:
        """Make a broken worker's env anew, whatever its quota: the user has asked for it."""
        if worker.is_gone:
            self._restart(worker)
        else:
            self._dismiss(worker)

    def _dismiss(self, worker: UnityEnvWorker) -> None:
        worker.move(WorkerState.LEAVING)
        self._pool.reset_async(env_ids=[worker.worker_id], options={"leave": self._options.leave_timeout_s})

    def _restart(self, worker: UnityEnvWorker) -> None:
        """Start a new process in place of a dead one; nobody waits for it. Its first command is a reset."""
        worker.move(WorkerState.RESETTING)
        worker.is_gone = False
        worker.is_fresh = True
        worker.parameters = dict(self.parameters)
        _, calls = worker.take_pending_updates()
        worker.previous_all_action_info = {}
        self._pool.revive([worker.worker_id], wait=False)
        options = {"parameters": dict(self.parameters), "calls": calls}
        self._pool.reset_async(env_ids=[worker.worker_id], options=options)

    # ---- answers ----------------------------------------------------------------------------------------------------

    @property
    def is_any_answer(self) -> bool:
        """Whether `take_answers` would return something."""
        return bool(self._answers)

    def take_answers(self) -> list[EnvironmentStep]:
        """Return the answers that have come, in the order in which they came."""
        answers, self._answers = self._answers, []
        self.was_crash = False
        return answers

    def on_step(self, worker: UnityEnvWorker, results: AllStepResult, stats: Mapping[str, Any]) -> None:
        """Take in an answer."""
        worker.move(WorkerState.READY)
        worker.has_answered = True
        worker.alive.note(results)
        named = {name: [(value, self._method(number)) for value, number in values] for name, values in stats.items()}
        worker.previous_step = EnvironmentStep(results, worker.worker_id, worker.previous_all_action_info, named)
        self._answers.append(worker.previous_step)

    def on_failure(self, worker: UnityEnvWorker, failure: failures.Failure) -> None:
        """Take in what an env raised."""
        exception = failures.rebuild(failure, worker.worker_id)
        if failures.is_stop(failure):
            self._on_stop(worker, exception)
        elif failures.is_recoverable(failure) and self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._dismiss(worker)
        else:
            worker.move(WorkerState.BROKEN)
            self._failures.append(exception)

    def on_error(self, error: StepmillError) -> None:
        """Take in what the engine says of workers: deaths, time limits, answers that cannot be read."""
        for each in (error, *error.others):
            if isinstance(each, WorkerDied):
                self._on_death(each, "recv")
            else:
                self._on_late_or_bad(each)

    def _on_late_or_bad(self, error: StepmillError) -> None:
        worker = self._find(error)
        if worker is None:
            self._failures.append(error)
            return
        is_late = isinstance(error, EnvTimeout)
        worker.is_gone = is_late
        if worker.state is WorkerState.LEAVING and is_late:
            self._bury(worker)
            self._restart(worker)
        else:
            self._crash(worker, failures.overdue(error) if isinstance(error, EnvTimeout) else error)

    def _find(self, error: StepmillError) -> UnityEnvWorker | None:
        env_id = getattr(error, "env_id", None)
        if isinstance(env_id, int):
            return self._workers[env_id]
        states = self._pool.states  # an error of a worker as a whole
        return next((w for w in self._workers if w.waiting and states[w.worker_id] is EnvState.FAULTED), None)

    def _on_death(self, error: WorkerDied, verb: str) -> None:
        for worker_id in error.env_ids:
            worker = self._workers[worker_id]
            worker.is_gone = True
            if worker.state is WorkerState.LEAVING:
                self._bury(worker)
                self._restart(worker)
            else:
                self._crash(worker, failures.died(error, verb))

    def _crash(self, worker: UnityEnvWorker, exception: Exception) -> None:
        """A worker's process is gone, or said nothing that can be read."""
        if worker.is_gone:
            self._bury(worker)
        if worker.is_gone and self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._restart(worker)
        else:
            worker.move(WorkerState.BROKEN)
            self._failures.append(exception)

    def _bury(self, worker: UnityEnvWorker) -> None:
        """End what a dead worker has left running: a player that hangs notices nothing."""
        end_players(worker.players)
        worker.players = []

    def _may_restart(self, worker: UnityEnvWorker, exception: Exception) -> bool:
        if not worker.has_answered:
            return False  # it has never worked: that is no crash, but a mistake to be told at once
        if not self.quota.take(worker.worker_id):
            logger.error("Worker %d exceeded the allowed number of restarts.", worker.worker_id)
            return False
        logger.warning("Restarting worker[%d] after '%s'", worker.worker_id, exception)
        self.was_crash = True
        return True

    def _end_episodes(self, worker: UnityEnvWorker) -> None:
        """Tell of episodes that a crash has ended: interrupted, with what was last seen."""
        results = worker.alive.interrupted()
        worker.alive.clear()
        if results:
            infos = worker.previous_all_action_info
            self._answers.append(EnvironmentStep(results, worker.worker_id, infos, {}))

    def _on_stop(self, worker: UnityEnvWorker, exception: Exception) -> None:
        self._end_episodes(worker)
        worker.move(WorkerState.STOPPED)
        logger.warning("worker[%d] was stopped (%s) and is left out; the others go on", worker.worker_id, exception)
        self._stop = exception

    # ---- failures ---------------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise what could not be dealt with, the first of it; the rest is logged."""
        if not self._failures:
            return
        first, *rest = self._failures
        self._failures = []
        for other in rest:
            logger.error("and at the same time: %s: %s", type(other).__name__, other)
        raise first

    def check_waiting(self) -> None:
        """Raise if there is nobody to wait for.

        Raises:
            UnityCommunicatorStoppedException, UnityCommunicationException: all envs were stopped.
            UsageError: the others have failed before, which was raised.
        """
        if any(worker.waiting for worker in self._workers):
            return
        broken = [worker.worker_id for worker in self._workers if worker.state is WorkerState.BROKEN]
        if broken:
            raise UsageError(
                f"workers {broken} have failed, and nobody else is there to step; reset() makes their envs anew"
            )
        self.check_left()

    def check_left(self) -> None:
        """Raise if all envs were stopped on purpose."""
        if self._stop is None or any(worker.state is not WorkerState.STOPPED for worker in self._workers):
            return
        if isinstance(self._stop, failures.UnityCommunicatorStoppedException):
            raise self._stop
        raise failures.UnityCommunicationException("At least one of the environments has closed.") from self._stop

    # ---- the end ----------------------------------------------------------------------------------------------------

    def shut(self, timeout_s: float) -> list[int]:
        """Close all envs at once; return the ids of workers that took too long."""
        deadline = time.monotonic() + timeout_s
        gone = (WorkerState.LEAVING, WorkerState.RESETTING)  # on their way out or in: the pool ends them
        ids = [worker.worker_id for worker in self._workers if not worker.is_gone and worker.state not in gone]
        asked = [(worker_id, self._pool.call_async("shut", env_ids=[worker_id])) for worker_id in ids]
        late = []
        for worker_id, future in asked:
            try:
                future.result(max(deadline - time.monotonic(), 0.0))
            except EnvTimeout:
                late.append(worker_id)
            except StepmillError as error:  # it has died, or its env raised: it is closed either way
                logger.warning("worker[%d]: %s", worker_id, error.message)
        return late
