"""A manager's books: what each worker is at, and how often it may be restarted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from stepmill.frontends.mlagents.alive import AliveAgents
from stepmill.frontends.mlagents.players import Player
from stepmill.frontends.mlagents.settings import NO_LIMIT, RestartLimits
from stepmill.frontends.mlagents.steps import EnvironmentStep
from stepmill.spec.errors import EngineBug


class WorkerState(Enum):
    """What a worker is at."""

    NEW = "new"  # never reset: its next command is a reset
    READY = "ready"  # its last answer is here
    STEPPING = "stepping"
    RESETTING = "resetting"  # also while its process is started anew
    LEAVING = "leaving"  # its env has failed and is being closed; its process ends
    BROKEN = "broken"  # it failed, and was not restarted; only a reset brings it back
    STOPPED = "stopped"  # its env was stopped deliberately


_S = WorkerState
_MOVES = {
    _S.NEW: {_S.RESETTING, _S.BROKEN},
    _S.READY: {_S.STEPPING, _S.RESETTING, _S.BROKEN},
    _S.STEPPING: {_S.READY, _S.LEAVING, _S.RESETTING, _S.BROKEN, _S.STOPPED},
    _S.RESETTING: {_S.READY, _S.LEAVING, _S.RESETTING, _S.BROKEN, _S.STOPPED},
    _S.LEAVING: {_S.RESETTING, _S.BROKEN},
    _S.BROKEN: {_S.LEAVING, _S.RESETTING},
    _S.STOPPED: set(),
}
WAITED_FOR = frozenset({_S.STEPPING, _S.RESETTING, _S.LEAVING})


class UnityEnvWorker:
    """What the manager knows of one worker.

    Attributes:
        previous_step: its newest answer.
        previous_all_action_info: by behaviour, the actions that it was last given.
        alive: agents whose episodes are under way.
        properties: float properties of its env.
        players: programs that its env has started.
        parameters: env parameters to be sent with its next command.
        calls: methods of the worker to be called before its next command: (name, arguments).
        has_answered: whether its env was ever reset.
        is_gone: whether a BROKEN worker's process has ended.
        is_fresh: whether its env was made anew after a crash, and reset, and has not stepped yet.
    """

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id
        self.previous_step = EnvironmentStep.empty(worker_id)
        self.previous_all_action_info: dict[str, Any] = {}
        self.alive = AliveAgents()
        self.properties: dict[str, float] = {}
        self.players: list[Player] = []
        self.parameters: dict[str, Any] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.has_answered = False
        self.is_gone = False
        self.is_fresh = False
        self._state = WorkerState.NEW

    @property
    def state(self) -> WorkerState:
        """What it is at."""
        return self._state

    @property
    def waiting(self) -> bool:
        """Whether an answer of it is to come."""
        return self._state in WAITED_FOR

    def move(self, state: WorkerState) -> None:
        """Go into another state."""
        if state not in _MOVES[self._state]:
            raise EngineBug(
                f"worker {self.worker_id} cannot go from {self._state.name} to {state.name}; please report this"
            )
        self._state = state

    def take_pending_updates(self) -> tuple[dict[str, Any], list[tuple[str, tuple[Any, ...]]]]:
        """Return parameters and calls that go along with the next command, once."""
        pending = self.parameters, self.calls
        self.parameters, self.calls = {}, []
        return pending

    def __repr__(self) -> str:
        return f"UnityEnvWorker({self.worker_id}, {self._state.name})"


class RestartQuota:
    """How often each worker may still be restarted."""

    def __init__(self, limits: RestartLimits, num_workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.counts = [0] * num_workers
        self._times: list[deque[float]] = [deque() for _ in range(num_workers)]
        self._clock = clock

    def take(self, worker_id: int) -> bool:
        """Take one restart from a worker's quota. Returns False, and takes none, if there is none left."""
        limits, times, now = self.limits, self._times[worker_id], self._clock()
        while times and now - times[0] > limits.restarts_rate_limit_period_s:
            times.popleft()
        is_worn = limits.max_lifetime_restarts != NO_LIMIT and self.counts[worker_id] >= limits.max_lifetime_restarts
        is_fast = limits.restarts_rate_limit_n != NO_LIMIT and len(times) >= limits.restarts_rate_limit_n
        if is_worn or is_fast:
            return False
        times.append(now)
        self.counts[worker_id] += 1
        return True
