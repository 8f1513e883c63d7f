"""The live view: one panel, redrawn in place about five times a second. Only this file imports rich to draw a run.

The thread that drives the pool draws it between two batches, so that no second thread competes with the run for the GIL.
A panel is one Text in fixed columns. rich's tables would take a tenth of the run's time with many workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.segment import ControlType
from rich.text import Text

from stepmill.observe.frames import FramePicture, FrameSampler
from stepmill.observe.report import (
    clock,
    describe,
    describe_faults,
    describe_silence,
    number,
    per_second,
    percent,
    plural,
)
from stepmill.observe.run import RunPlan
from stepmill.observe.snapshot import Setup, Snapshot, WorkerShare

LIVE_INTERVAL_S = 0.2
MAX_WIDTH = 100
# The terminal echoes this after the panel's last line. If the line wrapped, the panel could not be erased exactly.
CTRL_C_ECHO = "^C"
# Borders and padding of the panel.
FRAME_COLUMNS = 4
# All lines except the workers': 2 of border, 1 of setup, 4 of numbers, 1 of headings, 2 blank, and the cursor's.
LINES_BESIDE_WORKERS = 12
LABEL = "{:<13}"
NUMBER = "{:>13}  "
WORKER_HEADINGS = "worker      pid    steps/s     env  waiting   "
WORKER_CELLS = "{:>6} {:>8} {:>10} {:>7} {:>8}   "
MAX_BAR_WIDTH = 40
MIN_BAR_WIDTH = 10
SPARK_WIDTH = 40
MAX_WORKERS_BELOW_FRAMES = 4
ERASE_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class LiveView:
    """A View that redraws one panel."""

    interval_s = LIVE_INTERVAL_S

    def __init__(self, live: Live, console: Console, plan: RunPlan) -> None:
        self._live = live
        self._console = console
        self._plan = plan
        self._glyphs = "_.-=+*%#.#" if console.options.ascii_only else "▁▂▃▄▅▆▇█░━"
        self._setup: Setup | None = None
        self._shown: Snapshot | None = None
        self._rates: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._sampler: FrameSampler | None = None
        self._picture: FramePicture | None = None

    def starting(self, what: str) -> None:
        # Not by Live, which replaces stderr: a pool whose start takes long rewrites this line.
        self._console.print(Text(f"starting {what} ...", style="dim", no_wrap=True, overflow="ellipsis"), end="\r")

    def began(self, setup: Setup) -> None:
        self._setup = setup
        self._console.control(ERASE_LINE)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        if self._setup is not None:
            self._rates.append(self._rate_since_shown(snapshot))
            self._shown = snapshot
            panel = self.panel(self._setup, snapshot)
            self._live.update(Group(self._picture, panel) if self._picture else panel, refresh=True)

    def sample_frames(self, render: Callable[[Sequence[int]], Sequence[object]]) -> None:
        """Render some envs a few times a second, to show them above the panel.

        Args:
            render: `pool.render`. Called while no env steps.
        Raises:
            UsageError: an env returns no picture.
        """
        if self._sampler is None:
            num_workers = min(1 if self._setup is None else self._setup.num_workers, MAX_WORKERS_BELOW_FRAMES)
            num_lines = max(1, self._console.height - LINES_BESIDE_WORKERS - num_workers)
            self._sampler = FrameSampler(self._plan.num_envs, self._console.width, num_lines, self._set_picture)
        self._sampler.sample(render)

    def _set_picture(self, picture: FramePicture) -> None:
        self._picture = picture

    def panel(self, setup: Setup, snapshot: Snapshot) -> Panel:
        """Build the panel from one snapshot and the rates before it."""
        width = min(MAX_WIDTH, self._console.width - len(CTRL_C_ECHO))
        body = Text(no_wrap=True, overflow="ellipsis")
        body.append(f"{describe(setup)}\n\n", "dim")
        self._add_numbers(body, snapshot, _bar_width(width, beside=len(LABEL.format("") + NUMBER.format("")) + 12))
        body.append("\n")
        bar_width = _bar_width(width, beside=len(WORKER_HEADINGS))
        self._add_workers(body, snapshot.workers, bar_width, bool(snapshot.faults) + bool(snapshot.silent))
        title = Text.assemble(("stepmill ", "bold"), (setup.env_id, "bold cyan"))
        end = "Ctrl-C stops"
        return Panel(body, title=title, title_align="left", subtitle=end, subtitle_align="right", width=width)

    def _rate_since_shown(self, snapshot: Snapshot) -> float:
        """Env-steps/s since the last panel. The line of blocks shows this; the printed number is an average over 2 s."""
        if self._shown is None:
            return snapshot.steps_per_s
        return (snapshot.steps - self._shown.steps) / (snapshot.elapsed_s - self._shown.elapsed_s)

    def _add_numbers(self, body: Text, snapshot: Snapshot, bar_width: int) -> None:
        episodes = snapshot.episodes
        body.append(LABEL.format("env-steps/s"), "dim")
        body.append(NUMBER.format(per_second(snapshot.recent_steps_per_s)), "bold green")
        body.append(f"{self._spark()}\n", "green")
        body.append(LABEL.format("env-steps"), "dim")
        body.append(NUMBER.format(f"{snapshot.steps:,}"))
        share = self._share_done(snapshot)
        done = round(share * bar_width)
        body.append(self._glyphs[9] * done, "green")
        body.append(self._glyphs[9] * (bar_width - done), "bright_black")
        body.append(f" {percent(share)}  {clock(snapshot.elapsed_s)}\n")
        body.append(LABEL.format("episodes"), "dim")
        body.append(NUMBER.format(f"{episodes.count:,}"))
        if episodes.count:
            latest = f"return {number(episodes.recent_return_mean)}, length {number(episodes.recent_length_mean)}"
            body.append(latest, "bold").append(", means of the last 100\n", "dim")
        else:
            body.append("none ended yet\n", "dim")
        if snapshot.faults:
            body.append(LABEL.format("faults"), "dim").append(f"{describe_faults(snapshot)}\n", "bold red")
        if snapshot.silent:
            body.append(LABEL.format("no answer"), "dim").append(f"{describe_silence(snapshot)}\n", "bold red")
        body.append(LABEL.format("this process"), "dim")
        body.append(NUMBER.format(percent(snapshot.policy_share)))
        body.append(f"in the policy, {percent(snapshot.pool_share)} in the pool\n", "dim")

    def _share_done(self, snapshot: Snapshot) -> float:
        """The share of the run that is done, 0 to 1, by the limit that is nearest."""
        shares = [0.0]
        if self._plan.max_steps is not None:
            shares.append(snapshot.steps / self._plan.max_steps)
        if self._plan.max_seconds is not None:
            shares.append(snapshot.elapsed_s / self._plan.max_seconds)
        return min(1.0, max(shares))

    def _spark(self) -> str:
        """The recent rates as a line of blocks; the highest rate has the full height."""
        top = max(self._rates, default=0.0) or 1.0
        return "".join(self._glyphs[round(rate / top * 7)] for rate in self._rates)

    def _add_workers(self, body: Text, workers: tuple[WorkerShare, ...], bar_width: int, num_warnings: int) -> None:
        body.append(WORKER_HEADINGS, "dim")
        if bar_width:
            body.append("env", "green").append(" waiting", "dim")
        num_above = 0 if self._picture is None else self._picture.num_lines
        max_lines = max(1, self._console.height - LINES_BESIDE_WORKERS - num_above - num_warnings)
        shown = workers if len(workers) <= max_lines else workers[: max(1, max_lines - 1)]
        for each in shown:
            pid = "-" if each.pid is None else each.pid
            shares = (percent(each.env_share), percent(each.wait_share))
            body.append(f"\n{WORKER_CELLS.format(each.worker, pid, per_second(each.steps_per_s), *shares)}")
            self._add_bar(body, each, bar_width)
        if len(shown) < len(workers):
            body.append(f"\n... and {plural(len(workers) - len(shown), 'more worker')}", "dim")

    def _add_bar(self, body: Text, worker: WorkerShare, width: int) -> None:
        """Draw the env share from the left end of the bar and the waiting share from the right end."""
        env = round(worker.env_share * width)
        waiting = min(round(worker.wait_share * width), width - env)
        body.append(self._glyphs[7] * env, "green")
        body.append(" " * (width - env - waiting))
        body.append(self._glyphs[8] * waiting, "dim")


@contextmanager
def open_live_view(console: Console, plan: RunPlan) -> Iterator[LiveView]:
    """Show a run on a terminal during the block, and restore the cursor at its end."""
    live = Live(console=console, auto_refresh=False, transient=True)
    try:
        yield LiveView(live, console, plan)
    finally:
        live.stop()
        console.control(ERASE_LINE)


def _bar_width(width: int, *, beside: int) -> int:
    """Return the width that is left for a bar beside the other columns; 0 if that is too little."""
    left = min(MAX_BAR_WIDTH, width - FRAME_COLUMNS - beside)
    return left if left >= MIN_BAR_WIDTH else 0
