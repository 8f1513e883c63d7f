"""Errors that are stepmill's and Gymnasium's at the same time: code written for either catches them."""

from __future__ import annotations

import multiprocessing

from gymnasium import error

from stepmill.spec.errors import BusyEnvError, ClosedPoolError, RecvTimeout, UsageError


class PendingCallError(BusyEnvError, error.AlreadyPendingCallError):
    """Something was asked of the envs while they are at work on something else."""

    def __init__(self, message: str, name: str) -> None:
        BusyEnvError.__init__(self, message)
        self.name = name


class NothingPendingError(UsageError, error.NoAsyncCallError):
    """A result was waited for that had not been asked for."""

    def __init__(self, message: str, name: str) -> None:
        UsageError.__init__(self, message)
        self.name = name


class ClosedVectorEnvError(ClosedPoolError, error.ClosedEnvironmentError):
    """The vector env is closed."""


class WaitTimeout(RecvTimeout, multiprocessing.TimeoutError):
    """The envs are not done in time. Nothing is lost: wait again."""


class SpaceMismatchError(UsageError, RuntimeError):
    """The envs' spaces cannot be batched in this observation mode."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument is of the wrong type."""


class MissingModuleError(UsageError, ModuleNotFoundError):
    """The module that should register an env cannot be imported."""
