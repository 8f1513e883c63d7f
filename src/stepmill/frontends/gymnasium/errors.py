"""Errors that are both stepmill's and Gymnasium's, so that code written for either library catches them."""

from __future__ import annotations

import multiprocessing

from gymnasium import error

from stepmill.spec.errors import BusyEnvError, ClosedPoolError, RecvTimeout, SpecMismatch, UsageError


class _CallError(UsageError):
    """An error that names a pending call, or the one that is missing, as Gymnasium's errors do."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class PendingCallError(_CallError, BusyEnvError, error.AlreadyPendingCallError):
    """A method was called while the result of another method is pending."""


class NothingPendingError(_CallError, error.NoAsyncCallError):
    """A `..._wait` method was called while no such result is pending."""


class ClosedVectorEnvError(ClosedPoolError, error.ClosedEnvironmentError):
    """The vector env is closed."""


class WaitTimeout(RecvTimeout, multiprocessing.TimeoutError):
    """The envs did not finish in time. No result is lost; wait again."""


class SpaceMismatchError(UsageError, RuntimeError):
    """The envs' spaces cannot be batched in this observation mode."""


class SpecMismatchError(SpecMismatch, SpaceMismatchError):
    """The envs' spaces differ in structure, shapes or dtypes, so the envs cannot share a pool."""


class MissingModuleError(UsageError, ModuleNotFoundError):
    """The module that should register an env cannot be imported."""
