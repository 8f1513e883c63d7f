"""The statistics that `pool.stats()` returns: counters and times.

They are plain data, which `slab/counters.py` reads from shared memory. Each field is an entry of a table: from it come also the
differences, the documents, Prometheus' text and the notes of `stepmill top`.

Letters in shapes: N envs, S env objects (N and the spares), K kinds of faults, B buckets of durations.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Self

# By the number of a fault in native code.
FAULT_KINDS = ("none", "raised", "bad_output", "bad_action", "died", "timed_out", "neighbour", "interrupted")
NS = 1e-9

_Type = TypeVar("_Type")


def count(
    text: str, at: str = "", family: str = "{}_total", *, note: str = "", grows: bool = True, default: object = MISSING
) -> Any:
    """Define a number.

    Args:
        text: what it is, for documents and as the help of Prometheus.
        at: its structure and name in `_native/shared/statistics.def`; "" if it is computed.
        family: its metric of Prometheus, with {} for the name of the field; "" if it has none of its own.
        note: what a summary and `stepmill top` write after the number unless it is 0.
        grows: whether a difference of two statistics has its growth, and not its current value.
        default: its value if none is given.
    """
    return field(default=default, metadata={"text": text, "at": at, "family": family, "note": note, "grows": grows})


def state(text: str, family: str = "{}", *, default: object = MISSING) -> Any:
    """Define a fact, or a number that does not grow. The arguments are those of `count`."""
    return count(text, "", family, grows=False, default=default)


def _of_process(name: str) -> tuple[str, str]:
    return f"process.num_{name}", "worker_{}_total"


def documented(cls: type[_Type]) -> type[_Type]:
    """Write what the table says of the fields of a class in its docstring."""
    lines = "".join(f"\n        {each.name}: {each.metadata['text']}." for each in fields(cls))  # type: ignore[arg-type]
    cls.__doc__ = f"{cls.__doc__}\n\n    Attributes:{lines}\n    "
    return cls


class Statistics:
    """Statistics, of which earlier ones can be subtracted."""

    def __sub__(self, earlier: Self) -> Self:
        """Return the counts since earlier statistics of the same pool. States are the current ones."""
        names = [each.name for each in fields(cast("Any", self)) if each.metadata["grows"]]
        grown = {name: _difference(getattr(self, name), getattr(earlier, name)) for name in names}
        return cast("Self", replace(cast("Any", self), **grown))


def _difference(now: Any, earlier: Any) -> Any:
    if isinstance(now, tuple):
        return tuple(new - old for new, old in zip(now, earlier, strict=True))
    return now - earlier


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


@documented
@dataclass(frozen=True)
class WorkerStats(Statistics):
    """Statistics of one worker, or of one of its threads, since the start of the pool. On the serial backend the worker is the caller."""

    worker: int = state("the number of the worker; with `workers.threads_per_worker`, of the thread among all", "")
    pid: int = state("the pid of its newest process, or of the learner if the worker is a thread", "")
    step_s: float = count("the seconds in the envs' `step`, estimated, as not every short call is timed", "", "")
    reset_s: float = count("the seconds in the envs' `reset`, estimated likewise", "", "")
    publish_s: float = count("the seconds in which it built actions and wrote results", "", "")
    wait_s: float = count("the seconds in which it waited for commands", "worker.wait_ns", "")
    steps: int = count("the number of calls of the envs' `step`", "worker.num_steps")
    resets: int = count("the number of calls of the envs' `reset`", "worker.num_resets")
    reset_retries: int = count("the number of repeated attempts of resets", "worker.num_retries")
    restarts: int = count("how often a worker was replaced; only its first thread counts", *_of_process("restarts"))
    deaths: int = count("how often it died or was given up; only its first thread counts", *_of_process("deaths"))
    recycles: int = count("restarts by `recycle_after_episodes` or `recycle_above_mb`", *_of_process("recycles"))
    current: int | None = state("the env object whose command is running now; None if no command is running", "")
    is_dead: bool = state("whether it is dead now", "")

    @property
    def busy_s(self) -> float:
        """The seconds in which it did not wait for commands, but ran envs, built actions and wrote results."""
        return self.step_s + self.reset_s + self.publish_s

    def __sub__(self, earlier: Self) -> Self:
        """Return the counts since an earlier state of the same worker."""
        found = super().__sub__(earlier)
        return replace(found, publish_s=max(0.0, found.publish_s))


@documented
@dataclass(frozen=True)
class LearnerStats(Statistics):
    """Statistics of the program that uses the pool, since the start of the pool."""

    send_s: float = count("the seconds in which it checked and wrote actions", "learner.send_ns", "")
    wait_s: float = count("the seconds in which it waited, or on the serial backend ran envs", "learner.wait_ns", "")
    gather_s: float = count("the seconds in which it made batches of results", "learner.gather_ns", "")
    elsewhere_s: float = count("the rest of the seconds since the start, in which the program itself ran", "", "")
    sends: int = count("the number of sends, each to one or more envs", "learner.num_sends")
    batches: int = count("the number of batches of results", "learner.num_batches")


@documented
@dataclass(frozen=True)
class NodeStats(Statistics):
    """The traffic between a pool and one of its nodes, with backend="ray"."""

    node: int = state("the number of the node", "")
    address: str = state("the address of its machine", "")
    workers: tuple[int, ...] = state("the workers that it runs", "")
    messages: int = count("the number of exchanges that were sent to it", "", "node_{}_total")
    sent_bytes: int = count("the bytes of commands", "", "node_{}_total")
    received_bytes: int = count("the bytes of results", "", "node_{}_total")
    in_flight: int = state("the number of exchanges that have no answer now", "node_{}")
    restarts: int = count("how often the node was replaced", "", "node_{}_total")


@documented
@dataclass(frozen=True)
class PoolStats(Statistics):
    """Statistics of a pool since its start or, as the difference of two, between two moments.

    Without spares, an env object is an env. The EnvPool and kernel backends do not measure durations.
    """

    elapsed_s: float = count("the seconds since the start of the pool", "", "uptime_seconds")
    num_envs: int = state("the number of envs, N", "envs")
    workers: tuple[WorkerStats, ...] = count("the statistics of each worker", "", "")
    learner: LearnerStats = count("the statistics of the program that uses the pool", "", "")
    step: Durations = count("the durations of the envs' `step` by env object, [S, B]", "server.step", "{}_seconds")
    reset: Durations = count("the durations of the envs' `reset` by env object, [S, B]", "server.reset", "{}_seconds")
    faults: NDArray[np.int64] = count("faults by env and in the order of FAULT_KINDS, [N, K] int64", "env.num_faults")
    spilled: NDArray[np.int64] = count(
        "results whose payload did not fit in the slab, by env object, [S] int64",
        *("server.num_spilled", "spilled_infos_total"),
        note="infos did not fit in the slab",
    )
    spares: NDArray[np.int64] = count(
        "episodes that began with a spare, [N] int64",
        *("env.num_spares", "spares_used_total"),
        note="episodes began with a spare",
    )
    spares_waited: int = count(
        "how many of these episodes waited for the reset", "learner.num_spares_waited", note="spares were not ready"
    )
    lease_copies: int = count(
        "batches of all envs whose large observations were copied because no result slot was free",
        "learner.num_lease_copies",
        note="batches were copied because no result slot was free",
    )
    leased_slots: int = state("the number of result slots that arrays of the user hold now", default=0)
    replay_log_bytes: int = state('the current size of the logs of `on_fault="replay"`', default=0)
    nodes: tuple[NodeStats, ...] = count('the traffic with each node of backend="ray", or nothing', "", "", default=())
    backend: str = state('the name of the backend; for "auto", of the one that was chosen', "", default="")

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
    def spares_used(self) -> int:
        """The number of episodes that began with a spare."""
        return int(self.spares.sum())

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

    @property
    def totals(self) -> dict[str, float]:
        """All numbers of the pool but durations by name, those of envs as sums."""
        of = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["family"]}
        sums = {name: value.sum().item() if isinstance(value, np.ndarray) else value for name, value in of.items()}
        return {name: value for name, value in sums.items() if not isinstance(value, Durations)}

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers, lists and dicts, which JSON can represent. The durations of all envs are merged."""
        return {
            **self.totals,
            **{name: getattr(self, name) for name in ("steps", "resets", "steps_per_s")},
            **{name: getattr(self, name).to_dict() for name in ("step", "reset")},
            **{name: [asdict(each) for each in getattr(self, name)] for name in ("workers", "nodes")},
            "learner": asdict(self.learner),
            "faults": self.faults_by_kind,
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
