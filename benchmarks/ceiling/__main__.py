"""The ceiling of lockstep: `python -m benchmarks.ceiling [--old CHECKOUT/.venv] [--cells 'pong-*']`, some minutes.

Each cell is run by two free loops, which never wait for each other, by a C program that does nothing but wait for all envs in each step
(`lockstep.c`, in six ways, with the measured times of the envs), and by stepmill, where `--old` names the environment of an older commit.
All take turns. The fastest of the six is what an engine could reach; everything is given as its share, also waits that cost nothing, which
are computed from the measured times. On a busy machine the six are too slow, and only the computed column and old beside new count. Raw results go to
`benchmarks/results/`, which is not kept in git.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cells import Cell
from benchmarks.engines import ENGINES, EngineSpec
from benchmarks.harness import Outcome, Plan, run_cell
from benchmarks.paths import OURS, RESULTS

ENVS = (("cartpole", 64), ("halfcheetah", 8), ("pong", 8), ("cpu200us", 8))
WAITS = ("futex", "yield", "pinned")


def make_engines(old: Path | None) -> tuple[EngineSpec, ...]:
    """Return the free loops, the six ways to wait, and stepmill, old and new."""
    loops = EngineSpec("free", "two free loops", "ceiling", OURS)
    ways = tuple(
        EngineSpec(
            f"{wait}{'-caller' * is_caller_used}",
            wait,
            "lockstep",
            OURS,
            {"wait": wait, "is_caller_used": is_caller_used},
        )
        for wait in WAITS
        for is_caller_used in (False, True)
    )
    none = EngineSpec("none", "no cost", "lockstep", OURS, {"wait": "none", "is_caller_used": False})
    new = ENGINES["stepmill-2w"]
    olds = (EngineSpec("old", new.title, new.adapter, str(old.absolute()), new.options),) if old else ()
    return (loops, none, *ways, *olds, EngineSpec("new", new.title, new.adapter, OURS, new.options))


def summarize(outcomes: dict[str, Outcome], plan: Plan) -> dict[str, Any]:
    """Return the medians of a cell in env-steps/s, the fastest way to wait, and what share others had of the machine."""
    failed = {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure}
    if failed:
        raise RuntimeError(f"{failed}; the logs are in {RESULTS / 'logs'}")
    values = {name: outcome.value(plan.rounds) or 0.0 for name, outcome in outcomes.items()}
    ways = {name: value for name, value in values.items() if name.removesuffix("-caller") in WAITS}
    foreign = [one["foreign"] for outcome in outcomes.values() for one in outcome.counted(plan.rounds)]
    return {"values": values, "best": max(ways, key=ways.__getitem__), "foreign": statistics.median(foreign)}


def show_row(title: str, result: dict[str, Any]) -> str:
    """Return a row of the table."""
    values, best = result["values"], result["best"]
    ceiling = values[best]
    shares = " | ".join(
        f"{values[name] / ceiling:.0%}" if name in values else "" for name in ("none", "free", "old", "new")
    )
    return f"| {title} | {ceiling:,.0f} | {best.replace('-', ', ')} | {shares} | {result['foreign']:.0%} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ceiling", description="The ceiling of lockstep.")
    parser.add_argument("--old", type=Path, help="the environment of an older commit, for example OLD/.venv")
    parser.add_argument("--cells", default="*", help="patterns of cartpole-64, halfcheetah-8, pong-8, cpu200us-8")
    parser.add_argument("--seconds", type=float, default=0.7, help="of a round")
    parser.add_argument(
        "--rounds", type=int, default=5, help="that count; up to thrice as many are run, until enough are quiet"
    )
    options = parser.parse_args()
    plan = Plan(options.seconds, options.rounds, 3 * options.rounds)
    results: dict[str, Any] = {}
    print(
        "| cell | ceiling, env-steps/s | its way to wait | waits without cost | free loops | old | new | of the machine, others |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for env, num_envs in ENVS:
        key = f"{env}-{num_envs}"
        if not any(fnmatch.fnmatch(key, pattern) for pattern in options.cells.split(",")):
            continue
        cell = Cell(0, key, f"{env} n={num_envs}", env, num_envs, make_engines(options.old))
        results[key] = summarize(run_cell(cell, plan, lambda _: None), plan)
        print(show_row(cell.title, results[key]), flush=True)
    print(*machine.as_markdown(machine.describe()), sep="\n")
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / time.strftime("ceiling-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(results, indent=1))
    print(f"raw results: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
