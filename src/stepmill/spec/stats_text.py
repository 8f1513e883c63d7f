"""Writes the statistics of a pool as text for people and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stepmill.spec.stats import Durations, LearnerStats, PoolStats, WorkerStats

MAX_WORKER_LINES = 16
MAX_SLOWEST = 3  # how many env objects a summary names
LEARNER_PARTS = ("send", "wait", "gather", "elsewhere")
WORKER_PARTS = ("step", "reset", "publish", "wait")
BUCKETS_PER_BOUND = 4  # Prometheus gets one bucket for each doubling of the duration
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
Sample = tuple[Mapping[str, object], float]


def duration_text(seconds: float) -> str:
    """Return a duration with three digits and a unit: `1.25 ms`."""
    for scale, unit in UNITS:
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def summary(stats: PoolStats) -> str:
    """Return a text of a few lines that shows where the time went."""
    span_s = max(stats.elapsed_s, 1e-9)
    pool = f"{stats.num_envs:,} envs, {len(stats.workers)} workers, {duration_text(stats.elapsed_s)}"
    lines = [
        f"{pool}: {stats.steps:,} steps ({stats.steps_per_s:,.0f} per second), {stats.resets:,} resets",
        f"learner   {_shares_text(stats.learner, LEARNER_PARTS, span_s)}",
        _durations_line("step", stats.step),
        _durations_line("reset", stats.reset),
    ]
    lines += [_worker_line(worker, span_s) for worker in stats.workers[:MAX_WORKER_LINES]]
    if len(stats.workers) > MAX_WORKER_LINES:
        lines.append(f"          and {len(stats.workers) - MAX_WORKER_LINES} more workers")
    if slow := stats.slowest:
        named = ", ".join(f"{server} ({duration_text(stats.step.of(server).mean_s)})" for server in slow[:MAX_SLOWEST])
        lines.append(f"slow envs {named}{' and others' if len(slow) > MAX_SLOWEST else ''}")
    if faults := stats.faults_by_kind:
        lines.append(f"faults    {', '.join(f'{kind} {num}' for kind, num in faults.items())}")
    counts = {
        "spilled infos": int(stats.spilled.sum()),
        "copies of lendable observations": stats.lease_copies,
        "spares used": stats.spares_used,
        "spares not ready": stats.spares_waited,
    }
    lines += [f"{num:,} {name}" for name, num in counts.items() if num]
    return "\n".join(lines)


def _seconds(of: LearnerStats | WorkerStats, part: str) -> float:
    return float(getattr(of, f"{part}_s"))


def _shares_text(of: LearnerStats | WorkerStats, parts: Sequence[str], span_s: float) -> str:
    return ", ".join(f"{part} {_seconds(of, part) / span_s:.0%}" for part in parts)


def _durations_line(name: str, durations: Durations) -> str:
    if not durations.num_calls:
        return f"{name:<9} not measured"
    parts = [f"p{percent} {duration_text(durations.percentile(percent))}" for percent in (50, 90, 99)]
    return f"{name:<9} {', '.join(parts)}, longest {duration_text(float(durations.max_s.max()))}"


def _worker_line(worker: WorkerStats, span_s: float) -> str:
    shares = _shares_text(worker, WORKER_PARTS, span_s)
    events = f", {worker.deaths} deaths, {worker.restarts} restarts" if worker.deaths or worker.restarts else ""
    events += f" ({worker.recycles} recycled)" if worker.recycles else ""
    return f"worker {worker.worker:<2} {shares}{events}{', dead' if worker.is_dead else ''}"


def scalars(stats: PoolStats) -> dict[str, float]:
    """Return numbers by path. Shares are parts of the elapsed time, from 0 to 1. Shares of workers are means."""
    span_s, num = max(stats.elapsed_s, 1e-9), max(len(stats.workers), 1)
    sums_s = {part: sum(_seconds(worker, part) for worker in stats.workers) for part in WORKER_PARTS}
    found = {
        "steps_per_s": stats.steps_per_s,
        **{f"learner/{part}_share": _seconds(stats.learner, part) / span_s for part in LEARNER_PARTS},
        **{f"workers/{part}_share": sum_s / span_s / num for part, sum_s in sums_s.items()},
        "faults": float(stats.faults.sum()),
        "restarts": float(sum(worker.restarts for worker in stats.workers)),
    }
    for name, durations in (("step", stats.step), ("reset", stats.reset)):
        numbers = durations.to_dict()
        found |= {f"{name}/{key}": numbers[key] for key in ("p50_s", "p90_s", "p99_s", "max_s")}
    return found


def prometheus(stats: PoolStats) -> str:
    """Return the text format of Prometheus, version 0.0.4."""
    return "\n".join([*_times(stats), *_worker_counts(stats), *_totals(stats)]) + "\n"


def _times(stats: PoolStats) -> Iterator[str]:
    yield from _family(
        "stepmill_worker_seconds_total",
        "counter",
        "Time of workers, by activity.",
        (({"worker": w.worker, "state": part}, _seconds(w, part)) for w in stats.workers for part in WORKER_PARTS),
    )
    yield from _family(
        "stepmill_learner_seconds_total",
        "counter",
        "Time of the program that uses the pool, by activity.",
        (({"state": part}, _seconds(stats.learner, part)) for part in LEARNER_PARTS),
    )
    yield from _histogram("stepmill_step_seconds", "Durations of the envs' step().", stats.step)
    yield from _histogram("stepmill_reset_seconds", "Durations of the envs' reset().", stats.reset)


def _worker_counts(stats: PoolStats) -> Iterator[str]:
    families = {
        "stepmill_steps_total": ("Steps of envs.", "steps"),
        "stepmill_resets_total": ("Resets of envs.", "resets"),
        "stepmill_reset_retries_total": ("Repeated attempts of resets.", "reset_retries"),
        "stepmill_worker_restarts_total": ("How often workers were replaced.", "restarts"),
        "stepmill_worker_recycles_total": ("Restarts by recycle_after_episodes or recycle_above_mb.", "recycles"),
        "stepmill_worker_deaths_total": ("How often workers died or were given up.", "deaths"),
    }
    for name, (text, field) in families.items():
        yield from _family(name, "counter", text, (({"worker": w.worker}, getattr(w, field)) for w in stats.workers))


def _totals(stats: PoolStats) -> Iterator[str]:
    kinds = (({"kind": kind}, num) for kind, num in stats.faults_by_kind.items())
    yield from _family("stepmill_faults_total", "counter", "Faults of envs, by kind.", kinds)
    totals = {
        "stepmill_sends_total": ("counter", "Sends of commands, each to one or more envs.", stats.learner.sends),
        "stepmill_batches_total": ("counter", "Batches of results.", stats.learner.batches),
        "stepmill_spilled_infos_total": ("counter", "Results that did not fit in the slab.", int(stats.spilled.sum())),
        "stepmill_lease_copies_total": ("counter", "Copies because no result slot was free.", stats.lease_copies),
        "stepmill_spares_used_total": ("counter", "Episodes that began with a spare.", stats.spares_used),
        "stepmill_spares_waited_total": ("counter", "Spares that were not ready.", stats.spares_waited),
        "stepmill_leased_slots": ("gauge", "Result slots that the program holds.", stats.leased_slots),
        "stepmill_replay_log_bytes": ("gauge", "Size of the logs of episodes.", stats.replay_log_bytes),
        "stepmill_envs": ("gauge", "Envs of the pool.", stats.num_envs),
        "stepmill_uptime_seconds": ("gauge", "Time since the start of the pool.", stats.elapsed_s),
    }
    for name, (kind, text, value) in totals.items():
        yield from _family(name, kind, text, [({}, value)])


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield _sample(name, labels, value)


def _sample(name: str, labels: Mapping[str, object], value: float) -> str:
    inner = ",".join(f'{key}="{item}"' for key, item in labels.items())
    return f"{name}{{{inner}}} {value:.10g}" if inner else f"{name} {value:.10g}"


def _histogram(name: str, text: str, durations: Durations) -> Iterator[str]:
    """Yield cumulative buckets, up to the one that has the longest call."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    counts = durations.counts.reshape(-1, len(durations.stops_s)).sum(axis=0).cumsum()
    total = durations.num_calls
    for index in range(BUCKETS_PER_BOUND - 1, len(counts), BUCKETS_PER_BOUND):
        if counts[index]:
            yield _sample(f"{name}_bucket", {"le": f"{durations.stops_s[index]:.10g}"}, int(counts[index]))
        if counts[index] == total:
            break
    yield _sample(f"{name}_bucket", {"le": "+Inf"}, total)
    yield _sample(f"{name}_sum", {}, float(np.sum(durations.total_s)))
    yield _sample(f"{name}_count", {}, total)
