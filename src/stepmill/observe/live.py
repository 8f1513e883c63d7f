"""The live view: one panel, redrawn in place some eight times a second. The only file that imports rich to draw a run.

It is drawn by the thread that drives the pool, between two batches: no second thread competes with the run for the GIL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stepmill.observe.report import clock, describe, number, per_second, percent, plural
from stepmill.observe.run import RunPlan
from stepmill.observe.snapshot import Setup, Snapshot, WorkerShare

LIVE_INTERVAL_S = 0.125
SPARK_WIDTH = 40
SHARE_WIDTH = 30
MAX_WIDTH = 100
# Lines of the panel that are not a worker's: two of border, title line, rates, counts, progress, legend, blanks.
LINES_BESIDE_WORKERS = 14
SPARK_BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_ASCII = "_.-=+*%#"


@contextmanager
def open_live_view(console: Console, plan: RunPlan) -> Iterator[LiveView]:
    """Show a run on a terminal while the block lasts; the cursor comes back however it is left."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveView(live, console, plan)


class LiveView:
    """A View that redraws one panel."""

    interval_s = LIVE_INTERVAL_S

    def __init__(self, live: Live, console: Console, plan: RunPlan) -> None:
        self._live = live
        self._console = console
        self._plan = plan
        self._setup: Setup | None = None
        self._rates: deque[float] = deque(maxlen=SPARK_WIDTH)

    def starting(self, what: str) -> None:
        self._live.update(Text(f"starting {what} ...", style="dim"), refresh=True)

    def began(self, setup: Setup) -> None:
        self._setup = setup

    def show(self, snapshot: Snapshot) -> None:
        if self._setup is not None:
            self._rates.append(snapshot.recent_steps_per_s)
            self._live.update(self.panel(self._setup, snapshot), refresh=True)

    def panel(self, setup: Setup, snapshot: Snapshot) -> RenderableType:
        """Compose the whole picture from one snapshot and the rates before it."""
        body = Group(
            Text(describe(setup), style="dim"),
            Text(),
            self._numbers(snapshot),
            Text(),
            self._workers(snapshot.workers),
        )
        title = Text.assemble(("stepmill ", "bold"), (setup.env_id, "bold cyan"))
        width = min(MAX_WIDTH, self._console.width)
        return Panel(
            body, title=title, title_align="left", subtitle="Ctrl-C stops", subtitle_align="right", width=width
        )

    def _numbers(self, snapshot: Snapshot) -> Table:
        episodes = snapshot.episodes
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, justify="right", min_width=12)
        table.add_column(no_wrap=True)
        rate = Text(per_second(snapshot.recent_steps_per_s), style="bold green")
        table.add_row("env-steps/s", rate, self._spark())
        table.add_row("env-steps", f"{snapshot.steps:,}", self._progress(snapshot))
        latest = Text.assemble(
            ("return ", "dim"), (number(episodes.recent_return_mean), "bold"), (" mean   ", "dim"),
            ("length ", "dim"), (number(episodes.recent_length_mean), "bold"), (" mean, of the last 100", "dim"),
        )  # fmt: skip
        table.add_row("episodes", f"{episodes.count:,}", latest if episodes.count else Text("none ended yet", "dim"))
        table.add_row(
            "this process",
            Text(f"{percent(snapshot.policy_share)}", justify="right"),
            Text(f"in the policy, {percent(snapshot.pool_share)} in the pool", style="dim"),
        )
        return table

    def _progress(self, snapshot: Snapshot) -> RenderableType:
        """A bar towards the nearer of the two limits, with the time so far."""
        done = [0.0]
        if self._plan.max_steps is not None:
            done.append(snapshot.steps / self._plan.max_steps)
        if self._plan.max_seconds is not None:
            done.append(snapshot.elapsed_s / self._plan.max_seconds)
        row = Table.grid(padding=(0, 1))
        if len(done) > 1:
            share = min(1.0, max(done))
            row.add_row(
                ProgressBar(total=1.0, completed=share, width=SHARE_WIDTH), percent(share), clock(snapshot.elapsed_s)
            )
        else:
            row.add_row(Text("no limit", style="dim"), clock(snapshot.elapsed_s))
        return row

    def _spark(self) -> Text:
        """The recent rates as a line of blocks, the highest of them full height."""
        blocks = SPARK_ASCII if self._console.options.ascii_only else SPARK_BLOCKS
        top = max(self._rates, default=0.0) or 1.0
        heights = (int(rate / top * (len(blocks) - 1) + 0.5) for rate in self._rates)
        return Text("".join(blocks[height] for height in heights), style="green")

    def _workers(self, workers: tuple[WorkerShare, ...]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for heading in ("worker", "pid", "steps/s", "env", "waiting", "engine"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(self._legend(), no_wrap=True, width=SHARE_WIDTH)
        room = max(1, self._console.height - LINES_BESIDE_WORKERS)
        shown = workers if len(workers) <= room else workers[: room - 1]
        for each in shown:
            table.add_row(
                str(each.worker),
                "-" if each.pid is None else str(each.pid),
                per_second(each.steps_per_s),
                percent(each.env_share),
                percent(each.wait_share),
                percent(each.engine_share),
                self._share_bar(each),
            )
        if len(shown) < len(workers):
            table.add_row("...", "", Text(f"{plural(len(workers) - len(shown), 'worker')} more", style="dim"))
        return table

    def _share_bar(self, worker: WorkerShare) -> Text:
        """Env, engine and waiting as one bar of fixed width."""
        env = round(worker.env_share * SHARE_WIDTH)
        waiting = min(round(worker.wait_share * SHARE_WIDTH), SHARE_WIDTH - env)
        full, light = ("#", ".") if self._console.options.ascii_only else ("█", "░")
        return Text.assemble(
            (full * env, "green"), (full * (SHARE_WIDTH - env - waiting), "yellow"), (light * waiting, "dim")
        )

    def _legend(self) -> Text:
        return Text.assemble(("env ", "green"), ("engine ", "yellow"), ("waiting", "dim"))
