"""Drives the workers that stepmill's engine runs: commands, results, failures, restarts, and the end.

result "failed"  ─┬ stopped deliberately ─► STOPPED, left out; when all are, the env's exception is raised
                  ├ restartable, quota left ─► LEAVING (closes its env, ends) ─┐
                  └ else ─► BROKEN, the exception is raised                     ├► RESETTING, in a new process
process dead ─────┬ quota left ────────────────────────────────────────────────┘
                  └ else ─► DEAD, UnityWorkerDied is raised
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stepmill.frontends.mlagents import failures
from stepmill.frontends.mlagents.channels import with_methods
from stepmill.frontends.mlagents.manager import logger
from stepmill.frontends.mlagents.settings import ManagerOptions, OnCrash, RestartLimits, checked_parameters, read_engine
from stepmill.frontends.mlagents.steps import EnvironmentStep, plain_actions, unpack
from stepmill.frontends.mlagents.timing import publish_timers
from stepmill.frontends.mlagents.unity_worker import WorkerMaker, end_players
from stepmill.frontends.mlagents.workers import EngineWorker, EngineWorkerState, RestartQuota
from stepmill.pool.pool import Pool
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.options import AutoresetMode, EnvState, PoolOptions, Start, Tuning
from stepmill.spec.received import EnvFault

_S = EngineWorkerState
_ENDED = (_S.DEAD, _S.STOPPED)


class EngineWorkers:
    """The workers of a manager in a `Pool`, one env per process. It owns the states of the workers.

    Args:
        manager: the manager, which chooses actions (`_decisions`) and, under `on_crash="reset_all"`, resets all envs
            after a crash. Its `env_parameters` are sent again to envs that are rebuilt.
        workers: the workers that the manager's `create_worker` made.
        limits: the quotas of restarts.
        options: the options of the manager.
    """

    def __init__(
        self, manager: Any, workers: Sequence[EngineWorker], limits: RestartLimits, options: ManagerOptions
    ) -> None:
        self._manager = manager
        self._workers = workers
        self._options = options
        self.quota = RestartQuota(limits, len(workers))
        self._specs: dict[str, Any] = {}
        self._results: list[EnvironmentStep] = []  # in the order in which they came
        self._failures: list[Exception] = []
        self._stop: Exception | None = None  # the exception of the last env that was stopped deliberately
        self._was_crash = False  # whether a worker crashed and was restarted since results were returned
        self._was_interrupted = False
        self._unsent: set[int] = set()  # workers to which a command could not be sent, until they are restarted
        self._is_closed = False
        self.pool = Pool(
            [_make_maker(worker, options) for worker in workers], backend="process", options=_pool_options(options)
        )
        with close_on_error(self.pool.close):
            for worker, description in zip(workers, self.pool.call("describe"), strict=True):
                self._store_description(worker, description)

    # ---- steps and resets -------------------------------------------------------------------------------------------

    def step(self) -> list[EnvironmentStep]:
        """Command each worker that is not busy. Wait for at least one result, or for all if `is_deterministic`."""
        is_deterministic = self._options.is_deterministic
        with self._correct_states():
            self._queue_steps()
            while not self._results or (is_deterministic and self._num_waiting()):
                self._check_waiting()
                self._receive(self._num_waiting() if is_deterministic else 1, None)
        if self._was_crash and self._options.on_crash is OnCrash.RESET_ALL:
            self._manager.reset()
            steps, self._manager.first_step_infos = self._manager.first_step_infos, []
            return list(steps)
        steps = self._take_results()
        return sorted(steps, key=lambda step: step.worker_id) if is_deterministic else steps

    def reset(self, config: Any) -> list[EnvironmentStep]:
        """Wait for steps that are not finished, restart broken workers, and reset all envs at the same time."""
        self._manager.set_env_parameters(config)
        with self._correct_states():
            self._wait_until_idle(self._options.drain_timeout_s)
            self._check_not_all_stopped()
            for worker in self._in(_S.NEW, _S.READY):
                if not worker.is_fresh or worker.parameters or worker.calls:
                    self._send_reset(worker)
            for worker in self._in(_S.BROKEN):  # this and a restart of the dead do not use the quota
                self._end_process(worker)
            for worker in self._in(_S.DEAD):
                self._restart(worker)
            self._wait_until_idle(None)
        self._check_not_all_stopped()
        return [worker.previous_step for worker in self._in(_S.READY)]

    @contextmanager
    def _correct_states(self) -> Iterator[None]:
        """Run a step or a reset. If Ctrl-C ended the last one, correct the workers' states first, with those of the pool.

        Ctrl-C may have come after the pool sent a command or returned a result, and before the worker's state followed.
        """
        self._check_open()
        if self._was_interrupted:
            self._was_interrupted = False
            for worker, state in zip(self._workers, self.pool.states, strict=True):
                is_pending = state in (EnvState.BUSY, EnvState.READY)
                if is_pending and not worker.waiting:
                    self._record_step(worker)
                elif worker.waiting and state is EnvState.FAULTED:
                    self._on_loss(worker, failures.UnityCommunicationException("UnityEnvironment worker: recv failed."))
                elif worker.waiting and not is_pending:  # its result is lost, or its command was not sent
                    self._end_episodes(worker)
                    self._restart(worker)
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._was_interrupted = True
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise failures.UnityClosedError

    def _num_waiting(self) -> int:
        return sum(worker.waiting for worker in self._workers)

    def _in(self, *states: EngineWorkerState) -> list[EngineWorker]:
        return [worker for worker in self._workers if worker.state in states]

    def _check_waiting(self) -> None:
        """Raise if no worker is busy, so that there is no result to wait for.

        Raises:
            UnityCommunicatorStoppedException, UnityCommunicationException: all envs were stopped.
            UsageError: the other envs have failed before, and their errors were raised.
        """
        if self._num_waiting():
            return
        if broken := [worker.worker_id for worker in self._in(_S.BROKEN, _S.DEAD)]:
            raise UsageError(f"workers {broken} have failed, and no other worker is left to step; call reset()")
        self._check_not_all_stopped()

    def _check_not_all_stopped(self) -> None:
        """Raise if all envs were stopped deliberately."""
        if self._stop is None or len(self.stopped_workers) < len(self._workers):
            return
        if isinstance(self._stop, failures.UnityCommunicatorStoppedException):
            raise self._stop
        raise failures.closed() from self._stop

    def _wait_until_idle(self, drain_timeout_s: float | None) -> None:
        """Wait until no worker is busy, and drop the results. The limit applies to steps."""
        deadline = None if drain_timeout_s is None else time.monotonic() + drain_timeout_s
        while self._num_waiting():
            stepping = {worker.worker_id for worker in self._in(_S.STEPPING)}
            left_s = None if deadline is None or not stepping else max(deadline - time.monotonic(), 0.0)
            if not self._receive(1, left_s):
                raise failures.UnityStuckError(
                    f"Workers {stepping} stuck in waiting state for {drain_timeout_s:g} s; give a step_timeout_s, which ends "
                    "them"
                )
        self._take_results()

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _queue_steps(self) -> None:
        """Command a step of every worker that is not busy, or a reset if its env was never reset."""
        for worker in self._in(_S.NEW):
            self._send_reset(worker)
        ready = self._in(_S.READY)
        if not ready:
            return
        decided = self._manager._decisions([worker.previous_step for worker in ready])
        commands = []
        for worker, infos in zip(ready, decided, strict=True):
            worker.previous_all_action_info = infos
            is_second = worker.previous_step.is_second_generation
            actions = plain_actions(infos, is_second_generation=is_second)
            commands.append((actions, worker.parameters, worker.calls))
        ids = [worker.worker_id for worker in ready]
        self._unsent |= set(ids) - set(self.pool.send(commands, ids))
        for worker in ready:
            self._record_step(worker)

    def _record_step(self, worker: EngineWorker) -> None:
        if worker.worker_id not in self._unsent:
            worker.take_pending_updates()
            worker.is_fresh = False
        worker.move(_S.STEPPING)

    def _send_reset(self, worker: EngineWorker) -> None:
        parameters, calls = worker.take_pending_updates()
        worker.live_agents.clear()
        worker.previous_all_action_info = {}
        worker.move(_S.RESETTING)
        options = {"parameters": parameters, "calls": calls}
        if not self.pool.reset_async(env_ids=[worker.worker_id], options=options):
            self._unsent.add(worker.worker_id)

    def _end_process(self, worker: EngineWorker) -> None:
        """Command the worker to close its env and to end its process."""
        worker.move(_S.LEAVING)
        self.pool.reset_async(env_ids=[worker.worker_id], options={"leave": self._options.leave_timeout_s})

    def _restart(self, worker: EngineWorker) -> None:
        """Start a process if that of the worker is dead, without waiting for it, and command a reset."""
        worker.is_fresh = True
        worker.parameters = dict(self._manager.env_parameters)
        self._unsent.discard(worker.worker_id)
        self.pool.revive([worker.worker_id], wait=False)
        self._send_reset(worker)

    # ---- results ----------------------------------------------------------------------------------------------------

    def _receive(self, num_wanted: int, timeout_s: float | None) -> bool:
        """Wait for `num_wanted` workers, and process all results that are available. Return whether there were any.

        Raises the first failure that has no remedy, and logs the others.
        """
        received = self.pool.receive(num_wanted, timeout_s=timeout_s)
        if received.batch is not None:
            for worker_id, answer in zip(received.batch.env_id, received.batch.obs, strict=True):
                self._process(self._workers[worker_id], answer)
        for worker_id, fault in received.faults.items():
            self._on_fault(self._workers[worker_id], fault)
        if self._failures:
            (first, *rest), self._failures = self._failures, []
            for other in rest:
                logger.error("and at the same time: %s: %s", type(other).__name__, other)
            raise first
        return received.batch is not None or bool(received.faults)

    def _process(self, worker: EngineWorker, answer: tuple[Any, ...]) -> None:
        """Store the result of a step or a reset, or handle an exception that the env raised."""
        if answer[0] == "failed":
            self._on_failure(worker, answer[1])
            return
        _, packed, stats, description = answer
        if description is not None:
            self._store_description(worker, description)
        worker.move(_S.READY)
        worker.has_answered = True
        results = unpack(packed)
        worker.live_agents.update(results)
        infos = worker.previous_all_action_info
        worker.previous_step = EnvironmentStep(results, worker.worker_id, infos, with_methods(stats))
        self._results.append(worker.previous_step)

    def _store_description(self, worker: EngineWorker, description: Mapping[str, Any]) -> None:
        worker.properties = description["properties"]
        worker.players = description["players"]
        self._specs.update(description["specs"])

    def _take_results(self) -> list[EnvironmentStep]:
        results, self._results = self._results, []
        self._was_crash = False
        return results

    def _end_episodes(self, worker: EngineWorker) -> None:
        """Add the result that ends all episodes of a worker as interrupted, with the agents' last observations."""
        results = worker.live_agents.make_interrupted()
        worker.live_agents.clear()
        if results:
            infos = worker.previous_all_action_info
            self._results.append(EnvironmentStep(results, worker.worker_id, infos, {}))

    # ---- failures ---------------------------------------------------------------------------------------------------

    def _on_failure(self, worker: EngineWorker, failure: failures.Failure) -> None:
        """Handle an exception that an env raised."""
        exception = failures.rebuild(failure, worker.worker_id)
        if failures.is_interrupt(failure):
            exception, cause = failures.closed(), exception
            exception.__cause__ = cause
        if failures.is_stop(failure):
            self._end_episodes(worker)
            worker.move(_S.STOPPED)
            self._stop = exception
            logger.warning(
                "worker[%d] was stopped (%s) and is left out; the others continue", worker.worker_id, exception
            )
        elif failures.is_restartable(failure) and self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._end_process(worker)
        else:
            self._fail(worker, _S.BROKEN, exception)

    def _on_fault(self, worker: EngineWorker, fault: EnvFault) -> None:
        """Handle a death, a deadline that is over, or a malformed result."""
        error: Exception = fault.error
        if isinstance(error, WorkerDied):
            error = failures.died(error, "send" if worker.worker_id in self._unsent else "recv")
        elif isinstance(error, EnvTimeout):
            error = failures.timed_out(error)
        if fault.is_loss:
            self._on_loss(worker, error)
        else:
            self._fail(worker, _S.BROKEN, error)

    def _on_loss(self, worker: EngineWorker, exception: Exception) -> None:
        """Handle the end of a worker's process. Its env's players are killed: one that hangs does not notice the death."""
        end_players(worker.players)
        worker.players = []
        if worker.state is _S.BROKEN:  # a call to its env has raised this
            worker.move(_S.DEAD)
        elif worker.state is _S.LEAVING or self._may_restart(worker, exception):
            self._end_episodes(worker)
            self._restart(worker)
        elif worker.state not in _ENDED:
            self._fail(worker, _S.DEAD, exception)

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
        self._was_crash = True
        return True

    # ---- the rest of a manager's methods -----------------------------------------------------------------------------

    def set_parameters(self, config: Any) -> None:
        """Send parameters with each worker's next command, and store them for envs that are rebuilt."""
        self._check_open()
        checked = checked_parameters(config)
        self._manager.env_parameters.update(checked)
        for worker in self._workers:
            worker.parameters.update(checked)

    def start_training(self, behavior_name: str, trainer_settings: Any) -> None:
        """Send the beginning of a behaviour's training with each worker's next command."""
        self._check_open()
        for worker in self._workers:
            worker.calls.append(("start_training", (behavior_name, trainer_settings)))

    @property
    def behaviors(self) -> dict[str, Any]:
        """The specs of all behaviours of the results so far."""
        return dict(self._specs)

    @property
    def properties(self) -> dict[str, float]:
        """The float properties of worker 0's env, as of its newest result."""
        return dict(self._workers[0].properties)

    @property
    def stopped_workers(self) -> list[int]:
        """Workers whose env was stopped deliberately."""
        return [worker.worker_id for worker in self._in(_S.STOPPED)]

    def close(self) -> None:
        """Close all envs at the same time, in at most `close_timeout_s`. Then end the processes and hung players."""
        if not self._is_closed:
            deadline = time.monotonic() + self._options.close_timeout_s
            idle = [worker.worker_id for worker in self._in(_S.NEW, _S.READY)]
            publish_timers(self.pool, idle, self._options.close_timeout_s / 2)
            if late := self._close_envs(deadline):
                logger.error("workers %s did not close their envs in time; their processes are ended", late)
        self._is_closed = True
        self.pool.close()
        for worker in self._workers:
            end_players(worker.players)  # the players of workers that were killed; other players have ended
            worker.players = []
            worker.closed = True

    def _close_envs(self, deadline: float) -> list[int]:
        """Close all envs at the same time. Return the ids of workers that take longer."""
        left_to_the_pool = (_S.LEAVING, _S.RESETTING, _S.DEAD)
        ids = [worker.worker_id for worker in self._workers if worker.state not in left_to_the_pool]
        asked = [(worker_id, self.pool.call_async("close_env", env_ids=[worker_id])) for worker_id in ids]
        late = []
        for worker_id, future in asked:
            try:
                future.result(max(deadline - time.monotonic(), 0.0))
            except EnvTimeout:
                late.append(worker_id)
            except StepmillError as error:  # the worker has died, or its env raised: the env is closed either way
                logger.warning("worker[%d]: %s", worker_id, error.message)
        return late


def _make_maker(worker: EngineWorker, options: ManagerOptions) -> WorkerMaker:
    return WorkerMaker(
        worker.env_factory,
        worker.worker_id,
        read_engine(worker.run_options),
        None if options.seed is None else options.seed + worker.worker_id,
        options.channel_factory,
        options.payload_bytes,
    )


def _pool_options(options: ManagerOptions) -> PoolOptions:
    return PoolOptions(
        envs_per_worker=1,
        context=options.context,
        autoreset_mode=AutoresetMode.DISABLED,  # agents have episodes, and Unity begins them
        episode_stats=False,
        step_timeout_s=options.step_timeout_s,
        reset_timeout_s=options.reset_timeout_s,
        start=Start(timeout_s=options.start_timeout_s),
        tuning=Tuning(timers_every=options.timers_every),
    )
