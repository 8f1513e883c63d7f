"""Shows a running pool on a terminal or in a notebook: `stepmill top` and `pool.monitor()`. Draws with rich.

counters ──► Watch.look() ──► View (a difference of two readings, and how long each worker has been in its env) ──► render()
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stepmill.observe.attach import AttachedPool, PoolFile, process_state
from stepmill.observe.report import clock, per_second, plural
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, UsageError
from stepmill.spec.stats import FAULT_KINDS, PoolStats, WorkerStats
from stepmill.spec.stats_text import duration_text

if TYPE_CHECKING:
    from typing_extensions import Self

STUCK_S = 1.5  # a worker that has been in one step or reset for longer is named
MAX_STRAGGLERS = 5
MAX_FAULTS = 5
BAR_WIDTH = 30
MAX_COMMAND = 60
LINES_BESIDE_WORKERS = 16
PARTS = (("step", "green"), ("reset", "yellow"), ("publish", "cyan"), ("wait", "bright_black"))
LEARNER_PARTS = (("send", "cyan"), ("wait", "bright_black"), ("gather", "magenta"), ("elsewhere", "blue"))
STATES = {"T": "stopped", "t": "traced", "Z": "ended", "D": "in a system call"}


@dataclass(frozen=True)
class View:
    """What is shown.

    Attributes:
        total: since the start of the pool.
        recent: since the last look.
        busy_for_s: by worker, for how long it has been in the same step or reset; 0 if it is in none.
        states: by worker, what the operating system says of its process, if that is worth showing.
    """

    title: str
    total: PoolStats
    recent: PoolStats
    busy_for_s: tuple[float, ...]
    states: tuple[str, ...]


class Watch:
    """Reads the counters again and again, and remembers what must be compared."""

    def __init__(self, title: str, read: Callable[[], PoolStats]) -> None:
        self._title = title
        self._read = read
        self._last = self._before = read()
        now_s = time.monotonic()
        self._since_s = [now_s] * len(self._last.workers)

    def look(self) -> View:
        """Read the counters, and compare them with those of the last look."""
        now, now_s = self._read(), time.monotonic()
        for worker, (new, old) in enumerate(zip(now.workers, self._last.workers, strict=True)):
            if new.current is None or (new.current, new.steps, new.resets) != (old.current, old.steps, old.resets):
                self._since_s[worker] = now_s
        self._before, self._last = self._last, now
        return View(
            title=self._title,
            total=now,
            recent=now - self._before,
            busy_for_s=tuple(now_s - since_s for since_s in self._since_s),
            states=tuple(_state_of(worker) for worker in now.workers),
        )


def _state_of(worker: WorkerStats) -> str:
    if worker.is_dead:
        return "dead"
    return STATES.get(process_state(worker.pid), "") if worker.pid else ""


def render(view: View, *, height: int = 40) -> Panel:
    """Return the picture of a view, at most `height` lines high if that is possible."""
    total, recent = view.total, view.recent
    head = Text.assemble(
        (f"{per_second(recent.steps_per_s)} steps/s", "bold green"),
        f", {recent.resets / max(recent.elapsed_s, 1e-9):,.1f} resets/s, {plural(total.num_envs, 'env')}, "
        f"{plural(len(total.workers), 'worker')}, up {clock(total.elapsed_s)}",
    )
    learner = Text.assemble(
        ("learner  ", "bold"),
        _bar({name: getattr(recent.learner, f"{name}_s") for name, _ in LEARNER_PARTS}, LEARNER_PARTS),
    )
    learner.append("  ").append_text(_legend(recent, LEARNER_PARTS))
    parts: list[RenderableType] = [head, learner, _workers_table(view, max(3, height - LINES_BESIDE_WORKERS))]
    parts += [part for part in (_stragglers(view), _faults(total), _notes(view)) if part is not None]
    title = Text(view.title)  # not markup: it may be the command line of any program
    return Panel(Group(*parts), title=title, title_align="left", subtitle="Ctrl-C leaves", subtitle_align="right")


def _legend(recent: PoolStats, parts: tuple[tuple[str, str], ...]) -> Text:
    span_s = max(recent.elapsed_s, 1e-9)
    legend = Text()
    for name, style in parts:
        legend.append(f"{name} {getattr(recent.learner, f'{name}_s') / span_s:.0%}  ", style)
    return legend


def _bar(seconds: dict[str, float], parts: tuple[tuple[str, str], ...]) -> Text:
    """Return one bar whose parts are shares of the sum."""
    whole = sum(seconds.values())
    bar, drawn, reached = Text(), 0, 0.0
    for name, style in parts:
        reached += seconds[name]
        end = round(reached / whole * BAR_WIDTH) if whole > 0 else 0
        bar.append("█" * (end - drawn), style)
        drawn = end
    return bar.append(" " * (BAR_WIDTH - drawn))


def _workers_table(view: View, max_rows: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("worker", "pid", "steps/s"):
        table.add_column(name, justify="right")
    table.add_column(Text.assemble(*((f"{name} ", style) for name, style in PARTS)))
    table.add_column("deaths", justify="right")
    table.add_column("restarts", justify="right")
    table.add_column("")
    rows = _chosen_workers(view, max_rows)
    for worker in rows:
        now, recent = view.total.workers[worker], view.recent.workers[worker]
        table.add_row(
            str(worker),
            str(now.pid),
            per_second(recent.steps / max(view.recent.elapsed_s, 1e-9)),
            _bar({name: getattr(recent, f"{name}_s") for name, _ in PARTS}, PARTS),
            str(now.deaths or ""),
            str(now.restarts or ""),
            _remark(view, worker),
        )
    hidden = len(view.total.workers) - len(rows)
    if hidden:
        table.add_row("", "", "", Text(f"and {plural(hidden, 'more worker')}", "dim"))
    return table


def _chosen_workers(view: View, max_rows: int) -> list[int]:
    """Return the workers that are shown, by number: those with a remark first, if there is no room for all."""
    workers = range(len(view.total.workers))
    if len(workers) <= max_rows:
        return list(workers)
    return sorted(sorted(workers, key=lambda worker: (not _remark(view, worker).plain, worker))[: max_rows - 1])


def _remark(view: View, worker: int) -> Text:
    remarks = [(view.states[worker], "bold red")] if view.states[worker] else []
    current, busy_for_s = view.total.workers[worker].current, view.busy_for_s[worker]
    if current is not None and busy_for_s > STUCK_S:
        remarks.append((f"env {current} for {duration_text(busy_for_s)}", "bold yellow"))
    return Text(", ").join(Text(text, style) for text, style in remarks)


def _stragglers(view: View) -> Table | None:
    """Return the envs with the longest steps since the last look; all their steps count if there are none since."""
    step = view.recent.step if view.recent.step.num_calls else view.total.step
    counts = step.counts.sum(axis=-1)
    if not counts.any():
        return None
    means_s = step.total_s / np.maximum(counts, 1)
    table = Table(box=None, padding=(0, 1), header_style="dim", title="longest steps", title_justify="left")
    for name in ("env", "mean", "p99", "longest", "of all", "reset p50", "faults"):
        table.add_column(name, justify="right")
    whole_s = float(step.total_s.sum())
    for server in np.argsort(-means_s, kind="stable")[:MAX_STRAGGLERS].tolist():
        if not counts[server]:
            continue
        own, resets = step.of(server), view.total.reset.of(server)
        faults = int(view.total.faults[server].sum()) if server < view.total.num_envs else 0
        table.add_row(
            str(server),
            duration_text(own.mean_s),
            duration_text(own.percentile(99)),
            duration_text(float(view.total.step.max_s[server])),
            f"{float(own.total_s) / whole_s:.0%}" if whole_s else "-",
            duration_text(resets.percentile(50)) if resets.num_calls else "-",
            str(faults or ""),
        )
    return table


def _faults(total: PoolStats) -> Text | None:
    if not total.faults.any():
        return None
    by_env = total.faults.sum(axis=1)
    worst = [env_id for env_id in np.argsort(-by_env, kind="stable")[:MAX_FAULTS].tolist() if by_env[env_id]]
    kinds = ", ".join(f"{kind} {num}" for kind, num in total.faults_by_kind.items())
    named = ", ".join(
        f"env {env_id} ({', '.join(kind for kind, num in zip(FAULT_KINDS, total.faults[env_id], strict=True) if num)})"
        for env_id in worst
    )
    return Text.assemble(("faults   ", "bold red"), f"{kinds}: {named}")


def _notes(view: View) -> Text | None:
    total = view.total
    notes = {
        "infos did not fit in the slab": int(total.spilled.sum()),
        "batches were copied because no result slot was free": total.lease_copies,
        "episodes began with a spare": total.spares_used,
        "spares were not ready": total.spares_waited,
    }
    text = ", ".join(f"{num:,} {what}" for what, num in notes.items() if num)
    return Text(text, "dim") if text else None


class _NotebookLive:
    """Draws in the output of a notebook's cell. rich's own Live needs ipywidgets for that."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._handle: Any = None

    def start(self) -> None:
        """Do nothing: the output begins with the first picture."""

    def update(self, renderable: Panel, *, refresh: bool) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # a notebook has it

        if self._handle is None:
            self._handle = display(renderable, display_id=True)
        else:
            self._handle.update(renderable)

    def stop(self) -> None:
        """Do nothing: the last picture stays."""


class Monitor:
    """Draws a pool in a thread of its own until `close`. Use it as a context manager. Writes nothing to the pool."""

    def __init__(self, title: str, read: Callable[[], PoolStats], interval_s: float, console: Console) -> None:
        self._watch = Watch(title, read)
        self._interval_s = interval_s
        self._live = _NotebookLive(console) if console.is_jupyter else Live(console=console, auto_refresh=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepmill-monitor", daemon=True)
        self._live.start()
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(ClosedPoolError):
            while not self._stop.wait(self._interval_s):
                self._draw()

    def _draw(self) -> None:
        self._live.update(render(self._watch.look(), height=self._live.console.height), refresh=True)

    def close(self) -> None:
        """Draw the pool for the last time, and end the thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(ClosedPoolError):
            self._draw()
        self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def monitor(slab: SharedSlab, interval_s: float, file: TextIO | None) -> Monitor:
    """Begin to draw a pool of this program; see `Pool.monitor`."""
    if not interval_s > 0:
        raise UsageError(f"interval_s={interval_s} must be above 0")
    read = partial(slab.read_stats, leased_slots=0, replay_log_bytes=0)
    return Monitor(f"pool of process {os.getpid()}", read, interval_s, Console(file=file))


def watch_until_end(pool: AttachedPool, interval_s: float, *, num_looks: int | None = None) -> None:
    """Draw a pool of another program until that program closes it or ends, or after `num_looks` pictures."""
    console = Console()
    title = f"{pool.file.command[:MAX_COMMAND]} (process {pool.file.pid}, {pool.description.backend} backend)"
    watch = Watch(title, pool.stats)
    looks = 0
    with Live(console=console, auto_refresh=False, screen=console.is_terminal and num_looks is None) as live:
        while pool.is_open and (num_looks is None or looks < num_looks):
            time.sleep(interval_s)
            live.update(render(watch.look(), height=console.height), refresh=True)
            looks += 1
    if not pool.is_open:
        sys.stdout.write(f"the pool of process {pool.file.pid} was closed\n")


def list_pools(pools: list[PoolFile], console: Console) -> None:
    """Print a table of pools."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("pid", "envs", "workers", "backend", "up", "program"):
        table.add_column(name)
    for pool in pools:
        about = pool.description
        cells = [f"layout {pool.layout_version}", "", "another version of stepmill", ""]
        if about is not None:
            up_s = (time.monotonic_ns() - about.began_ns) * 1e-9
            cells = [str(about.num_envs), str(len(about.servers)), about.backend, clock(up_s)]
        table.add_row(str(pool.pid), *cells, Text(pool.command[:MAX_COMMAND]))
    console.print(table)
