"""Writes the statistics of a pool as text for people and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np

from stepmill.spec.stats import Durations, LearnerStats, PoolStats, WorkerStats

MAX_WORKER_LINES = 16
MAX_SLOWEST = 3  # how many env objects a summary names
LEARNER_PARTS, WORKER_PARTS = (
    tuple(each.name[:-2] for each in fields(kind) if each.name.endswith("_s")) for kind in (LearnerStats, WorkerStats)
)
BUCKETS_PER_BOUND = 4  # Prometheus gets one bucket for each doubling of the duration
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
Sample = tuple[Mapping[str, object], float]
Labelled = Sequence[tuple[Mapping[str, object], Any]]


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
    lines += notes(stats)
    return "\n".join(lines)


def notes(stats: PoolStats) -> list[str]:
    """Return the counts of the pool that have a note and are not 0, such as `3 spares were not ready`."""
    totals = stats.totals
    counted = [(totals[each.name], each.metadata["note"]) for each in fields(stats) if each.metadata["note"]]
    return [f"{num:,} {note}" for num, note in counted if num]


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
    learner: Labelled = [({}, stats.learner)]
    workers: Labelled = [({"worker": worker.worker}, worker) for worker in stats.workers]
    nodes: Labelled = [({"node": node.node}, node) for node in stats.nodes]
    times = [
        _times("stepmill_worker_seconds_total", "Seconds of workers, by activity.", WORKER_PARTS, workers),
        _times("stepmill_learner_seconds_total", "Seconds of the program, by activity.", LEARNER_PARTS, learner),
    ]
    return "\n".join(chain(*times, *map(_families, ([({}, stats)], learner, workers, nodes)))) + "\n"


def _times(name: str, text: str, parts: Sequence[str], of: Labelled) -> Iterator[str]:
    samples = (({**labels, "state": part}, _seconds(stats, part)) for labels, stats in of for part in parts)
    yield from _family(name, text, samples)


def _families(of: Labelled) -> Iterator[str]:
    """Yield the families of the fields of statistics of one class, each with its labels."""
    for each in fields(of[0][1]) if of else ():
        name = f"stepmill_{each.metadata['family'].format(each.name)}"
        text = f"{each.metadata['text'][0].upper()}{each.metadata['text'][1:]}."
        values = [(labels, getattr(stats, each.name)) for labels, stats in of]
        if each.name == "faults":
            yield from _family(name, text, (({"kind": kind}, num) for kind, num in of[0][1].faults_by_kind.items()))
        elif isinstance(values[0][1], Durations):
            yield from _histogram(name, text, values[0][1])
        elif each.metadata["family"]:
            yield from _family(name, text, ((labels, np.sum(value)) for labels, value in values))


def _family(name: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
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
