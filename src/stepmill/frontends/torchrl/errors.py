"""Errors that are also of the classes that TorchRL's users catch."""

from __future__ import annotations

from stepmill.spec.errors import (
    BusyEnvError,
    EnvError,
    EnvTimeout,
    MissingExtraError,
    SpecMismatch,
    StepmillError,
    UsageError,
    WorkerDied,
)


class ArgumentTypeError(UsageError, TypeError):
    """An argument is missing, or of a wrong type."""


class ArgumentCountError(UsageError, RuntimeError):
    """A list does not have one entry per env."""


class NotSteppedError(UsageError, RuntimeError):
    """More results are requested than tasks are running."""


class StillBusyError(BusyEnvError, RuntimeError):
    """An env was sent a task before the result of its last one was received."""


class DeadWorkerError(WorkerDied, RuntimeError):
    """A worker died, and with it its envs."""


class LateWorkerError(EnvTimeout, RuntimeError):
    """An env took longer than its deadline, and its worker was killed."""


class StepOutputError(EnvError, TypeError):
    """A pool's step returned neither 4 nor 5 values."""


class MissingEnvPoolError(MissingExtraError):
    """EnvPool is not installed."""

    def __init__(self) -> None:
        super().__init__(module="envpool", extra="envpool")
        self.message = (
            "envpool python package or one of its dependencies (gym, treevalue) were not found. Please install these "
            f"dependencies. {self.message}"
        )


def translated(error: StepmillError) -> StepmillError:
    """Return an error that is also of TorchRL's class and has its text, or the error itself if TorchRL has none like it."""
    if isinstance(error, WorkerDied):
        dead: StepmillError = DeadWorkerError(
            f"Cannot proceed, worker {error.worker} dead. {error.message}",
            worker=error.worker,
            env_ids=error.env_ids,
            exit_code=error.exit_code,
            signal_name=error.signal_name,
        )
    elif isinstance(error, EnvTimeout):
        dead = LateWorkerError(
            f"Failed to run all workers within the time limit. {error.message}",
            env_id=error.env_id,
            phase=error.phase,
            timeout_s=error.timeout_s,
            env_ids=error.env_ids,
        )
    elif isinstance(error, SpecMismatch):
        return SpecMismatch(
            f"{error.message}. (TorchRL stacks such envs lazily.) Make a StepmillEnv and a collector for each kind, "
            "or pad the spaces to one shape with a wrapper",
            specs=error.specs,
        )
    elif isinstance(error, EnvError) and error.error_type == "TypeError" and "only 4 or 5 are supported" in str(error):
        dead = StepOutputError(
            error.message,
            env_id=error.env_id,
            phase=error.phase,
            error_type=error.error_type,
            remote_traceback=error.remote_traceback,
        )
    else:
        return error
    dead.others = error.others
    return dead
