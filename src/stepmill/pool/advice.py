"""Says when a pool is closed which option would make the program faster, with what was measured: one line of the log "stepmill".

There is no advice about an option that the program gives. Nothing is measured for it: the counters are there anyway.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress

from stepmill.backends.base import traits_of
from stepmill.pool.auto_backend import WAKING_S
from stepmill.pool.start import PoolRuntime
from stepmill.pool.stats import read_stats
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import BackendName, PoolOptions
from stepmill.spec.stats import PoolStats
from stepmill.worker.signals import defer_signals

_log = logging.getLogger("stepmill")
_given: set[str] = set()  # the options about which this program has had advice
MIN_STEPS = 100  # of each env; fewer say little
MIN_GAIN_S = 2.0


def advise(stats: PoolStats, options: PoolOptions, asleep_s: float, queued_s: float) -> tuple[str, str] | None:
    """Return the option, and the advice with its reason; None if no option is known to help.

    Args:
        stats: those of the whole life of a pool with worker processes, or of a serial one.
        options: the options that the program gave.
        asleep_s: the seconds in which workers neither used a core nor waited for one, nor waited for commands.
        queued_s: the seconds in which workers waited for a core, because the machine was busy.
    """
    waited_s, envs_s = stats.learner.wait_s - queued_s, sum(worker.step_s + worker.reset_s for worker in stats.workers)
    has_default_workers = options.num_workers is None and options.envs_per_worker is None
    if stats.steps < MIN_STEPS * stats.num_envs or options.workers.threads_per_worker > 1:
        return None
    is_auto = options.backend is BackendName.AUTO
    if stats.backend == BackendName.SERIAL.value:
        gain_s = envs_s / 2 - stats.steps / stats.num_envs * WAKING_S  # with two workers
        if is_auto and stats.num_envs > 1 and options.num_workers is None and _is_worth_it(gain_s, stats.elapsed_s):
            return "backend", (
                f"the envs' own code took {envs_s:.1f} of {stats.elapsed_s:.1f} s in the program's own process; with backend='process', "
                "workers divide that among the cores (backend='serial' ends this advice)"
            )
        return None
    if is_auto and envs_s + MIN_GAIN_S < waited_s and 2 * envs_s < waited_s:
        return "backend", (
            f"the program waited {waited_s:.1f} s for workers, and the envs' own code took {envs_s:.1f} s in all of them together; "
            "with backend='serial' it does not wait for workers (backend='process' ends this advice)"
        )
    is_packed = has_default_workers and len(stats.workers) < stats.num_envs
    if (
        is_packed
        and 2 * asleep_s > envs_s
        and asleep_s > MIN_GAIN_S
        and max(each.busy_s for each in stats.workers) <= stats.elapsed_s
    ):
        return "num_workers", (
            f"the envs slept or waited in {asleep_s:.1f} s of the {envs_s:.1f} s of their steps and resets, and {stats.num_envs} envs "
            f"share {len(stats.workers)} workers, which run one env at a time; envs_per_worker=1 lets all of them wait at the same "
            f"time (num_workers={len(stats.workers)} ends this advice)"
        )
    return None


def advise_context(load_s: float, elapsed_s: float, options: PoolOptions) -> tuple[str, str] | None:
    """Return the advice to fork workers from the program, if nothing is known that a fork would break."""
    is_gpu_used = getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)()
    has_threads = threading.active_count() > 1 or not sys.modules.keys().isdisjoint(("jax", "tensorflow"))
    if not _is_worth_it(load_s, elapsed_s) or options.context is not None or is_gpu_used or has_threads:
        return None
    return "context", (
        f"a worker used a core for {load_s:.1f} s to load the functions that make its envs and to import their modules, which this "
        "program has loaded already; with context='fork' workers inherit them, if the program starts its threads and uses its GPU after it "
        "makes the pool (context='forkserver' ends this advice)"
    )


def _is_worth_it(gain_s: float, elapsed_s: float) -> bool:
    """Return whether a pool that has existed for `elapsed_s` would have gained enough for advice."""
    return gain_s > max(MIN_GAIN_S, 0.1 * elapsed_s)


def give_advice(runtime: PoolRuntime, options: PoolOptions) -> None:
    """Log the advice about a pool that is about to close, unless this program has had it."""
    traits = traits_of(runtime.backend)
    if traits.nodes is not None or not (traits.has_processes or options.backend is BackendName.AUTO):
        return
    with suppress(StepmillError, OSError, ValueError), defer_signals():  # another thread closes the pool
        stats = read_stats(runtime)
        found = advise_context(runtime.load_s, stats.elapsed_s, options) or advise(stats, options, *_times_of(stats))
        if found is not None and found[0] not in _given:
            _given.add(found[0])
            _log.warning("%s", found[1])


def _times_of(stats: PoolStats) -> tuple[float, float]:
    """Return the seconds in envs in which the workers' main threads did not run, and those in which they waited for a core; see proc(5)."""
    asleep_s = all_queued_s = 0.0
    for worker in stats.workers:
        # The worker may have ended, or the kernel does not count.
        with suppress(OSError, ValueError), open(f"/proc/{worker.pid}/schedstat", encoding="ascii") as file:
            ran_ns, queued_ns, _ = map(int, file.read().split())
            asleep_s += max(0.0, worker.step_s + worker.reset_s - (ran_ns + queued_ns) * 1e-9)
            all_queued_s += queued_ns * 1e-9
    return asleep_s, all_queued_s
