"""Makes the calls of a program, and tells the model what calls that raise have done."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, RecvTimeout, StepmillError, UsageError, WorkerDied
from tests.harness.interrupts import LineInterrupt
from tests.harness.pools import has_command
from tests.pool_model.model import PoolModel
from tests.pool_model.records import FAULTED, Env
from tests.pool_model.results import require
from tests.pool_model.setup import Setup

FAULTS = (EnvError, BadOutput, WorkerDied, EnvTimeout)
# Not adapters of envs, which on the serial backend run in this thread: an env that is interrupted there is FAULTED.
LEARNERS_CODE = tuple(
    f"{os.path.dirname(stepmill.__file__)}/{package}/" for package in ("pool", "backends", "slab", "spec")
)
Recorders = Mapping[int, Callable[[], None]]


class Calls:
    """Makes calls on one pool.

    Attributes:
        lines: the calls that were made, as Python.
        interrupt: at which line of stepmill's code the next call is interrupted; 0 is never.
    """

    def __init__(self, setup: Setup, pool: stepmill.Pool, lines: list[str], model: type[PoolModel] = PoolModel) -> None:
        self.setup, self.pool, self.lines = setup, pool, lines
        self.model = model(setup, PoolPort(pool).worker_of)
        self.interrupt = 0
        self.is_closed = False
        self._keeps_error = False  # an interrupt came before an error was raised

    def make(
        self,
        text: str,
        function: Callable[[], Any],
        sent: Recorders | None = None,
        refusal: type[UsageError] | None = None,
    ) -> Any:
        """Make a call; return its result, or the exception that it has raised.

        Args:
            text: the call as Python.
            function: makes it.
            sent: by env, what records the command that the call gives it. If the call returns, all of them have theirs.
            refusal: what it must raise; it must then have changed nothing.
        """
        sent = sent or {}
        self.lines.append(text)
        try:
            result = self.run(function)
        except KeyboardInterrupt as interrupt:
            self.lines[-1] += f"  # Ctrl-C at line {self.interrupt} of stepmill's code"
            self.interrupt = 0
            self.adopt(sent, is_reset=text.startswith("pool.reset"))
            self._keeps_error = bool(self.pool._recovery.news.faults)
            return interrupt
        except StepmillError as error:
            self.lines[-1] += f"  # {type(error).__name__}"
            if isinstance(error, FAULTS):
                self.adopt(sent, is_reset=text.startswith("pool.reset"))
            self.check_error(error, refusal)
            return error
        if isinstance(result, list) and len(result) < len(sent):  # the next `recv` raises the faults of the others
            self.adopt(sent, is_reset=text.startswith("pool.reset"))
            self._keeps_error = True
            return result
        require(refusal is None, f"{text} was not refused")
        for record in sent.values():
            record()
        return result

    def request(self, name: str, text: str, function: Callable[[], Any]) -> Any:
        """Make a request that changes nothing; repeat it if it was interrupted."""
        outcome = self.make(text, function)
        return self.make(text, function) if isinstance(outcome, KeyboardInterrupt) else outcome

    def run(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, or interrupt it."""
        return self.interrupted(function) if self.interrupt else function()

    def interrupted(self, function: Callable[[], Any]) -> Any:
        results: list[Any] = []
        if LineInterrupt(self.interrupt, LEARNERS_CODE).call(lambda: results.append(function())) and not results:
            raise KeyboardInterrupt
        return results[0]

    def check_error(self, error: StepmillError, refusal: type[UsageError] | None) -> None:
        model = self.model
        if isinstance(error, FAULTS):
            has_cause = any(model.may_fail(env) or env.status == FAULTED for env in model.envs)
            has_cause |= model.has_deaths and isinstance(error, WorkerDied)
            require(has_cause or self._keeps_error, f"an error without a cause: {error}")
            self._keeps_error = False
        elif refusal is not None:
            require(isinstance(error, refusal), f"{type(error).__name__} in place of {refusal.__name__}: {error}")
        else:
            require(isinstance(error, RecvTimeout), f"{type(error).__name__}: {error}")

    def adopt(self, sent: Recorders, *, is_reset: bool = False) -> None:
        self.model.adopt_states(self.pool.states, self.pending(), sent, is_reset=is_reset)

    def pending(self) -> list[bool]:
        """Return whether each env has a result to be received, which may be a fault, or one that an interrupted call had received."""
        has_result = [state.name in ("BUSY", "READY") for state in self.pool.states]
        return [has_result[env_id] or has_command(self.pool, env_id) for env_id in range(self.setup.num_envs)]

    def check(self) -> None:
        if not self.is_closed:
            self.model.check_states(self.pool.states, self.pending(), PoolPort(self.pool).num_ended.tolist())

    def envs(self, ids: Sequence[int] | None) -> list[Env]:
        return [env for env in self.model.envs if ids is None or env.env_id in ids]

    def ids(self, envs: Sequence[Env]) -> list[int] | None:
        return None if len(envs) == self.setup.num_envs else [env.env_id for env in envs]
