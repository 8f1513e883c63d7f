"""The command `stepmill tune`: shows the progress on a terminal, and prints the result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepmill.observe.policy import search_current_directory
from stepmill.observe.tune import BUDGET_S, LEARNER_S, TIME_LIMIT_S, OnProgress, Phase, Tuner, make_request


@dataclass(frozen=True, kw_only=True)
class TuneArguments:
    """The arguments of `stepmill tune`."""

    env_id: str
    num_envs: int = 8
    budget_s: float = BUDGET_S
    is_async: bool | None = None
    learner_ms: float = 1000 * LEARNER_S
    step_timeout: float = TIME_LIMIT_S
    env_kwargs: dict[str, object] | None = None
    atari: bool | None = None
    is_json: bool = False
    quiet: bool = False


def run_tune(arguments: TuneArguments) -> None:
    """Search, and print the result. After a Ctrl-C, print what is known, and raise it again.

    Raises:
        UsageError: there is no such env.
        StepmillError: the env raised, hung or crashed.
    """
    search_current_directory()
    request = make_request(
        arguments.env_id,
        arguments.num_envs,
        budget_s=arguments.budget_s,
        is_async=arguments.is_async,
        learner_s=arguments.learner_ms / 1000,
        step_timeout_s=arguments.step_timeout,
        env_kwargs=arguments.env_kwargs,
        atari=arguments.atari,
    )
    with Tuner(request) as tuner:
        try:
            with _progress(request.name, request.budget_s, is_quiet=arguments.quiet) as tuner.on_progress:
                tuner.run()
        except KeyboardInterrupt:
            if not tuner.has_result:
                raise
            tuner.is_interrupted = True
        result = tuner.result()
    sys.stdout.write(f"{json.dumps(result.to_dict(), indent=2) if arguments.is_json else result}\n")
    sys.stdout.flush()
    if result.is_interrupted:
        raise KeyboardInterrupt


@contextmanager
def _progress(name: str, budget_s: float, *, is_quiet: bool) -> Iterator[OnProgress]:
    """Show a bar of the budget on a terminal."""
    from stepmill.observe.progress import (
        BarColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        show_progress,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with show_progress(*columns, is_quiet=is_quiet) as progress:
        task = progress.add_task(name, total=budget_s)

        def show(phase: Phase, elapsed_s: float) -> None:
            progress.update(task, description=f"{name}: {phase.value}", completed=elapsed_s)

        yield show
