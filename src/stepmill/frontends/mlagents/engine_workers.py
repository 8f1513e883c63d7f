"""Drives the workers that stepmill's engine runs, with commands, results, resets and their end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from stepmill.frontends.mlagents.failures import UnityClosedError, UnityStuckError
from stepmill.frontends.mlagents.manager import logger
from stepmill.frontends.mlagents.settings import ManagerOptions, OnCrash, RestartLimits, checked_parameters, read_engine
from stepmill.frontends.mlagents.steps import EnvironmentStep, plain_actions, unpack
from stepmill.frontends.mlagents.supervisor import Supervisor
from stepmill.frontends.mlagents.timing import publish_timers
from stepmill.frontends.mlagents.unity_worker import WorkerMaker, end_players
from stepmill.frontends.mlagents.workers import EngineWorker, EngineWorkerState
from stepmill.pool.pool import Pool
from stepmill.spec.closing import close_on_error
from stepmill.spec.options import AutoresetMode, PoolOptions, Start, Tuning


class EngineWorkers:
    """The workers of a manager in a `Pool`, one env per process.

    Args:
        manager: the manager, which chooses actions (`_decisions`) and, under `on_crash="reset_all"`, resets all envs
            after a crash.
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
        self.pool = Pool(
            [_make_maker(worker, options) for worker in workers], backend="process", options=_pool_options(options)
        )
        self.supervisor = Supervisor(self.pool, workers, limits, options, manager.env_parameters)
        self.quota = self.supervisor.quota
        self._specs: dict[str, Any] = {}
        self._is_closed = False
        with close_on_error(self.pool.close):
            for worker, description in zip(workers, self.pool.call("describe"), strict=True):
                self._store_description(worker, description)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> list[EnvironmentStep]:
        """Command each worker that is not busy. Wait for at least one result, or for all if `is_deterministic`."""
        self._check_open()
        with self.supervisor:
            self._queue_steps()
            is_deterministic = self._options.is_deterministic
            while not self.supervisor.has_results or (is_deterministic and self._num_waiting()):
                self.supervisor.check_waiting()
                self._receive(self._num_waiting() if is_deterministic else 1, None)
        if self.supervisor.was_crash and self._options.on_crash is OnCrash.RESET_ALL:
            self._manager.reset()
            steps, self._manager.first_step_infos = self._manager.first_step_infos, []
            return list(steps)
        steps = self.supervisor.take_results()
        return sorted(steps, key=lambda step: step.worker_id) if self._options.is_deterministic else steps

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnityClosedError

    def _num_waiting(self) -> int:
        return sum(worker.waiting for worker in self._workers)

    def _queue_steps(self) -> None:
        """Command a step of every worker that is not busy, or a reset if its env was never reset."""
        for worker in self._in(EngineWorkerState.NEW):
            self.supervisor.reset(worker)
        ready = self._in(EngineWorkerState.READY)
        if not ready:
            return
        decided = self._manager._decisions([worker.previous_step for worker in ready])
        actions = {}
        for worker, infos in zip(ready, decided, strict=True):
            worker.previous_all_action_info = infos
            is_second = worker.previous_step.is_second_generation
            actions[worker.worker_id] = plain_actions(infos, is_second_generation=is_second)
        self.supervisor.step(actions)

    def _in(self, *states: EngineWorkerState) -> list[EngineWorker]:
        return [worker for worker in self._workers if worker.state in states]

    # ---- results ----------------------------------------------------------------------------------------------------

    def _receive(self, num_wanted: int, timeout_s: float | None) -> bool:
        """Wait for `num_wanted` workers, and process all results that are available. Raise failures without a remedy.

        Return whether there were any.
        """
        received = self.pool.receive(num_wanted, timeout_s=timeout_s)
        if received.batch is not None:
            for worker_id, answer in zip(received.batch.env_id, received.batch.obs, strict=True):
                self._process(self._workers[worker_id], answer)
        for worker_id, fault in received.faults.items():
            self.supervisor.on_fault(self._workers[worker_id], fault)
        self.supervisor.raise_failure()
        return received.batch is not None or bool(received.faults)

    def _process(self, worker: EngineWorker, answer: tuple[Any, ...]) -> None:
        if answer[0] == "failed":
            self.supervisor.on_failure(worker, answer[1])
            return
        _, results, stats, description = answer
        if description is not None:
            self._store_description(worker, description)
        self.supervisor.on_step(worker, unpack(results), stats)

    def _store_description(self, worker: EngineWorker, description: Mapping[str, Any]) -> None:
        worker.properties = description["properties"]
        worker.players = description["players"]
        self._specs.update(description["specs"])

    # ---- the rest of a manager's methods -----------------------------------------------------------------------------

    def reset(self, config: Any) -> list[EnvironmentStep]:
        """Wait for steps that are not finished, restart broken workers, and reset all envs at the same time."""
        self._check_open()
        self._manager.set_env_parameters(config)
        with self.supervisor:
            self._wait_until_idle(self._options.drain_timeout_s)
            self.supervisor.check_not_all_stopped()
            for worker in self._in(EngineWorkerState.NEW, EngineWorkerState.READY):
                self.supervisor.reset(worker)
            for worker in self._in(EngineWorkerState.BROKEN, EngineWorkerState.DEAD):
                self.supervisor.rebuild_env(worker)
            self._wait_until_idle(None)
        self.supervisor.check_not_all_stopped()
        return [worker.previous_step for worker in self._in(EngineWorkerState.READY)]

    def _wait_until_idle(self, drain_timeout_s: float | None) -> None:
        """Wait until no worker is busy, and drop the results. The limit applies to steps."""
        deadline = None if drain_timeout_s is None else time.monotonic() + drain_timeout_s
        while any(worker.waiting for worker in self._workers):
            is_stepping = bool(self._in(EngineWorkerState.STEPPING))
            left_s = None if deadline is None or not is_stepping else max(deadline - time.monotonic(), 0.0)
            if not self._receive(1, left_s):
                stuck = {worker.worker_id for worker in self._in(EngineWorkerState.STEPPING)}
                raise UnityStuckError(
                    f"Workers {stuck} stuck in waiting state for {drain_timeout_s:g} s; give a step_timeout_s, which ends them"
                )
        self.supervisor.take_results()

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
        return [worker.worker_id for worker in self._in(EngineWorkerState.STOPPED)]

    def close(self) -> None:
        """Close all envs at the same time, in at most `close_timeout_s`. Then end the processes and hung players."""
        late: list[int] = []
        if not self._is_closed:
            idle = [worker.worker_id for worker in self._in(EngineWorkerState.NEW, EngineWorkerState.READY)]
            deadline = time.monotonic() + self._options.close_timeout_s
            publish_timers(self.pool, idle, self._options.close_timeout_s / 2)
            late = self.supervisor.close_envs(deadline - time.monotonic())
        self._is_closed = True
        if late:
            logger.error("workers %s did not close their envs in time; their processes are ended", late)
        self.pool.close()
        for worker in self._workers:
            end_players(worker.players)  # the players of workers that were killed; other players have ended
            worker.players = []
            worker.closed = True


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
