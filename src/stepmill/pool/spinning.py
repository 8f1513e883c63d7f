"""Decides which cores workers use, and which threads may spin while they wait, and how long.

See decisions 0006 and 0014.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from stepmill import _native
from stepmill.backends.base import Backend
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import UsageError
from stepmill.spec.option_values import common_cores
from stepmill.spec.options import BackendName, PoolOptions
from stepmill.spec.remote_env import CallLimits
from stepmill.worker.messages import WorkerPlan

# A wake-up from a futex costs about 40 µs, and more on a core that sleeps. For shorter waits, spinning is cheaper.
SPIN_US = 200.0
FAIR_SPIN_US = 1000.0  # on kernels where a spinning thread yields its core to any thread that wants it
SIMULATOR_SPIN_US = 50.0  # on other kernels, while a worker and the simulator of an env wait for each other

_spinning: weakref.WeakSet[SharedSlab] = weakref.WeakSet()


def worker_cores(options: PoolOptions) -> int:
    """Return how many cores the workers may use together."""
    cores = _native.usable_cores()
    return min(cores, len(common_cores(options.workers.affinity) or range(cores)))


def check_affinity(choice: BackendName | Backend, options: PoolOptions, plans: Sequence[WorkerPlan]) -> None:
    """Check the cores of the option `workers.affinity`.

    Raises:
        UsageError: this process may not use a core, or the backend has no workers.
    """
    if options.workers.affinity is None:
        return
    missing = sorted({core for plan in plans for core in plan.affinity or ()} - os.sched_getaffinity(0))
    if missing:
        usable = sorted(os.sched_getaffinity(0))
        raise UsageError(
            f"workers.affinity names the cores {missing}, which this process may not use; it may use {usable}"
        )
    if choice is BackendName.SERIAL:
        raise UsageError(
            "workers.affinity is for workers, and the serial backend has none; pin your own process, or use another backend"
        )
    if choice is BackendName.KERNEL and plans[0].affinity != options.workers.affinity:
        raise UsageError("the threads of a kernel share their cores; give workers.affinity as one list of core numbers")


def set_spinning(slab: SharedSlab, options: PoolOptions, num_workers: int) -> None:
    """Set which workers of a new pool may spin, and how many threads at a time.

    Where a thread that yields its core goes behind all threads that want it, all may spin. Elsewhere a spinning thread keeps
    its core from threads that have work, so all pools of this process share usable cores - 1 permits.
    """
    num_permits, num_workers_allowed = num_workers + 1, num_workers
    if not _native.yields_fairly():
        _spinning.add(slab)
        cores = _native.usable_cores()
        share = max((cores - 1) // len(_spinning), 1) if cores > 1 else 0
        # The choice is fixed. If the first worker that waits got a permit, it would often be the worker that has just
        # woken the parent and runs on its core.
        num_permits = num_workers_allowed = min(share, worker_cores(options))
    if options.workers.threads_per_worker > 1:
        # Envs block for longer than a spin, and a thread that spins delays the others of its process.
        num_workers_allowed = 0
    slab.native.set_spinning(num_permits, num_workers_allowed, _spin_ns(options))


def simulator_spin_s(options: PoolOptions) -> float:
    """Return for how long a worker that waits for a simulator may spin, and the simulator, too. Each, and the learner, needs its own core."""
    cores = _native.usable_cores()
    num_busy = 1 if options.backend is BackendName.SERIAL else 2 * (options.num_workers or cores)
    return 1e-9 * _spin_ns(options, SIMULATOR_SPIN_US, 1e6 * CallLimits.spin_s) if num_busy < cores else 0.0


def parent_spin_ns(options: PoolOptions, num_workers: int) -> int:
    """Return how long the pool's thread may spin.

    Where yielding is not fair, it needs its own core. Otherwise it could keep the core from the worker for which it
    waits.
    """
    may_spin = _native.yields_fairly() or num_workers < _native.usable_cores()
    return _spin_ns(options) if may_spin else 0


def _spin_ns(options: PoolOptions, spin_us: float = SPIN_US, fair_spin_us: float = FAIR_SPIN_US) -> int:
    if options.tuning.spin_us is not None:
        return int(1000 * options.tuning.spin_us)
    return int(1000 * (fair_spin_us if _native.yields_fairly() else spin_us))
