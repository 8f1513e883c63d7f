"""The record of each worker of a manager: its state, its agents, and how often it may be restarted."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from stepmill.frontends.mlagents.failures import UnityCommunicationException
from stepmill.frontends.mlagents.settings import NO_LIMIT, RestartLimits
from stepmill.frontends.mlagents.steps import (
    AllStepResult,
    BatchedStepResult,
    DecisionSteps,
    EnvironmentStep,
    TerminalSteps,
)
from stepmill.frontends.mlagents.unity_worker import Player
from stepmill.spec.errors import EngineBug, UsageError

_END_S = 1.0

# ---- messages ----------------------------------------------------------------------------------------------------------


class EnvironmentCommand(Enum):
    """The kind of a message between a manager and a worker that a subclass started. Numbers are ML-Agents'."""

    STEP = 1  #: Step the env. The answer has the result.
    BEHAVIOR_SPECS = 2  #: Send the behavior specs.
    ENVIRONMENT_PARAMETERS = 3  #: Set parameters of the env.
    RESET = 4  #: Reset the env.
    CLOSE = 5  #: Close the env, and end.
    ENV_EXITED = 6  #: The env has failed. The payload is the exception.
    CLOSED = 7  #: The worker has closed its env.
    TRAINING_STARTED = 8  #: Report to the env that training has started.


class EnvironmentRequest(NamedTuple):
    """A message to a worker."""

    cmd: EnvironmentCommand
    payload: Any = None


class EnvironmentResponse(NamedTuple):
    """A message from a worker. The payload of ENV_EXITED is an exception, that of STEP a StepResponse."""

    cmd: EnvironmentCommand
    worker_id: int
    payload: Any


class StepResponse(NamedTuple):
    """The result of a step: agents by behaviour, the root of mlagents_envs' timers or None, and the env's statistics.

    The first generation has no statistics.
    """

    all_step_result: AllStepResult
    timer_root: Any
    environment_stats: dict[str, Any] = {}


# ---- workers -----------------------------------------------------------------------------------------------------------


class _Joined:
    """Python lets a class with another base than `object` get more bases: see `subprocess_manager`."""


class UnityEnvWorker(_Joined):
    """A worker process and the connection to it, as `create_worker` of a subclass returns it.

    Attributes:
        process: the multiprocessing.Process.
        conn: the manager's end of a pipe to the process.
        previous_step: the newest result of the worker.
        previous_all_action_info: for each behaviour, the last actions that the worker received.
        waiting: whether the manager waits for the result of a step.
        closed: whether the process has ended.
    """

    def __init__(self, process: Any, worker_id: int, conn: Any) -> None:
        self.process = process
        self.worker_id = worker_id
        self.conn = conn
        self.previous_step = EnvironmentStep.empty(worker_id)
        self.previous_all_action_info: dict[str, Any] = {}
        self.waiting = False
        self.closed = False

    def send(self, cmd: EnvironmentCommand, payload: Any = None) -> None:
        """Send a request.

        Raises:
            UnityCommunicationException: the process has ended.
            Exception: the exception that the worker sent with ENV_EXITED before its process ended.
        """
        try:
            self.conn.send(EnvironmentRequest(cmd, payload))
        except (OSError, EOFError) as exc:
            failure = exc.with_traceback(None)  # its frames hold a buffer, whose end CPython 3.14 reports as an error
        else:
            return
        with contextlib.suppress(OSError, EOFError):
            while self.conn.poll():
                self.recv()
        raise self.died_error("send") from failure

    def recv(self) -> EnvironmentResponse:
        """Wait for the next response from the connection. The results of steps come through the step queue instead.

        Raises:
            UnityCommunicationException: the process has ended.
            Exception: the exception that the worker sent with ENV_EXITED.
        """
        try:
            response: EnvironmentResponse = self.conn.recv()
        except (OSError, EOFError) as exc:
            raise self.died_error("recv") from exc
        if response.cmd is EnvironmentCommand.ENV_EXITED:
            raise response.payload
        return response

    def request_close(self) -> None:
        """Ask the worker to close its env and to end."""
        try:
            self.conn.send(EnvironmentRequest(EnvironmentCommand.CLOSE))
        except (OSError, EOFError):
            pass  # the worker has ended already

    def died_error(self, verb: str) -> Exception:
        """Return the error for a process that has ended. `verb` is what failed, "send" or "recv"."""
        if self.process is not None:
            self.process.join(_END_S)  # a closed connection may be seen before the exit code
        exit_code = None if self.process is None else self.process.exitcode
        return UnityCommunicationException(
            f"UnityEnvironment worker: {verb} failed. The process of worker {self.worker_id} ended (exit code {exit_code}) "
            "without sending an exception; see its output"
        )


class EngineWorkerState(Enum):
    """The state of a worker of the engine."""

    NEW = "new"  # never reset: its next command is a reset
    READY = "ready"  # its last result was received
    STEPPING = "stepping"
    RESETTING = "resetting"  # also while its process is restarted
    LEAVING = "leaving"  # its env has failed and is being closed; its process ends
    BROKEN = "broken"  # its env failed and was not rebuilt; only a reset rebuilds it
    DEAD = "dead"  # its process has ended and was not restarted; only a reset restarts it
    STOPPED = "stopped"  # its env was stopped deliberately


_S = EngineWorkerState
_MOVES = {
    _S.NEW: {_S.RESETTING, _S.BROKEN, _S.DEAD},
    _S.READY: {_S.STEPPING, _S.RESETTING, _S.BROKEN, _S.DEAD},
    _S.STEPPING: {_S.READY, _S.LEAVING, _S.RESETTING, _S.BROKEN, _S.DEAD, _S.STOPPED},
    _S.RESETTING: {_S.READY, _S.LEAVING, _S.RESETTING, _S.BROKEN, _S.DEAD, _S.STOPPED},
    _S.LEAVING: {_S.RESETTING, _S.BROKEN},
    _S.BROKEN: {_S.LEAVING, _S.DEAD},
    _S.DEAD: {_S.RESETTING},
    _S.STOPPED: set(),
}
_BUSY = frozenset({_S.STEPPING, _S.RESETTING, _S.LEAVING})


class EngineWorker(UnityEnvWorker):
    """A worker that stepmill's engine runs. `process` and `conn` are None.

    Attributes:
        env_factory: the function that makes its env.
        run_options: the engine settings for its env, as an EngineConfig, RunOptions or None.
        live_agents: the agents that are in an episode.
        properties: the float properties of its env.
        players: the processes that its env has started.
        parameters: the env parameters that are sent with its next command.
        calls: the methods of the worker, as (name, arguments), that are called before its next command.
        has_answered: whether its env was ever reset.
        is_fresh: whether its env was rebuilt after a crash and reset, and has not stepped yet.
    """

    def __init__(self, worker_id: int, env_factory: Callable[..., Any], run_options: Any = None) -> None:
        super().__init__(None, worker_id, None)
        self.env_factory = env_factory
        self.run_options = run_options
        self.live_agents = LiveAgents()
        self.properties: dict[str, float] = {}
        self.players: list[Player] = []
        self.parameters: dict[str, Any] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.has_answered = False
        self.is_fresh = False
        self._state = EngineWorkerState.NEW

    @property
    def state(self) -> EngineWorkerState:
        """The state of the worker."""
        return self._state

    def move(self, state: EngineWorkerState) -> None:
        """Change the state.

        Raises:
            EngineBug: the table of moves does not allow the change.
        """
        if state not in _MOVES[self._state]:
            raise EngineBug(
                f"worker {self.worker_id} cannot go from {self._state.name} to {state.name}; please report this"
            )
        self._state = state
        self.waiting = state in _BUSY

    def take_pending_updates(self) -> tuple[dict[str, Any], list[tuple[str, tuple[Any, ...]]]]:
        """Return and clear the parameters and calls that are sent with the next command."""
        pending = self.parameters, self.calls
        self.parameters, self.calls = {}, []
        return pending

    def send(self, cmd: EnvironmentCommand, payload: Any = None) -> None:
        """Refuse: there is no connection to a worker of the engine."""
        raise UsageError(
            f"worker {self.worker_id} is run by the engine and has no connection to send {cmd} to; override create_worker() "
            "and return a UnityEnvWorker with your own process and connection, or call the manager's methods"
        )

    def recv(self) -> EnvironmentResponse:
        """Refuse: there is no connection to a worker of the engine."""
        raise UsageError(
            f"worker {self.worker_id} is run by the engine and has no connection to receive from; override "
            "create_worker() and return a UnityEnvWorker with your own process and connection"
        )

    def request_close(self) -> None:
        """Do nothing, because the manager's `close` ends the workers of the engine."""

    def __repr__(self) -> str:
        return f"EngineWorker({self.worker_id}, {self._state.name})"


class RestartQuota:
    """How often each worker may still be restarted."""

    def __init__(self, limits: RestartLimits, num_workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.counts = [0] * num_workers
        self._times: list[deque[float]] = [deque() for _ in range(num_workers)]
        self._clock = clock

    def take(self, worker_id: int) -> bool:
        """Use one restart of a worker's quota, and return True. If none is left, return False."""
        limits, times, now = self.limits, self._times[worker_id], self._clock()
        while times and now - times[0] > limits.restarts_rate_limit_period_s:
            times.popleft()
        is_used_up = limits.max_lifetime_restarts != NO_LIMIT and self.counts[worker_id] >= limits.max_lifetime_restarts
        is_too_fast = limits.restarts_rate_limit_n != NO_LIMIT and len(times) >= limits.restarts_rate_limit_n
        if is_used_up or is_too_fast:
            return False
        times.append(now)
        self.counts[worker_id] += 1
        return True


# ---- agents ------------------------------------------------------------------------------------------------------------

_LastSeen = dict[int, tuple[Any, int]]  # agent id: the result in which it was seen last, and its row there


class LiveAgents:
    """The agents of one worker that are in the middle of an episode, with their last observations.

    A crash of the worker ends the episodes of all of them. Agents need decisions at different times: an agent that is not in
    the newest result may still be alive.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _LastSeen] = {}

    def update(self, results: AllStepResult) -> None:
        """Add the agents of a result, and remove those whose episode ended."""
        for name, agents in results.items():
            seen = self._seen.setdefault(name, {})
            if isinstance(agents, tuple):
                last: Any = agents[0]
                ended, rows = agents[1].agent_id, list(range(len(last)))
            else:
                last, is_done = agents, np.asarray(agents.done, np.bool_)
                ended, rows = agents.agent_id[is_done], np.flatnonzero(~is_done).tolist()
            for agent in ended:
                seen.pop(int(agent), None)
            seen.update({int(last.agent_id[row]): (last, row) for row in rows})

    def clear(self) -> None:
        """Remove all agents, because a reset has ended all episodes."""
        self._seen.clear()

    def make_interrupted(self) -> AllStepResult:
        """Return the end of each agent's episode as interrupted, with its last observation and no reward."""
        return {name: _interrupt(seen) for name, seen in self._seen.items() if seen}


def _interrupt(seen: _LastSeen) -> tuple[DecisionSteps, TerminalSteps] | BatchedStepResult:
    places = list(seen.values())
    size = len(places)
    first = places[0][0]
    obs = [np.stack([agents.obs[leaf][row] for agents, row in places]) for leaf in range(len(first.obs))]
    ids = np.array(list(seen), np.int32)
    no_reward, all_true = np.zeros(size, np.float32), np.ones(size, np.bool_)
    if isinstance(first, DecisionSteps):
        group = np.array([agents.group_id[row] for agents, row in places], np.int32)
        no_agents = DecisionSteps([array[:0] for array in obs], no_reward[:0], ids[:0])
        return no_agents, TerminalSteps(obs, no_reward, all_true, ids, group)
    mask = None
    if first.action_mask is not None:
        mask = [
            np.stack([agents.action_mask[branch][row] for agents, row in places])
            for branch in range(len(first.action_mask))
        ]
    return BatchedStepResult(obs, no_reward, all_true, all_true.copy(), ids, mask)
