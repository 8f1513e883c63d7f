"""The command `stepmill tune`: shows the progress on a terminal, and prints the result."""

from __future__ import annotations

import json
from typing import Any

from stepmill.observe.policy import search_current_directory
from stepmill.observe.progress import show_progress
from stepmill.observe.tune import Tuner, make_request


def run_tune(*, learner_ms: float, is_json: bool, quiet: bool, **of_request: Any) -> None:
    """Search, and print the result. After a Ctrl-C, print what is known, and raise it again.

    Args:
        learner_ms: milliseconds that the program computes between two batches.
        is_json, quiet: options of the command.
        **of_request: the other arguments of `make_request`.
    Raises:
        UsageError: there is no such env.
        StepmillError: the env raised, hung or crashed.
    """
    search_current_directory()
    request = make_request(**of_request, learner_s=learner_ms / 1000)
    name = request.env.env_id
    with Tuner(request) as tuner:
        try:
            with show_progress(name, request.budget_s, is_quiet=quiet) as show:
                tuner.on_progress = lambda what, elapsed_s: show(elapsed_s, f"{name}: {what}")
                tuner.run()
        except KeyboardInterrupt:
            if not tuner.has_result:
                raise
            tuner.is_interrupted = True
        result = tuner.result()
    print(json.dumps(result.to_dict(), indent=2) if is_json else result, flush=True)
    if result.is_interrupted:
        raise KeyboardInterrupt
