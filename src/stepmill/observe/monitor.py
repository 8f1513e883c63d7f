"""Shows a running pool on a terminal or in a notebook: `stepmill top`, `stepmill run`, `stepmill.monitor`. Draws with rich.

counters ──► Watch.look() ──► View (a difference of two readings, and how long each worker has been in its env) ──► render()
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import numpy as np
from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from stepmill.observe.attach import AttachedPool, PoolFile
from stepmill.observe.report import QuietView, clock, describe, describe_silence, number, per_second, percent, plural
from stepmill.observe.run import RunPlan, Setup, Snapshot
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import ClosedPoolError, UsageError
from stepmill.spec.stats import FAULT_KINDS, LearnerStats, PoolStats, WorkerStats
from stepmill.spec.stats_text import duration_text, notes
from stepmill.worker.process_stat import process_state

STUCK_S = 1.5  # a worker that has been in one step or reset for longer is named
MAX_STRAGGLERS = 5
MAX_FAULTS = 5
BAR_WIDTH = 30
MIN_BAR_WIDTH = 8
COLUMNS_BESIDE_BAR = 64
MAX_COMMAND = 60
LINES_BESIDE_WORKERS = 9  # of borders, head, learner, headings of workers, faults, notes and the cursor
LINES_OF_STRAGGLERS = 2 + MAX_STRAGGLERS
MIN_WORKER_LINES = 2
MAX_WIDTH = 120  # columns of the picture of a run
RUN_INTERVAL_S = 0.5  # a picture of 16 workers takes 10 ms
RUN_WINDOW_S = 2.0  # a run's rates are means over these seconds
CTRL_C_ECHO = (
    "^C"  # the terminal prints it after the last line; if that line wrapped, the picture could not be erased exactly
)
ERASE_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
PARTS = (("step", "green"), ("reset", "yellow"), ("publish", "cyan"), ("wait", "bright_black"))
LEARNER_PARTS = (("send", "cyan"), ("wait", "bright_black"), ("gather", "magenta"), ("elsewhere", "blue"))
STATES = {"T": "stopped", "t": "traced", "Z": "ended", "D": "in a system call"}


@dataclass(frozen=True)
class View:
    """What is shown.

    Attributes:
        total: the statistics since the start of the pool.
        recent: the statistics since the last look, or in the last `window_s` of the watch.
        busy_for_s: by worker, the seconds that it has been in the same step or reset; 0 if it is in none.
        states: by worker, the unusual state of its process, such as dead or stopped; otherwise empty.
    """

    title: str
    total: PoolStats
    recent: PoolStats
    busy_for_s: tuple[float, ...]
    states: tuple[str, ...]


class Watch:
    """Reads the counters repeatedly, and stores earlier readings for comparisons."""

    def __init__(self, title: str, read: Callable[[], PoolStats], window_s: float = 0.0) -> None:
        self._title = title
        self._read = read
        self._window_s = window_s
        now_s = time.monotonic()
        self._readings = deque([(now_s, read())])
        self._since_s = [now_s] * len(self._readings[0][1].workers)

    def look(self) -> View:
        """Read the counters, and compare them with those of the last look, or of `window_s` ago."""
        now, now_s = self._read(), time.monotonic()
        for worker, (new, old) in enumerate(zip(now.workers, self._readings[-1][1].workers, strict=True)):
            if new.current is None or (new.current, new.steps, new.resets) != (old.current, old.steps, old.resets):
                self._since_s[worker] = now_s
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - self._window_s:
            self._readings.popleft()
        recent = now - self._readings[0][1]
        self._readings.append((now_s, now))
        return View(
            title=self._title,
            total=now,
            recent=recent,
            busy_for_s=tuple(now_s - since_s for since_s in self._since_s),
            states=tuple(_state_of(worker) for worker in now.workers),
        )


def _state_of(worker: WorkerStats) -> str:
    if worker.is_dead:
        return "dead"
    return STATES.get(process_state(worker.pid), "") if worker.pid else ""


@dataclass(frozen=True)
class Bar:
    """Bars whose parts are shares of a sum. They consist of blocks, or of first letters if only ASCII is available."""

    width: int
    is_ascii: bool

    def draw(self, stats: WorkerStats | LearnerStats, parts: tuple[tuple[str, str], ...]) -> Text:
        seconds = {name: getattr(stats, f"{name}_s") for name, _ in parts}
        whole = sum(seconds.values())
        text, drawn, reached = Text(), 0, 0.0
        for name, style in parts:
            reached += seconds[name]
            end = round(reached / whole * self.width) if whole > 0 else 0
            text.append((name[0] if self.is_ascii else "█") * (end - drawn), style)
            drawn = end
        return text.append(" " * (self.width - drawn))


def render(
    view: View, console: Console, lead: Sequence[Text] = (), *, end: str = "Ctrl-C leaves", width: int | None = None
) -> Panel:
    """Return the picture of a view, not higher than the console if that is possible, with the lines `lead` above the numbers."""
    total, recent = view.total, view.recent
    room = console.height - LINES_BESIDE_WORKERS - len(lead)
    has_stragglers = room >= MIN_WORKER_LINES + LINES_OF_STRAGGLERS
    max_rows = max(MIN_WORKER_LINES, room - LINES_OF_STRAGGLERS * has_stragglers)
    bar = Bar(max(MIN_BAR_WIDTH, min(BAR_WIDTH, console.width - COLUMNS_BESIDE_BAR)), console.options.ascii_only)
    head = Text.assemble(
        (f"{per_second(recent.steps_per_s)} steps/s", "bold green"),
        f", {recent.resets / max(recent.elapsed_s, 1e-9):,.1f} resets/s, {plural(total.num_envs, 'env')}, "
        f"{plural(len(total.workers), 'worker')}, up {clock(total.elapsed_s)}",
    )
    learner = Text.assemble(("learner  ", "bold"), bar.draw(recent.learner, LEARNER_PARTS))
    learner.append("  ").append_text(_legend(recent, LEARNER_PARTS))
    stragglers = _stragglers(view) if has_stragglers else None
    below = [part for part in (stragglers, _faults(total), _notes(total)) if part is not None]
    for line in (*lead, head, learner):
        line.no_wrap, line.overflow = True, "ellipsis"
    title = Text(view.title)  # not markup: it may be the command line of any program
    body = Group(*lead, head, learner, _workers_table(view, max_rows, bar), *below)
    return Panel(body, title=title, title_align="left", subtitle=end, subtitle_align="right", width=width)


def _legend(recent: PoolStats, parts: tuple[tuple[str, str], ...]) -> Text:
    span_s = max(recent.elapsed_s, 1e-9)
    legend = Text()
    for name, style in parts:
        legend.append(f"{name} {getattr(recent.learner, f'{name}_s') / span_s:.0%}  ", style)
    return legend


def _workers_table(view: View, max_rows: int, bar: Bar) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("worker", "pid", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(Text.assemble(*((f"{name} ", style) for name, style in PARTS)), no_wrap=True)
    table.add_column("deaths", justify="right", no_wrap=True)
    table.add_column("restarts", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    rows = _chosen_workers(view, max_rows)
    for worker in rows:
        now, recent = view.total.workers[worker], view.recent.workers[worker]
        table.add_row(
            str(worker),
            str(now.pid),
            per_second(recent.steps / max(view.recent.elapsed_s, 1e-9)),
            bar.draw(recent, PARTS),
            str(now.deaths or ""),
            str(now.restarts or ""),
            _remark(view, worker),
        )
    hidden = len(view.total.workers) - len(rows)
    if hidden:
        table.add_row("", "", "", Text(f"and {plural(hidden, 'more worker')}", "dim"))
    return table


def _chosen_workers(view: View, max_rows: int) -> list[int]:
    """Return the numbers of the workers that are shown. Those with a remark come first if there is no room for all."""
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
    """Return the envs with the longest mean step since the last look, or since the start if there were no steps."""
    step = view.recent.step if view.recent.step.num_calls else view.total.step
    counts = step.counts.sum(axis=-1)
    if not counts.any():
        return None
    means_s = step.total_s / np.maximum(counts, 1)
    table = Table(box=None, padding=(0, 1), header_style="dim", title="longest steps", title_justify="left")
    # With spares, times are those of env objects, which change their envs.
    objects = "env" if len(counts) == view.total.num_envs else "env object"
    for name in (objects, "mean", "p99", "longest", "of all", "reset p50", "faults"):
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


def _notes(total: PoolStats) -> Text | None:
    text = ", ".join(notes(total))
    return Text(text, "dim") if text else None


class _NotebookLive:
    """Draws in the output of a notebook's cell. rich's own Live needs ipywidgets for that."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._handle: Any = None

    def start(self) -> None:
        """Do nothing, because the output begins with the first picture."""

    def update(self, renderable: Panel, *, refresh: bool) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # a notebook has it

        if self._handle is None:
            self._handle = display(renderable, display_id=True)
        else:
            self._handle.update(renderable)

    def stop(self) -> None:
        """Do nothing, because the last picture stays."""


class Monitor(CloseAtEnd):
    """Draws a pool in a separate thread until `close`. Use it as a context manager. It writes nothing to the pool."""

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
        self._live.update(render(self._watch.look(), self._live.console), refresh=True)

    def close(self) -> None:
        """Draw the pool for the last time, and end the thread. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(ClosedPoolError):
            self._draw()
        self._live.stop()


def monitor(pool: Pool, interval_s: float = 1.0, *, file: TextIO | None = None) -> Monitor:
    """Draw where a pool's time goes, in a separate thread, until the returned context manager is closed.

    Args:
        pool: the pool.
        interval_s: the seconds between two pictures, more than 0.
        file: the text file to which it is drawn; None means stdout, or the output of a notebook's cell.
    Raises:
        UsageError: `interval_s` is not above 0.
    """
    if not interval_s > 0:
        raise UsageError(f"interval_s={interval_s} must be above 0")
    read = partial(PoolPort(pool).slab.read_stats, leased_slots=0, replay_log_bytes=0)
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
            live.update(render(watch.look(), console), refresh=True)
            looks += 1
    if not pool.is_open:
        sys.stdout.write(f"the pool of process {pool.file.pid} was closed\n")


class RunView(QuietView):
    """Shows `stepmill run`: the picture of its pool, with the run's progress and episodes.

    The thread that drives the pool draws it between two batches: a second thread would compete with the run for the GIL.
    """

    interval_s = RUN_INTERVAL_S

    def __init__(self, live: Live, plan: RunPlan) -> None:
        self._live = live
        self._console = live.console
        self._plan = plan
        self._about = Text()
        self._watch: Watch | None = None

    def starting(self, what: str) -> None:
        # Not with Live, which replaces stderr: a pool that takes long to start rewrites this line.
        self._console.print(Text(f"starting {what} ...", style="dim", no_wrap=True, overflow="ellipsis"), end="\r")

    def began(self, setup: Setup, read: Callable[[], PoolStats]) -> None:
        self._about = Text(describe(setup), "dim")
        self._watch = Watch(f"stepmill {setup.env_id}", read, RUN_WINDOW_S)
        self._console.control(ERASE_LINE)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        if self._watch is None:
            return
        width = min(MAX_WIDTH, self._console.width - len(CTRL_C_ECHO))
        lead = (self._about, *_progress_of(snapshot, self._plan))
        picture = render(self._watch.look(), self._console, lead, end="Ctrl-C stops", width=width)
        self._live.update(picture, refresh=True)


def _progress_of(snapshot: Snapshot, plan: RunPlan) -> list[Text]:
    """Return lines about the steps and episodes of a run, and about envs that do not answer."""
    limits = [(snapshot.steps, plan.steps), (snapshot.elapsed_s, plan.seconds)]
    done = min(1.0, max((value / limit for value, limit in limits if limit is not None), default=0.0))
    episodes = snapshot.episodes
    means = f", return {number(episodes.recent_return_mean)}, length {number(episodes.recent_length_mean)}"
    lines = [
        Text.assemble((f"{snapshot.steps:,} env-steps", "bold"), f", {percent(done)} of the run"),
        Text.assemble(
            (plural(episodes.count, "episode"), "bold"), f"{means} (means of the last 100)" * bool(episodes.count)
        ),
    ]
    if snapshot.silent:
        lines.append(Text(f"no answer from {describe_silence(snapshot)}", "bold red"))
    return lines


@contextmanager
def open_run_view(console: Console, plan: RunPlan) -> Iterator[RunView]:
    """Show a run on a terminal during the block, and restore the cursor at its end."""
    live = Live(console=console, auto_refresh=False, transient=True)
    try:
        yield RunView(live, plan)
    finally:
        live.stop()
        console.control(ERASE_LINE)


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
