"""Drives workers that the `create_worker` of a subclass has started. Commands and results are ML-Agents' messages.

    manager ── connection: EnvironmentRequest ─────────────────────► worker
            ◄─ connection: EnvironmentResponse (RESET, BEHAVIOR_SPECS, ENV_EXITED)
            ◄─ step queue: EnvironmentResponse (STEP, ENV_EXITED, CLOSED)

Observations are pickled, and are not in shared memory. After a crash, all envs are reset, as in the original.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import multiprocessing.queues
import pickle
import queue
import sys
import time
from collections.abc import Mapping
from typing import Any

import cloudpickle

from stepmill.envs.unity import Generation, read_specs
from stepmill.frontends.mlagents import failures
from stepmill.frontends.mlagents.channels import with_methods
from stepmill.frontends.mlagents.manager import logger
from stepmill.frontends.mlagents.settings import ManagerOptions, RestartLimits, checked_parameters, read_engine
from stepmill.frontends.mlagents.steps import EnvironmentStep, plain_actions, unpack
from stepmill.frontends.mlagents.timing import merge_timers
from stepmill.frontends.mlagents.unity_worker import UnityWorker, WorkerMaker
from stepmill.frontends.mlagents.workers import (
    EnvironmentCommand,
    EnvironmentRequest,
    EnvironmentResponse,
    RestartQuota,
    StepResponse,
    UnityEnvWorker,
)

_RESTARTABLE = (
    failures.UnityCommunicationException,
    failures.UnityTimeOutException,
    failures.UnityEnvironmentException,
    failures.UnityCommunicatorStoppedException,
)


class PipeWorkers:
    """Drives the workers of a manager whose `create_worker` starts processes itself.

    The manager's `env_workers`, `step_queue`, `create_worker` and `_take_step` are looked up on each use, because
    subclasses replace them.
    """

    def __init__(self, manager: Any, limits: RestartLimits, options: ManagerOptions) -> None:
        self._manager = manager
        self._options = options
        self.quota = RestartQuota(limits, len(manager.env_workers))
        self._is_closed = False

    @property
    def _workers(self) -> list[UnityEnvWorker]:
        workers: list[UnityEnvWorker] = self._manager.env_workers
        return workers

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> list[EnvironmentStep]:
        """Send actions to each worker that is not busy, and wait for at least one result."""
        self._queue_steps()
        while True:
            results, failed = self._take_responses()
            if failed:
                self._restart(failed | self._drain())
                self._queue_steps()
            elif results:
                return [self._to_step(self._workers[worker_id], result) for worker_id, result in results.items()]
            else:
                self._wait(self._stepping(), None)

    def _stepping(self) -> list[UnityEnvWorker]:
        return [worker for worker in self._workers if worker.waiting]

    def _queue_steps(self) -> None:
        for worker in self._workers:
            if not worker.waiting:
                worker.previous_all_action_info = self._manager._take_step(worker.previous_step)
                worker.send(EnvironmentCommand.STEP, worker.previous_all_action_info)
                worker.waiting = True

    def _to_step(self, worker: UnityEnvWorker, result: StepResponse) -> EnvironmentStep:
        merge_timers(result.timer_root)
        infos = worker.previous_all_action_info
        worker.previous_step = EnvironmentStep(
            result.all_step_result, worker.worker_id, infos, result.environment_stats
        )
        return worker.previous_step

    def _take_responses(self) -> tuple[dict[int, StepResponse], dict[int, Exception]]:
        """Return the results that have arrived, and the exceptions of workers that failed or ended without one, by worker id."""
        dead = [worker for worker in self._stepping() if worker.process is not None and not worker.process.is_alive()]
        results: dict[int, StepResponse] = {}
        failed: dict[int, Exception] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                response = self._manager.step_queue.get_nowait()
                if response.cmd in (EnvironmentCommand.ENV_EXITED, EnvironmentCommand.STEP):
                    self._workers[response.worker_id].waiting = False
                    found: dict[int, Any] = results if response.cmd is EnvironmentCommand.STEP else failed
                    found[response.worker_id] = response.payload
        for worker in dead:
            if worker.waiting:  # a response that its process put into the queue before its end would have been there
                worker.waiting = False
                failed[worker.worker_id] = worker.died_error("recv")
        return results, failed

    def _wait(self, workers: list[UnityEnvWorker], timeout_s: float | None) -> None:
        """Wait for a response or the end of one of the processes. A queue of an unknown kind is polled, as in the original.

        Processes that have just ended are included, because their ends must not be missed.
        """
        steps = self._manager.step_queue
        handles: list[Any] = [worker.process.sentinel for worker in workers if worker.process is not None]
        if isinstance(steps, multiprocessing.queues.Queue):
            handles.append(steps._reader)  # type: ignore[attr-defined]  # not public, but wait() needs it
            multiprocessing.connection.wait(handles, timeout_s)

    # ---- crashes ----------------------------------------------------------------------------------------------------

    def _restart(self, failed: Mapping[int, Exception]) -> None:
        """Restart the workers that failed, after the others have finished their steps, and reset all envs."""
        for worker_id, exception in failed.items():
            if not isinstance(exception, _RESTARTABLE):
                raise exception
            if not self.quota.take(worker_id):
                logger.error("Worker %d exceeded the allowed number of restarts.", worker_id)
                raise exception
            logger.warning("Restarting worker[%d] after '%s'", worker_id, exception)
        for worker_id in failed:
            self._recreate(worker_id)
        self._manager.reset(self._manager.env_parameters)

    def _recreate(self, worker_id: int) -> None:
        old = self._workers[worker_id]
        if old.process is not None:
            old.process.join(self._options.leave_timeout_s)  # the old process may still hold ports and files
        end_processes([old])
        manager = self._manager
        self._workers[worker_id] = manager.create_worker(
            worker_id, manager.step_queue, manager.env_factory, manager.run_options
        )

    def _drain(self) -> dict[int, Exception]:
        """Wait until no worker is stepping, and drop the results. Return the exceptions of workers that failed meanwhile.

        Raises:
            UnityStuckError: a step takes longer than `drain_timeout_s`.
        """
        failed: dict[int, Exception] = {}
        deadline = time.monotonic() + self._options.drain_timeout_s
        while self._stepping():
            failed |= self._take_responses()[1]
            stepping, left_s = self._stepping(), deadline - time.monotonic()
            if stepping and left_s <= 0:
                stuck = {worker.worker_id for worker in stepping}
                raise failures.UnityStuckError(
                    f"Workers {stuck} stuck in waiting state for {self._options.drain_timeout_s:g} s; give a longer "
                    "drain_timeout_s, or end their processes"
                )
            if stepping:
                self._wait(stepping, left_s)
        return failed

    # ---- the rest of a manager's methods -----------------------------------------------------------------------------

    def reset(self, config: Any) -> list[EnvironmentStep]:
        """Wait for steps that are not finished, send the parameters, and reset all envs at the same time."""
        for worker_id in self._drain():
            self._recreate(worker_id)
        self._manager.set_env_parameters(config)
        for worker in self._workers:
            worker.send(EnvironmentCommand.RESET, config)
        for worker in self._workers:
            results = _receive(worker, self._options.reset_timeout_s).payload
            worker.previous_step = EnvironmentStep(results, worker.worker_id, {}, {})
        return [worker.previous_step for worker in self._workers]

    def set_parameters(self, config: Any) -> None:
        """Send parameters to all workers unchanged."""
        self._manager.env_parameters = config
        for worker in self._workers:
            worker.send(EnvironmentCommand.ENVIRONMENT_PARAMETERS, {} if config is None else config)

    def start_training(self, behavior_name: str, trainer_settings: Any) -> None:
        """Send the beginning of a behaviour's training to all workers."""
        for worker in self._workers:
            worker.send(EnvironmentCommand.TRAINING_STARTED, (behavior_name, trainer_settings))

    @property
    def behaviors(self) -> dict[str, Any]:
        """The specs of all behaviours. This waits for the workers."""
        found: dict[str, Any] = {}
        for worker in self._workers:
            worker.send(EnvironmentCommand.BEHAVIOR_SPECS)
            found.update(_receive(worker, None).payload)
        return found

    @property
    def properties(self) -> dict[str, float]:
        """The numbers among the parameters that were sent."""
        sent = self._manager.env_parameters
        return {key: float(value) for key, value in sent.items() if isinstance(value, (int, float))} if sent else {}

    def close(self) -> None:
        """Ask all workers to end, and terminate those that take longer than `close_timeout_s`."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers:
            worker.request_close()
        deadline = time.monotonic() + self._options.close_timeout_s
        while (running := list(filter(_is_running, self._workers))) and time.monotonic() < deadline:
            self._take_responses()  # a process does not end before its messages are read
            self._wait(running, max(deadline - time.monotonic(), 0.0))
        end_processes(self._workers)


def end_processes(workers: list[UnityEnvWorker]) -> None:
    """End the processes that are still running, and close the connections."""
    for worker in workers:
        if _is_running(worker):
            logger.error("worker %d did not end in time; its process is terminated", worker.worker_id)
            worker.process.kill()
        if worker.process is not None:
            worker.process.join()
        if worker.conn is not None:
            worker.conn.close()
        worker.closed = True


def _is_running(worker: UnityEnvWorker) -> bool:
    return worker.process is not None and worker.process.is_alive()


def _receive(worker: UnityEnvWorker, timeout_s: float | None) -> EnvironmentResponse:
    """Return the next response from a worker's connection.

    Raises:
        UnityTimeOutException: the response takes longer than `timeout_s`.
        UnityCommunicationException: the process has ended.
    """
    if worker.process is not None:
        ready = multiprocessing.connection.wait([worker.conn, worker.process.sentinel], timeout_s)
        if not ready:
            raise failures.UnityTimeOutException(
                f"worker {worker.worker_id} did not answer in {timeout_s:g} s; give a longer reset_timeout_s"
            )
        if worker.conn not in ready and not worker.conn.poll():
            raise worker.died_error("recv")
    return worker.recv()


# ---- in the worker's process -------------------------------------------------------------------------------------------


def worker(
    parent_conn: Any,
    step_queue: Any,
    pickled_env_factory: bytes,
    worker_id: int,
    run_options: Any,
    log_level: int = logging.INFO,
) -> None:
    """Run one env in this process until CLOSE arrives. A subclass's `create_worker` starts a Process with this target.

    Args:
        parent_conn: this process's end of the pipe.
        step_queue: the queue of the manager.
        pickled_env_factory: `cloudpickle.dumps(env_factory)`.
        worker_id: the id of the worker, which is passed to the factory.
        run_options: EngineConfig, RunOptions or None.
        log_level: the level of stepmill's logger for ML-Agents.
    """
    logger.setLevel(log_level)
    env = UnityWorker(WorkerMaker(cloudpickle.loads(pickled_env_factory), worker_id, read_engine(run_options)))
    try:
        _answer_requests(env, parent_conn, step_queue, worker_id)
    except KeyboardInterrupt as exc:
        _report(failures.pack(exc, "step"), parent_conn, step_queue, worker_id)
    except (EOFError, BrokenPipeError):
        pass  # the learner is gone
    finally:
        env.close()
        parent_conn.close()
        step_queue.put(EnvironmentResponse(EnvironmentCommand.CLOSED, worker_id, None))
        step_queue.close()


def _answer_requests(env: UnityWorker, conn: Any, step_queue: Any, worker_id: int) -> None:
    while True:
        request: EnvironmentRequest = conn.recv()
        command, payload = request
        answer: tuple[Any, ...] = ()
        if command is EnvironmentCommand.CLOSE:
            return
        if command is EnvironmentCommand.STEP:
            is_second = env.generation is Generation.BEHAVIORS
            answer = env.step((plain_actions(payload, is_second_generation=is_second), {}, ()))[0]
        elif command is EnvironmentCommand.RESET:
            answer = env.reset()[0]
        elif command is EnvironmentCommand.ENVIRONMENT_PARAMETERS:
            env.prepare("step", checked_parameters(payload), ())
        elif command is EnvironmentCommand.TRAINING_STARTED:
            env.prepare("step", {}, [("start_training", payload)])
        if env.failure is not None:
            _report(env.failure, conn, step_queue, worker_id)
            return
        if command is EnvironmentCommand.STEP:
            _, results, stats, _ = answer
            response = StepResponse(unpack(results), _take_timers(), with_methods(stats))
            step_queue.put(EnvironmentResponse(command, worker_id, response))
        elif command is EnvironmentCommand.RESET:
            conn.send(EnvironmentResponse(command, worker_id, unpack(answer[1])))
        elif command is EnvironmentCommand.BEHAVIOR_SPECS:
            conn.send(EnvironmentResponse(command, worker_id, read_specs(env.env, env.generation)))


def _report(failure: Mapping[str, Any], conn: Any, step_queue: Any, worker_id: int) -> None:
    """Send an exception to the step queue and to the connection, because the manager may be reading either."""
    exception = failures.rebuild(dict(failure), worker_id)
    try:
        pickle.loads(pickle.dumps(exception))
    except Exception:  # pickle cannot find the class, or its constructor takes other arguments
        exception = failures.to_env_error(dict(failure), worker_id)
    response = EnvironmentResponse(EnvironmentCommand.ENV_EXITED, worker_id, exception)
    step_queue.put(response)
    conn.send(response)


def _take_timers() -> Any:
    library = sys.modules.get("mlagents_envs.timers")
    if library is None:
        return None
    root = library.get_timer_root()
    library.reset_timers()
    return root
