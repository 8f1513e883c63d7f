"""The protocol of fault policies, and the arguments of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepmill.pool.events import EnvFailed, MarkFaulted
from stepmill.pool.workers import DEAD, FailureLimit, WorkerSupervisor
from stepmill.spec.errors import EnvError, StepmillError
from stepmill.spec.options import PoolOptions


@dataclass(frozen=True)
class WorkerDeath:
    """A worker that has ended or was given up.

    Attributes:
        worker: its number.
        faults: pending commands that were lost.
        error: describes the death.
        is_new: False if the death was handled before, and these are further commands of it.
    """

    worker: int
    faults: Sequence[EnvFailed]
    error: StepmillError
    is_new: bool


class FaultPolicy(Protocol):
    """Decides how a fault is handled. The pool's thread calls it between two waits; no method waits."""

    @property
    def reports_deaths(self) -> bool:
        """Whether a death is raised as an error, once, by the call that finds it."""

    @property
    def death_hint(self) -> str:
        """The last part of the text of WorkerDied errors: what happens to the envs."""

    def on_env_error(self, fault: EnvFailed, error: StepmillError) -> list[StepmillError]:
        """Handle an env that raised or returned an invalid value, and whose worker continues; return errors to raise."""

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        """Handle the death of a worker; return errors to raise."""

    def restart_worker(self, death: WorkerDeath, delay_s: float) -> None:
        """Restart a worker, dead or alive, and handle the lost episodes of its envs."""

    def on_restarted(self, worker: int) -> None:
        """Let a restarted worker serve, and rebuild the state of its envs if the policy does so."""

    def repeats_settings(self, server: int) -> bool:
        """Whether the replay of an env object repeats its settings, so that its restart need not re-apply them."""


class EnvErrorLimits:
    """Counts the errors of each env that a policy handles: `max_env_errors` in `restart_window_s`."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._limits: dict[int, FailureLimit] = {}

    def allow(self, env_id: int, error: StepmillError) -> int | None:
        """Count an error; return its number in the window. Over the limit, return None and extend the text of `error`."""
        max_errors, window_s = self._options.max_env_errors, self._options.restart_window_s
        number = self._limits.setdefault(env_id, FailureLimit(max_errors, window_s)).count()
        if number is None:
            error.message = (
                f"{error.message}; env {env_id} has failed more than {max_errors} times in {window_s:g} s "
                "(max_env_errors), so it is no longer reset automatically; call reset()"
            )
            error.args = (error.message,)
        return number


def fail_over_limit(workers: WorkerSupervisor, death: WorkerDeath) -> list[StepmillError]:
    """Report a death after which the policy does not restart the worker."""
    error = death.error
    known = error.message.replace(f"; {workers.policy.death_hint}", "")
    error.message = (
        f"{known}; the limit of restarts of worker {death.worker} is reached (max_restarts, max_restarts_total), so it is "
        "not restarted automatically; call reset() or revive()"
    )
    error.args = (error.message,)
    return fail_lost_envs(workers, death)


def fail_lost_envs(workers: WorkerSupervisor, death: WorkerDeath) -> list[StepmillError]:
    """Report a death: its envs are FAULTED until reset() or revive()."""
    if workers.state_of(death.worker) in DEAD:  # also if a call has reported it, which does not change the envs
        workers.mark_reported(death.worker)
    workers.state.apply([MarkFaulted(fault.env_id, fault.ticket) for fault in death.faults])
    # The error of a constructor names one env, but all envs of the worker are lost.
    if death.is_new and isinstance(death.error, EnvError):
        return [death.error, workers.worker_died_error(death.worker)]
    return [death.error]
