"""The protocol of fault policies, and what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepmill.pool.faults import FaultKind, fault_info
from stepmill.pool.workers import DEAD, RepairLimit, WorkerSupervisor
from stepmill.spec.errors import EnvError, StepmillError
from stepmill.spec.options import PoolOptions


@dataclass(frozen=True)
class EnvFault:
    """A pending command that ended in a fault.

    Attributes:
        env_id: whose command.
        kind: of the fault; None for a number that no worker of ours writes.
        record: encoded description of the exception, or None.
        worker: that was to carry it out.
        ticket: number of the command.
        begins_episode: whether the command begins an episode.
        was_resetting: whether the env was in `reset`, which it may be in a step as well.
    """

    env_id: int
    kind: FaultKind | None
    record: bytes | dict[str, str] | None
    worker: int
    ticket: int
    begins_episode: bool
    was_resetting: bool


@dataclass(frozen=True)
class WorkerDeath:
    """A worker that is gone or was given up.

    Attributes:
        worker: its number.
        faults: commands that were lost with it.
        error: describes it.
        is_new: False if these commands belong to a death that was dealt with before.
    """

    worker: int
    faults: Sequence[EnvFault]
    error: StepmillError
    is_new: bool


class FaultPolicy(Protocol):
    """Decides what becomes of a fault. Called by the pool's thread, between two waits; no method waits."""

    @property
    def reports_deaths(self) -> bool:
        """Whether a death is raised as an error, once, by the call that finds it."""

    @property
    def death_hint(self) -> str:
        """What an error says of the envs that a death cost."""

    def on_env_error(self, fault: EnvFault, error: StepmillError) -> list[StepmillError]:
        """Deal with an env that raised or returned something wrong while its worker goes on; return errors to raise."""

    def on_worker_death(self, death: WorkerDeath) -> list[StepmillError]:
        """Deal with the death of a worker; return errors to raise."""

    def replace_worker(self, death: WorkerDeath, delay_s: float) -> None:
        """Restart a worker, dead or alive, and deal with what its envs lose."""

    def on_restarted(self, worker: int) -> None:
        """Let a restarted worker serve, and bring its envs back to where the user believes they are."""

    def repeats_settings(self, server: int) -> bool:
        """Whether the replay of an env object repeats its settings, so that its restart need not re-apply them."""


class EnvErrorLimits:
    """Counts the errors of each env that a policy repairs: `max_env_errors` in `restart_window_s`."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._limits: dict[int, RepairLimit] = {}

    def allow(self, env_id: int, error: StepmillError) -> int | None:
        """Count an error; return its number in the window, or None, with `error` extended, if it is one too many."""
        max_errors, window_s = self._options.max_env_errors, self._options.restart_window_s
        number = self._limits.setdefault(env_id, RepairLimit(max_errors, window_s)).take()
        if number is None:
            error.message = (
                f"{error.message}; env {env_id} has failed more than {max_errors} times in {window_s:g} s "
                "(max_env_errors), so it is not reset by itself any more"
            )
            error.args = (error.message,)
        return number


def truncate_all(workers: WorkerSupervisor, faults: Sequence[EnvFault], error: StepmillError) -> None:
    """Cut short the episodes whose commands were lost; a reset is tried again."""
    for fault in faults:
        kind = "died" if fault.kind is None else fault.kind.name.lower()
        workers.state.truncate(fault.env_id, fault_info(kind, error))


def restart_and_truncate(workers: WorkerSupervisor, death: WorkerDeath, delay_s: float) -> None:
    """Restart a worker; the episodes of all its envs are cut short."""
    state, worker = workers.state, death.worker
    state.lose_envs(state.envs_of(worker), fault_info("neighbour", death.error))
    workers.begin_restart(worker, delay_s)
    truncate_all(workers, death.faults, death.error)


def fail_death(workers: WorkerSupervisor, death: WorkerDeath) -> list[StepmillError]:
    """Report a death: its envs are FAULTED until reset() or revive()."""
    if workers.state_of(death.worker) in DEAD:  # also if a call has reported it, which leaves the envs as they are
        workers.report(death.worker)
    workers.state.fail([fault.env_id for fault in death.faults])
    if death.is_new and isinstance(
        death.error, EnvError
    ):  # of a constructor: it names one env, and all of the worker are lost
        return [death.error, workers.worker_died_error(death.worker)]
    return [death.error]


class WithoutReplays:
    """What policies have in common that replay nothing: a worker that is replaced costs its envs their episodes."""

    def __init__(self, workers: WorkerSupervisor) -> None:
        self._workers = workers

    def replace_worker(self, death: WorkerDeath, delay_s: float) -> None:
        restart_and_truncate(self._workers, death, delay_s)

    def on_restarted(self, worker: int) -> None:
        self._workers.serve(worker)

    def repeats_settings(self, server: int) -> bool:
        return False
