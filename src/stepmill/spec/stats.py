"""The statistics that `pool.stats()` returns: counters and times.

They are plain data, which `slab/counters.py` reads from shared memory.

Letters in shapes: N envs, S env objects (N and the spares), K kinds of faults, B buckets of durations.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Self

# By the number of a fault in native code.
FAULT_KINDS = ("none", "raised", "bad_output", "bad_action", "died", "timed_out", "neighbour", "interrupted")
NS = 1e-9

_Stats = TypeVar("_Stats", bound="WorkerStats | LearnerStats | NodeStats | PoolStats")


@dataclass(frozen=True, eq=False)
class Durations:
    """The durations of calls of one env object, or of several, as a histogram.

    Attributes:
        counts: [B] or [S, B] int64, the number of calls by bucket. Some short calls are not timed. A timed call then
            also counts for its neighbours.
        stops_s: [B], the shortest duration in seconds that is above each bucket.
        total_s: [] or [S], the sum of the durations, in seconds.
        max_s: [] or [S], the longest timed call, in seconds.
    """

    counts: NDArray[np.int64]
    stops_s: NDArray[np.float64]
    total_s: NDArray[np.float64]
    max_s: NDArray[np.float64]

    @property
    def num_calls(self) -> int:
        """The number of calls."""
        return int(self.counts.sum())

    @property
    def mean_s(self) -> float:
        """The mean duration in seconds; 0 without calls."""
        return float(self.total_s.sum()) / max(self.num_calls, 1)

    def percentile(self, percent: float) -> float:
        """Return the duration in seconds that `percent` % of the calls do not exceed, at most 25 % too large; 0 without calls."""
        counts = self.counts.reshape(-1, len(self.stops_s)).sum(axis=0)
        if not counts.any():
            return 0.0
        bucket = int(np.searchsorted(counts.cumsum(), percent / 100 * counts.sum()))
        return min(float(self.stops_s[min(bucket, len(counts) - 1)]), float(self.max_s.max()))

    def of(self, server: int) -> Durations:
        """Return the durations of one env object."""
        return Durations(self.counts[server], self.stops_s, self.total_s[server], self.max_s[server])

    def __sub__(self, earlier: Self) -> Durations:
        """Return the calls since an earlier state. `max_s` is exact only if the longest call was made since then."""
        counts = self.counts - earlier.counts
        is_used = counts > 0
        highest = counts.shape[-1] - 1 - np.argmax(is_used[..., ::-1], axis=-1)
        bound = np.where(is_used.any(axis=-1), self.stops_s[highest], 0.0)
        return Durations(counts, self.stops_s, self.total_s - earlier.total_s, np.minimum(self.max_s, bound))

    def to_dict(self) -> dict[str, float]:
        """Return the number of calls, and mean, percentiles and maximum in seconds."""
        return {
            "calls": self.num_calls,
            "total_s": float(self.total_s.sum()),
            "mean_s": self.mean_s,
            "p50_s": self.percentile(50),
            "p90_s": self.percentile(90),
            "p99_s": self.percentile(99),
            "max_s": float(self.max_s.max(initial=0.0)),
        }


def _since(now: _Stats, earlier: _Stats, counts: str) -> _Stats:
    """Return the same statistics with the fields `counts` as differences to earlier ones."""
    return replace(now, **{name: getattr(now, name) - getattr(earlier, name) for name in counts.split()})


@dataclass(frozen=True)
class WorkerStats:
    """Statistics of one worker, or of one of its threads, since the start of the pool. On the serial backend the worker is the caller.

    Attributes:
        worker: the number of the worker. With `workers.threads_per_worker`, the number of the thread, counted over all
            workers.
        pid: the pid of its newest process, or of the learner if the worker is a thread.
        step_s, reset_s: the seconds in the envs' `step` and `reset`. They are estimates, because not every short call
            is timed.
        publish_s: the seconds in which it built actions and wrote results.
        wait_s: the seconds in which it waited for commands.
        steps, resets: the number of calls of the envs' `step` and `reset`.
        reset_retries: the number of repeated attempts of resets.
        restarts, deaths: how often it was replaced, and how often it died or was given up. They are counted for its first thread only.
        current: the env object whose command is running now; None if no command is running.
        is_dead: whether it is dead now.
        recycles: how many restarts were due to `recycle_after_episodes` and `recycle_above_mb`.
    """

    worker: int
    pid: int
    step_s: float
    reset_s: float
    publish_s: float
    wait_s: float
    steps: int
    resets: int
    reset_retries: int
    restarts: int
    deaths: int
    current: int | None
    is_dead: bool
    recycles: int = 0

    @property
    def busy_s(self) -> float:
        """The seconds in which it did not wait for commands, but ran envs, built actions and wrote results."""
        return self.step_s + self.reset_s + self.publish_s

    def __sub__(self, earlier: WorkerStats) -> WorkerStats:
        """Return the counts since an earlier state of the same worker."""
        found = _since(
            self, earlier, "step_s reset_s publish_s wait_s steps resets reset_retries restarts deaths recycles"
        )
        return replace(found, publish_s=max(0.0, found.publish_s))


@dataclass(frozen=True)
class LearnerStats:
    """Statistics of the program that uses the pool, since the start of the pool.

    Attributes:
        send_s: the seconds in which it checked and wrote actions.
        wait_s: the seconds in which it waited for results. On the serial backend, the envs run in this time.
        gather_s: the seconds in which it made batches of results.
        elsewhere_s: the rest of the seconds since the start, in which the program itself ran.
        sends, batches: the number of sends, each to one or more envs, and the number of batches of results.
    """

    send_s: float
    wait_s: float
    gather_s: float
    elsewhere_s: float
    sends: int
    batches: int

    def __sub__(self, earlier: LearnerStats) -> LearnerStats:
        """Return the counts since an earlier state."""
        return _since(self, earlier, "send_s wait_s gather_s elsewhere_s sends batches")


@dataclass(frozen=True)
class NodeStats:
    """The traffic between a pool and one of its nodes, with backend="ray".

    Attributes:
        node: the number of the node.
        address: the address of its machine.
        workers: the workers that it runs.
        messages: the number of exchanges that were sent to it.
        sent_bytes, received_bytes: the bytes of commands and of results.
        in_flight: the number of exchanges that have no answer now.
        restarts: how often the node was replaced.
    """

    node: int
    address: str
    workers: tuple[int, ...]
    messages: int
    sent_bytes: int
    received_bytes: int
    in_flight: int
    restarts: int

    def __sub__(self, earlier: NodeStats) -> NodeStats:
        """Return the counts since an earlier state of the same node."""
        return _since(self, earlier, "messages sent_bytes received_bytes restarts")


@dataclass(frozen=True)
class PoolStats:
    """Statistics of a pool since its start or, as the difference of two, between two moments.

    Attributes:
        elapsed_s: the seconds since the start of the pool.
        num_envs: N.
        workers: the statistics of each worker.
        learner: the statistics of the program that uses the pool.
        step, reset: the durations of the envs' `step` and `reset` by env object, [S, B]. Without spares, an env object
            is an env. They are not measured on the EnvPool and kernel backends.
        faults: [N, K] int64, the number of faults by env, and by kind in the order of FAULT_KINDS.
        spilled: [S] int64, the number of results whose payload did not fit in the slab, by env object.
        spares: [N] int64, the number of episodes that began with a spare.
        spares_used, spares_waited: the total number of these episodes, and how many of them had to wait for the reset.
        lease_copies: the number of batches of all envs whose large observations were copied because no result slot was
            free.
        leased_slots: the number of result slots that arrays of the user hold now.
        replay_log_bytes: the current size of the logs of `on_fault="replay"`.
        nodes: the traffic with each node of backend="ray"; empty on other backends.
        backend: the name of the backend that runs the envs. For "auto", it is the one that was chosen.
    """

    elapsed_s: float
    num_envs: int
    workers: tuple[WorkerStats, ...]
    learner: LearnerStats
    step: Durations
    reset: Durations
    faults: NDArray[np.int64]
    spilled: NDArray[np.int64]
    spares: NDArray[np.int64]
    spares_used: int
    spares_waited: int
    lease_copies: int
    leased_slots: int = 0
    replay_log_bytes: int = 0
    nodes: tuple[NodeStats, ...] = ()
    backend: str = ""

    @property
    def steps(self) -> int:
        """The number of env steps of all workers."""
        return sum(worker.steps for worker in self.workers)

    @property
    def resets(self) -> int:
        """The number of resets of all workers."""
        return sum(worker.resets for worker in self.workers)

    @property
    def steps_per_s(self) -> float:
        """Env steps per second."""
        return self.steps / max(self.elapsed_s, NS)

    @property
    def faults_by_kind(self) -> dict[str, int]:
        """The number of faults of each kind that occurred."""
        return {kind: int(num) for kind, num in zip(FAULT_KINDS, self.faults.sum(axis=0), strict=True) if num}

    @property
    def slowest(self) -> list[int]:
        """The env objects whose steps take longer than twice the median of all env objects, slowest first."""
        counts = self.step.counts.sum(axis=-1)
        means = self.step.total_s / np.maximum(counts, 1)
        is_slow = (counts > 0) & (means > 2 * np.median(means[counts > 0], axis=0)) if counts.any() else counts > 0
        return [int(server) for server in np.argsort(-means) if is_slow[server]]

    def __sub__(self, earlier: PoolStats) -> PoolStats:
        """Return the counts since earlier statistics of the same pool. States are the current ones."""
        counts = "elapsed_s learner step reset faults spilled spares spares_used spares_waited lease_copies"
        return replace(
            _since(self, earlier, counts),
            workers=tuple(now - old for now, old in zip(self.workers, earlier.workers, strict=True)),
            nodes=tuple(now - old for now, old in zip(self.nodes, earlier.nodes, strict=True)),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers, lists and dicts, which JSON can represent. The durations of all envs are merged."""
        return {
            "elapsed_s": self.elapsed_s,
            "num_envs": self.num_envs,
            "steps": self.steps,
            "resets": self.resets,
            "steps_per_s": self.steps_per_s,
            "learner": asdict(self.learner),
            "workers": [asdict(worker) for worker in self.workers],
            "step": self.step.to_dict(),
            "reset": self.reset.to_dict(),
            "faults": self.faults_by_kind,
            "spilled_infos": int(self.spilled.sum()),
            "spares_used": self.spares_used,
            "spares_waited": self.spares_waited,
            "lease_copies": self.lease_copies,
            "leased_slots": self.leased_slots,
            "restarts": {"replay_log_bytes": self.replay_log_bytes},
            "nodes": [asdict(node) for node in self.nodes],
        }

    def to_scalars(self) -> dict[str, float]:
        """Return numbers by a path such as `learner/wait_share`, for TensorBoard and similar loggers."""
        from stepmill.spec.stats_text import scalars

        return scalars(self)

    def to_prometheus(self) -> str:
        """Return the counters in the text format of Prometheus, in base units."""
        from stepmill.spec.stats_text import prometheus

        return prometheus(self)

    def __str__(self) -> str:
        from stepmill.spec.stats_text import summary

        return summary(self)
