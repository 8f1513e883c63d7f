"""Measures and prints the tables: `python -m benchmarks.run [--sections 1,4] [--cells 'noop-*'] [--engines 'stepmill*,gym*']`."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, report, startup
from benchmarks.cells import SECTIONS, Cell, all_cells
from benchmarks.harness import Outcome, Plan, run_cell
from benchmarks.paths import RESULTS

QUICK = Plan(seconds=0.3, rounds=1, max_rounds=1)
START_CELLS = {
    "start-256": ("constructor to first reset", "s"),
    "memory-256": ("PSS per env, without the slab", "MB/env"),
    "growth": ("growth over 10 million steps", "MB"),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The selected sections, and shell patterns of cells and engines."""

    sections: frozenset[int]
    cells: tuple[str, ...]
    engines: tuple[str, ...]
    is_quick: bool

    def includes_cell(self, section: int, key: str) -> bool:
        return section in self.sections and any(fnmatch.fnmatch(key, pattern) for pattern in self.cells)

    def includes_engine(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.engines)


def main() -> int:
    """Measure the selection, save the raw results, print the tables."""
    options = _parse()
    choice = Choice(options.sections, options.cells, options.engines, options.quick)
    plan = QUICK if options.quick else Plan(options.seconds, options.rounds, options.max_rounds)
    results: dict[str, Any] = {"machine": machine.describe(), "plan": dataclasses.asdict(plan), "cells": {}}
    path = options.json or RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _measure_cells(choice, plan, results, path)
        _measure_starts(choice, plan, results, path)
    except KeyboardInterrupt:
        _print_progress("interrupted; the tables contain the results so far")
        return 130
    finally:
        text = report.to_markdown(results)
        path.with_suffix(".md").write_text(text)
        print(text, end="")
        _print_progress(f"raw results: {path}")
    return 0


def _measure_cells(choice: Choice, plan: Plan, results: dict[str, Any], path: Path) -> None:
    for cell in all_cells():
        engines = tuple(spec for spec in cell.engines if choice.includes_engine(spec.name))
        if not engines or not choice.includes_cell(cell.section, cell.key):
            continue
        chosen = dataclasses.replace(cell, engines=engines)
        outcomes = run_cell(chosen, plan, _print_progress)
        results["cells"][cell.key] = {
            "section": cell.section,
            "title": cell.title,
            "unit": "%" if cell.could_run else "",
            "engines": {spec.name: _plain(chosen, spec.name, outcomes[spec.name], plan) for spec in engines},
        }
        path.write_text(json.dumps(results, indent=1))


def _plain(cell: Cell, name: str, outcome: Outcome, plan: Plan) -> dict[str, Any]:
    title = next(spec.title for spec in cell.engines if spec.name == name)
    return {
        "title": title,
        "value": None if outcome.failure else outcome.value(plan.rounds),
        "is_noisy": outcome.is_noisy(plan.rounds),
        "failure": outcome.failure,
        "start_s": outcome.start_s,
        "rounds": outcome.rounds,
    }


def _measure_starts(choice: Choice, plan: Plan, results: dict[str, Any], path: Path) -> None:
    if 5 not in choice.sections:
        return
    cells: dict[str, dict[str, Any]] = {
        key: {"section": 5, "title": title, "unit": unit, "engines": {}}
        for key, (title, unit) in START_CELLS.items()
        if choice.includes_cell(5, key)
    }
    results["cells"].update(cells)
    for case in startup.start_cases(is_quick=choice.is_quick):
        if choice.includes_engine(case.spec.name) and ("start-256" in cells or "memory-256" in cells):
            for key, engine in startup.measure_start(case, plan, _print_progress).items():
                cells.get(key, {"engines": {}})["engines"][case.spec.name] = engine
    if "growth" in cells and choice.includes_engine("stepmill-2w"):
        steps = 200_000 if choice.is_quick else startup.GROWTH_STEPS
        cells["growth"]["engines"]["stepmill-2w"] = startup.measure_growth(_print_progress, steps)
    path.write_text(json.dumps(results, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Measures stepmill and its peers.")
    parser.add_argument("--sections", type=_sections, default=frozenset(SECTIONS), help="numbers, separated by commas")
    parser.add_argument("--cells", type=_patterns, default=("*",), help="shell patterns of cells: noop-8, 'image*'")
    parser.add_argument(
        "--engines", type=_patterns, default=("*",), help="shell patterns of engines: 'stepmill*', gym-async"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: one short round each, and few envs in section 5"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a round (1.5)")
    parser.add_argument("--rounds", type=int, default=3, help="required number of quiet rounds (3)")
    parser.add_argument("--max-rounds", type=int, default=9, help="maximum number of rounds (9)")
    parser.add_argument("--json", type=Path, help="file for raw results (default: in benchmarks/results/)")
    options = parser.parse_args()
    if options.rounds < 1 or options.max_rounds < options.rounds or options.seconds <= 0:
        parser.error("rounds and seconds must be positive, and --max-rounds at least --rounds")
    return options


def _sections(text: str) -> frozenset[int]:
    numbers = frozenset(int(part) for part in text.split(","))
    if not numbers <= set(SECTIONS):
        raise argparse.ArgumentTypeError(f"sections are {', '.join(map(str, SECTIONS))}, not {text}")
    return numbers


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
