"""Which backend `"auto"` is; nothing is measured. And what starts before the modules of a pool are imported."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from stepmill.backends.starter_client import prepare_starter
from stepmill.spec.errors import UsageError
from stepmill.spec.options import BackendName, PoolOptions

AUTO_WORKERS = 2
# What two workers cost a step of all envs, if the learner computes for longer than workers spin and must wake them: decision 0019.
WAKING_S = 68e-6


def auto_backend(num_envs: int, *, num_workers: int | None = None, step_s: float | None = None) -> BackendName:
    """Return the backend that "auto" is: serial or process. The result depends on the arguments alone.

    Args:
        num_envs: N.
        num_workers: the option; 0 is serial.
        step_s: duration of a step in seconds, if it is known. Without it, workers are the safer choice: decision 0019.
    """
    if num_envs == 1 or num_workers == 0:
        return BackendName.SERIAL
    # The number of cores is not asked for, so that a program uses the same backend on all machines; more workers also cost more to wake.
    is_serial_faster = step_s is not None and num_envs // AUTO_WORKERS * step_s <= WAKING_S
    return BackendName.SERIAL if is_serial_faster else BackendName.PROCESS


def begin_start(num_envs: int, options: PoolOptions) -> None:
    """Start the starter, if a pool of N envs will need it: it imports its modules while the caller imports the pool's."""
    choice = options.backend
    if choice is BackendName.AUTO:
        choice = auto_backend(num_envs, num_workers=options.num_workers)
    if choice is BackendName.PROCESS:
        environ = options.workers.env if isinstance(options.workers.env, Mapping) else {}
        with contextlib.suppress(OSError, UsageError):  # the start of the pool raises it again, and says what it means
            prepare_starter(options.context, environ, options.workers.threads)
