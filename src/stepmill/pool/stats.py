"""Where the time went: the workers' own counters, read without disturbing them."""

from __future__ import annotations

from typing import TypedDict

from stepmill.pool.start import Running


class WorkerStats(TypedDict):
    """One worker since its start: seconds in envs and waiting for commands, env steps, resets, those tried once more."""

    worker: int
    pid: int
    env_s: float
    wait_s: float
    steps: int
    resets: int
    reset_retries: int
    is_dead: bool


class PoolStats(TypedDict):
    """A pool since its start.

    Attributes:
        leased_slots: result slots that arrays of the user hold now.
        spares_used: episodes that began with an env that was reset ahead of its time.
        spares_waited: those of them whose reset was not done yet when they were to begin.
        replay_log_bytes: memory that the logs of `on_fault="replay"` hold now.
    """

    workers: list[WorkerStats]
    steps: int
    resets: int
    leased_slots: int
    spares_used: int
    spares_waited: int
    replay_log_bytes: int


def read_outcome(running: Running, env_id: int) -> tuple[float, int, int]:
    """Return reward, flags (1 terminated, 2 truncated) and observation hash of an env's newest result."""
    return running.state.newest_outcome(env_id)


def read_stats(running: Running) -> PoolStats:
    """Return the counters as they are now."""
    workers = [
        WorkerStats(pid=pid, **running.slab.native.worker_stats(worker))  # type: ignore[typeddict-item]
        for worker, pid in enumerate(running.faults.workers.pids)
    ]
    used, waited = running.state.spare_counts()
    return PoolStats(
        workers=workers,
        steps=sum(each["steps"] for each in workers),
        resets=sum(each["resets"] for each in workers),
        leased_slots=running.state.num_held(),
        spares_used=used,
        spares_waited=waited,
        replay_log_bytes=running.state.log_bytes() + running.faults.call_log_bytes,
    )
