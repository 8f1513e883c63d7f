"""The command `stepmill trace`: steps an env with random actions while a trace is recorded."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

from stepmill.observe.catalog import batch_actions, find_env
from stepmill.observe.policy import act_randomly, search_current_directory
from stepmill.observe.run import Run, RunPlan
from stepmill.observe.run_command import RunRequest
from stepmill.observe.trace import trace, write_trace
from stepmill.pool.pool import Pool

WARM_UP_S = 0.2


def trace_env(output: str, **options: Any) -> None:
    """Record a trace, write it to `output`, and print where it is. `options` are fields of RunRequest.

    Raises:
        UsageError: there is no such env, or the file cannot be written.
    """
    request = RunRequest(seed=0, **options)
    plan = request.plan()
    search_current_directory()
    choice = find_env(request.env_id, env_kwargs=request.env_kwargs)
    with Pool([choice.make] * plan.num_envs, batch_size=plan.batch_size, options=request.pool_options()) as pool:
        _drive(pool, replace(plan, max_seconds=WARM_UP_S))
        with trace(pool) as recorder:
            _drive(pool, plan)
    events = recorder.events
    write_trace(events, output)
    if request.quiet:
        return
    lost = f"; {events.num_lost} more were lost, record fewer envs or workers" if events.num_lost else ""
    sys.stdout.write(
        f"{events.num_events:,} events in {output}{lost}\nopen https://ui.perfetto.dev and drop {output} on it\n"
    )


def _drive(pool: Pool, plan: RunPlan) -> None:
    """Reset all envs, and step them with random actions."""
    actions = batch_actions(pool.single_action_space, plan.batch_size, plan.seed)
    for _ in Run(pool, act_randomly, actions, plan).snapshots(math.inf):
        pass
    pool.reset()
