"""Shows a run without a terminal: periodic plain lines, a summary as text, a summary as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import mean
from types import SimpleNamespace
from typing import TYPE_CHECKING, TextIO

from stepmill.observe.run import Setup, Snapshot

if TYPE_CHECKING:
    from stepmill.spec.stats import PoolStats

PLAIN_INTERVAL_S = 2.0
MAX_WORKER_LINES = 16
MAX_SILENT = 8  # envs that do not answer, by their ids


class QuietView:
    """An output that shows a run while it lasts. This one shows nothing before the summary."""

    interval_s = math.inf

    def starting(self, what: str) -> None:
        """Called when the envs are about to be built; `what` describes them."""

    def began(self, setup: Setup, read: Callable[[], PoolStats]) -> None:
        """Called when all envs are built and the run begins; `read` returns the pool's statistics."""

    def show(self, snapshot: Snapshot) -> None:
        """Called about every `interval_s` seconds."""


class PlainView(QuietView):
    """Writes one line every `interval_s` seconds, for logs and pipes."""

    interval_s = PLAIN_INTERVAL_S

    def __init__(self, stream: TextIO) -> None:
        self._write = partial(print, file=stream, flush=True)

    def starting(self, what: str) -> None:
        self._write(f"starting {what}")

    def began(self, setup: Setup, read: Callable[[], PoolStats]) -> None:
        self._write(describe(setup))

    def show(self, snapshot: Snapshot) -> None:
        self._write(plain_line(snapshot))


def plain_line(snapshot: Snapshot) -> str:
    """Return one line for a log: time, steps, rate, episodes with the latest means, and shares of the workers' time."""
    parts = [
        f"{snapshot.elapsed_s:.1f} s",
        f"{snapshot.steps:,} env-steps",
        f"{per_second(snapshot.recent.steps_per_s)} env-steps/s",
        f"{snapshot.episodes.count:,} episodes",
        f"return {number(snapshot.episodes.recent_return_mean)}",
        f"length {number(snapshot.episodes.recent_length_mean)}",
    ]
    if faults := describe_faults(snapshot):
        parts.append(f"faults: {faults}")
    if workers := snapshot.workers():
        env_share, wait_share = (mean(each[share] for each in workers) for share in ("env_share", "wait_share"))
        parts.append(f"env {percent(env_share)} waiting {percent(wait_share)}")
    if snapshot.silent:
        parts.append(f"no answer from {describe_silence(snapshot)}")
    return " · ".join(parts)


def summary_text(setup: Setup, totals: Snapshot, *, is_interrupted: bool) -> str:
    """Return the summary at the end of a run as text."""
    ending, faults = ", interrupted" if is_interrupted else "", describe_faults(totals)
    lines = [
        f"{setup.env_id}: {describe(setup)}{ending}",
        _field("env-steps", f"{totals.steps:,} in {totals.elapsed_s:.2f} s, {per_second(totals.steps_per_s)}/s"),
        _field("episodes", _describe_episodes(totals.episodes)),
        *([_field("faults", faults)] if faults else []),
        _field("start", f"{setup.start_s:.2f} s until all envs were built"),
        _field(
            "this process", f"{percent(totals.policy_share)} in the policy, {percent(totals.pool_share)} in the pool"
        ),
    ]
    workers = totals.workers()
    for each in workers[:MAX_WORKER_LINES]:
        shares = f"env {percent(each['env_share'])}, waiting {percent(each['wait_share'])}"
        lines.append(_field(f"worker {each['worker']}", f"{shares}, {per_second(each['steps_per_s'])} steps/s"))
    if len(workers) > MAX_WORKER_LINES:
        lines.append(_field("...", f"{len(workers) - MAX_WORKER_LINES} more workers; --json lists all"))
    return "\n".join(lines)


def summary_json(setup: Setup, totals: Snapshot, *, is_interrupted: bool) -> str:
    """Return the summary as one JSON object with the fields of Setup and Snapshot. NaN becomes null."""
    document = {
        **asdict(setup),
        **vars(totals),
        "steps_per_s": totals.steps_per_s,
        "episodes": vars(totals.episodes),
        "workers": totals.workers(),
        "faults": totals.total.faults_by_kind,
        "interrupted": is_interrupted,
    }
    del document["total"], document["recent"]
    return json.dumps(_without_nan(document), indent=2)


def describe(setup: Setup) -> str:
    """Return one phrase about the run: `64 envs in 2 workers (process), batches of 64, random policy, seed 0`."""
    parts = [
        f"{plural(setup.num_envs, 'env')} in {plural(setup.num_workers, 'worker')} ({setup.backend})",
        f"batches of {setup.batch_size}",
        "random policy" if setup.policy == "random" else f"policy {setup.policy}",
    ]
    if setup.is_atari:
        parts.append("Atari preprocessing")
    if setup.seed is not None:
        parts.append(f"seed {setup.seed}")
    return ", ".join(parts)


def describe_faults(snapshot: Snapshot) -> str:
    """Return one phrase about the faults that the fault policy absorbed: `8 timed out, 1 raised`."""
    names, kinds = {"neighbour": "lost with another env"}, snapshot.total.faults_by_kind.items()
    return ", ".join(f"{count:,} {names.get(kind, kind.replace('_', ' '))}" for kind, count in kinds)


def describe_silence(snapshot: Snapshot) -> str:
    """Return one phrase about the envs that do not answer: `envs 0, 3 for 12 s`."""
    shown = ", ".join(str(env) for env in snapshot.silent[:MAX_SILENT])
    others = len(snapshot.silent) - MAX_SILENT
    ids = f"{shown} and {plural(others, 'other')}" if others > 0 else shown
    return f"env{'s' * (len(snapshot.silent) > 1)} {ids} for {snapshot.silence_s:.0f} s"


def per_second(rate: float) -> str:
    """Return a rate with three or more digits: `812,345`, `97.4`, `0.35`."""
    if rate >= 1000:
        return f"{rate:,.0f}"
    return f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def clock(seconds: float) -> str:
    """Return minutes and seconds: `1:05`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _field(name: str, text: str) -> str:
    return f"  {name:<13} {text}"


def _describe_episodes(episodes: SimpleNamespace) -> str:
    if not episodes.count:
        return "none ended"
    returns = (
        f"mean {number(episodes.return_mean)} (min {number(episodes.return_min)}, max {number(episodes.return_max)})"
    )
    return f"{episodes.count:,}, return {returns}, length mean {number(episodes.length_mean)}"


def _without_nan(value: object) -> object:
    """Replace NaN and infinities by None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
