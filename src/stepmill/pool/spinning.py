"""Who may spin while it waits, and for how long. See decisions 0006 and 0014."""

from __future__ import annotations

import weakref

from stepmill import _native
from stepmill.slab.memory import SharedSlab
from stepmill.spec.options import PoolOptions

# A wake-up from a futex costs about 40 µs, more on a core that sleeps: who is called again sooner should not have slept.
SPIN_US = 200.0
FAIR_SPIN_US = 1000.0  # where who spins takes a core from nobody

_spinning: weakref.WeakSet[SharedSlab] = weakref.WeakSet()


def worker_cores(options: PoolOptions) -> int:
    """Return how many cores the workers have together."""
    cores = _native.usable_cores()
    return cores if options.affinity is None else min(cores, len(options.affinity))


def set_spinning(slab: SharedSlab, options: PoolOptions, num_workers: int) -> None:
    """Say which workers of a new pool may spin, and how many threads at a time.

    All, where who yields a core stands behind all that want it. Else who spins keeps the core from who has work, and
    threads share usable cores - 1 permits, those of all pools of this process.
    """
    num_permits, num_workers_allowed = num_workers + 1, num_workers
    if not _native.yields_fairly():
        _spinning.add(slab)
        cores = _native.usable_cores()
        share = max((cores - 1) // len(_spinning), 1) if cores > 1 else 0
        # Who may spin is fixed: if it were whoever comes first, it would often be who just rang the parent, on its core.
        num_permits = num_workers_allowed = min(share, worker_cores(options))
    slab.native.set_spinning(num_permits, num_workers_allowed, _spin_ns(options))


def parent_spin_ns(options: PoolOptions, num_workers: int) -> int:
    """Return how long the parent may spin.

    Where yielding is not fair it needs a core to itself: else it would keep the worker from it that it waits for.
    """
    may_spin = _native.yields_fairly() or num_workers < _native.usable_cores()
    return _spin_ns(options) if may_spin else 0


def _spin_ns(options: PoolOptions) -> int:
    if options.spin_us is not None:
        return int(1000 * options.spin_us)
    return int(1000 * (FAIR_SPIN_US if _native.yields_fairly() else SPIN_US))
