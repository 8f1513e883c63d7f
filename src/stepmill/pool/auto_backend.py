"""Chooses the backend for `"auto"` without measuring, and starts the starter before the modules of a pool load."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from stepmill.backends.base import Backend
from stepmill.backends.starter_client import prepare_starter
from stepmill.spec.errors import UsageError
from stepmill.spec.options import BackendName, PoolOptions, context_of
from stepmill.spec.records import changed

EnvFn = Callable[[], object]
AUTO_WORKERS = 2
# The cost of two workers for a step of all envs, if the learner computes for longer than workers spin and must then
# wake them. See decision 0019.
WAKING_S = 68e-6
_SHORTEST_STEP_S = 4e-6  # of an env in Python
# Options that say the same wherever envs run. A program that gives another one gets workers.
_NEUTRAL = {"backend", "autoreset_mode", "seeding", "num_episodes", "copy", "episode_stats"}


def choose_backend(env_fns: Sequence[EnvFn], options: PoolOptions) -> BackendName | Backend:
    """Return the backend of the options. The result of "auto" depends only on the arguments, and on no measurement.

    "auto" is serial for one env, for no workers, and for a few envs that are known to be tiny unless an option is about workers
    or faults. Else it is process.
    """
    if options.backend is not BackendName.AUTO:
        return cast("BackendName | Backend", options.backend)
    num_envs, step_s = len(env_fns), None
    is_small = num_envs > 1 and auto_backend(num_envs, step_s=_SHORTEST_STEP_S) is BackendName.SERIAL
    # A program that has not imported Gymnasium has no functions that name its envs.
    if is_small and "gymnasium" in sys.modules and {*changed(options)} <= _NEUTRAL:
        known_steps: Any = import_module("stepmill.envs.known_steps")  # adapters are imported by name
        step_s = known_steps.longest_step_s(env_fns)
    return auto_backend(num_envs, num_workers=options.num_workers, step_s=step_s)


def auto_backend(num_envs: int, *, num_workers: int | None = None, step_s: float | None = None) -> BackendName:
    """Return the backend for "auto", serial or process.

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


def begin_start(env_fns: Sequence[EnvFn], options: PoolOptions) -> None:
    """Start the starter if a pool of these envs will need it. It imports modules while the caller imports the pool."""
    if choose_backend(env_fns, options) is BackendName.PROCESS:
        environ = options.workers.env if isinstance(options.workers.env, Mapping) else {}
        with contextlib.suppress(OSError, UsageError):  # the start of the pool raises and explains the error
            prepare_starter(context_of(options), environ, options.workers.threads)
