"""Errors that are also instances of the classes that TorchRL's users catch."""

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
    rebuild_error,
)


class ArgumentCountError(UsageError, RuntimeError):
    """A list does not have one entry per env."""


class MissingActionError(UsageError, KeyError):
    """A tensordict has no action."""


class NotSteppedError(UsageError, RuntimeError):
    """More results are requested than tasks are running."""


class StillBusyError(BusyEnvError, RuntimeError):
    """A task was sent to an env before the result of its last task was received."""


class DeadWorkerError(WorkerDied, RuntimeError):
    """A worker died, and its envs are lost."""


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
        text = f"Cannot proceed, worker {error.worker} dead. {error.message}"
        return rebuild_error(DeadWorkerError, text, error.__dict__)
    if isinstance(error, EnvTimeout):
        text = f"Failed to run all workers within the time limit. {error.message}"
        return rebuild_error(LateWorkerError, text, error.__dict__)
    if isinstance(error, SpecMismatch):
        text = (
            f"{error.message}. (TorchRL stacks such envs lazily.) Make a StepmillEnv and a collector for each kind, "
            "or pad the spaces to one shape with a wrapper"
        )
        return rebuild_error(SpecMismatch, text, error.__dict__)
    if isinstance(error, EnvError) and error.error_type == "TypeError" and "only 4 or 5 are supported" in str(error):
        return rebuild_error(StepOutputError, error.message, error.__dict__)
    return error
