"""`stepmill bench`: the speed of stepmill and of other libraries on the user's own env, as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepmill.observe.catalog import find_env
from stepmill.observe.compare import Rounds, compare_engines, engines_against
from stepmill.observe.exit_status import complain, first_line
from stepmill.observe.policy import search_current_directory

UNIT = "env-steps per second, automatic resets included"


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The arguments of `stepmill bench`."""

    env_id: str
    against: str = "gymnasium"
    num_envs: int = 8
    rounds: int = 4
    round_seconds: float = 0.5
    env_kwargs: dict[str, object] | None = None
    is_json: bool = False
    quiet: bool = False


def _leave_out(engine: str, error: Exception) -> None:
    complain(f"{engine} is left out: {type(error).__name__}: {first_line(str(error))}")


def run_bench(request: BenchRequest) -> dict[str, float]:
    """Measure, and print the rates. Returns the rates, in env-steps per second, by engine.

    Raises:
        UsageError: the env or a library is unknown.
        MissingExtraError: a library is not installed.
    """
    from stepmill.observe.progress import BarColumn, TextColumn, TimeRemainingColumn, show_progress

    search_current_directory()
    choice = find_env(request.env_id, env_kwargs=request.env_kwargs)
    names = [name.strip() for name in request.against.split(",") if name.strip()]
    engines = engines_against(choice, request.num_envs, names)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with show_progress(*columns, is_quiet=request.quiet) as progress:
        task = progress.add_task(f"{len(engines)} engines, rounds", total=request.rounds)
        rounds = Rounds(request.rounds, request.round_seconds)
        rates = compare_engines(engines, rounds, lambda number: progress.update(task, completed=number), _leave_out)
    title = f"{request.num_envs} x {choice.env_id}"
    if request.is_json:
        about = {"env": choice.env_id, "num_envs": request.num_envs, "steps_per_s": rates}
        sys.stdout.write(f"{json.dumps(about, indent=2)}\n")
    else:
        sys.stdout.write("\n".join([f"{title}, {UNIT}", *text_bars(rates)]) + "\n")
    sys.stdout.flush()
    return rates


def text_bars(values: Mapping[str, float], width: int = 40) -> Sequence[str]:
    """Return a chart with one horizontal bar per name, the largest value first, as lines of text."""
    largest = max(values.values(), default=0.0) or 1.0
    longest = max((len(name) for name in values), default=0)
    return [
        f"{name:<{longest}}  {'█' * round(value / largest * width):<{width}}  {value:,.0f}"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
    ]
