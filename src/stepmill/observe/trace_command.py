"""The command `stepmill trace`: steps an env with random actions while a trace is recorded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from stepmill.observe.catalog import EnvChoice, batch_actions, find_env
from stepmill.observe.policy import act_randomly, search_current_directory
from stepmill.observe.run import Run, RunPlan
from stepmill.observe.trace import Events, trace, write_trace
from stepmill.spec.errors import UsageError
from stepmill.spec.options import BackendName, PoolOptions

if TYPE_CHECKING:
    from stepmill.pool.pool import Pool

WARM_UP_S = 0.2


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """The arguments of `stepmill trace`."""

    env_id: str
    output: str = "trace.json"
    num_envs: int = 8
    num_workers: int | None = None
    backend: str = "auto"
    batch_size: int | None = None
    seconds: float = 0.5
    env_kwargs: dict[str, object] | None = None
    quiet: bool = False


def trace_env(request: TraceRequest) -> None:
    """Record a trace, write it, and print where it is.

    Raises:
        UsageError: there is no such env, or the file cannot be written.
    """
    batch_size = request.num_envs if request.batch_size is None else request.batch_size
    if batch_size > request.num_envs:
        raise UsageError(f"--batch-size {batch_size} is larger than --num-envs {request.num_envs}; give less")
    search_current_directory()
    events = _record(request, batch_size, find_env(request.env_id, env_kwargs=request.env_kwargs))
    write_trace(events, request.output)
    if request.quiet:
        return
    lost = f"; {events.num_lost} more were lost, record fewer envs or workers" if events.num_lost else ""
    sys.stdout.write(
        f"{events.num_events:,} events in {request.output}{lost}\nopen https://ui.perfetto.dev and drop {request.output} on it\n"
    )


def _record(request: TraceRequest, batch_size: int, choice: EnvChoice) -> Events:
    from stepmill.pool.pool import Pool

    options = PoolOptions(backend=BackendName(request.backend), num_workers=request.num_workers)
    with Pool([choice.make] * request.num_envs, batch_size=batch_size, options=options) as pool:
        drive = partial(_drive, pool, batch_size)
        drive(WARM_UP_S)
        with trace(pool) as recorder:
            drive(request.seconds)
        return recorder.events


def _drive(pool: Pool, batch_size: int, seconds: float) -> None:
    """Reset all envs, and step them with random actions."""
    plan = RunPlan(pool.num_envs, batch_size, max_seconds=seconds, seed=0)
    actions = batch_actions(pool.single_action_space, batch_size, 0)
    for _ in Run(pool, act_randomly, actions, plan).snapshots(seconds):
        pass
    pool.reset()
