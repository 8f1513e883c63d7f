"""The command line of `tests.chaos`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from stepmill.observe.progress import DELAY_S
from tests.chaos import ChaosReport, run_chaos
from tests.chaos.kinds import KINDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run chaos as the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=run_chaos.__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round-seconds", type=float, default=10.0)
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kind", action="append", choices=names, help="only rounds of this kind; may be repeated")
    parser.add_argument("--quiet", action="store_true", help="print nothing before the report")
    chosen = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if chosen.kind is None or kind.name in chosen.kind]
    on_pass = (lambda _report: None) if chosen.quiet else _print_pass
    with _bar(chosen.seconds, is_quiet=chosen.quiet) as on_round:
        report = run_chaos(
            chosen.seconds, chosen.seed, round_s=chosen.round_seconds, kinds=kinds, on_pass=on_pass, on_round=on_round
        )
    sys.stdout.write(f"{report}\n")
    return 1 if report.num_wrong else 0


@contextmanager
def _bar(seconds: float, *, is_quiet: bool) -> Iterator[Callable[[ChaosReport], None]]:
    """Yield a function that draws a bar, if stderr is a terminal. Without a thread: rounds fork this process."""
    columns = (TextColumn("chaos: {task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_shown = console.is_terminal and not is_quiet
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not is_shown)
    task = progress.add_task("", total=seconds)

    def draw(report: ChaosReport) -> None:
        if report.seconds > DELAY_S:
            progress.start()
        progress.update(task, description=report.now, completed=min(report.seconds, seconds), refresh=True)

    try:
        yield draw
    finally:
        progress.stop()


def _print_pass(report: ChaosReport) -> None:
    """Print what was found so far: a long run shows its failures early."""
    sys.stderr.write(f"chaos: {report.seconds:.0f} s, {report.transitions} transitions, {report.num_wrong} wrong\n")
    sys.stderr.writelines(f"  {complaint}\n" for complaint in report.wrong)


if __name__ == "__main__":
    sys.exit(main())
