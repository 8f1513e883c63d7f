"""Chooses the backend for `"auto"` without measuring, and starts the starter before the modules of a pool load."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from stepmill.backends.starter_client import prepare_starter
from stepmill.spec.errors import UsageError
from stepmill.spec.options import BackendName, PoolOptions

AUTO_WORKERS = 2
# The cost of two workers for a step of all envs, if the learner computes for longer than workers spin and must then
# wake them. See decision 0019.
WAKING_S = 68e-6


def auto_backend(num_envs: int, *, num_workers: int | None = None, step_s: float | None = None) -> BackendName:
    """Return the backend for "auto", serial or process. The result depends only on the arguments.

    Args:
        num_envs: N.
        num_workers: the option of this name. 0 means serial.
        step_s: the duration of a step in seconds, or None if it is not known. In that case workers are the safer choice
            (see decision 0019).
    """
    if num_envs == 1 or num_workers == 0:
        return BackendName.SERIAL
    # The number of cores is not used, so that a program has the same backend on all machines. It also costs more to
    # wake more workers.
    is_serial_faster = step_s is not None and num_envs // AUTO_WORKERS * step_s <= WAKING_S
    return BackendName.SERIAL if is_serial_faster else BackendName.PROCESS


def begin_start(num_envs: int, options: PoolOptions) -> None:
    """Start the starter if a pool of N envs will need it. It imports modules while the caller imports the pool."""
    choice = options.backend
    if choice is BackendName.AUTO:
        choice = auto_backend(num_envs, num_workers=options.num_workers)
    if choice is BackendName.PROCESS:
        environ = options.workers.env if isinstance(options.workers.env, Mapping) else {}
        with contextlib.suppress(OSError, UsageError):  # the start of the pool raises and explains the error
            prepare_starter(options.context, environ, options.workers.threads)
