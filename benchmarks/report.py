"""Tables from raw results: `python -m benchmarks.report RESULTS.json [MORE.json]`.

If several files contain a cell of an engine, the last file counts. With `--docs` the short tables are written into docs/performance.md
(benchmarks/readme.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cells import SECTIONS
from benchmarks.engines import ENGINES
from benchmarks.targets import TARGETS, Target

Cells = dict[str, dict[str, Any]]
OURS_TITLE = "**stepmill**"


def to_markdown(results: dict[str, Any]) -> str:
    """Return all tables of a run, each followed by its targets and by the engines that failed."""
    plan = results["plan"]
    lines = ["# stepmill benchmarks", "", *machine.as_markdown(results["machine"])]
    lines.append(
        f"- Rounds of {plan['seconds']} s, engines of a cell interleaved, medians over at least {plan['rounds']} quiet rounds; "
        "† marks cells with too few quiet rounds, whose quietest rounds count."
    )
    cells: Cells = results["cells"]
    for section, title in SECTIONS.items():
        group = {key: cell for key, cell in cells.items() if cell["section"] == section}
        if group:
            lines += ["", f"## {section}. {title}", "", *_table(group), "", *_targets(group), *_failures(group)]
    return "\n".join(lines) + "\n"


def merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the results of several runs; later runs take precedence."""
    merged: dict[str, Any] = {**parts[-1], "cells": {}}
    cells: Cells = merged["cells"]
    for part in parts:
        for key, cell in part["cells"].items():
            known = cells.setdefault(key, {**cell, "engines": {}})
            known["engines"].update(cell["engines"])
    return merged


def show_value(value: float | None, cell: dict[str, Any]) -> str:
    """Return a value in its cell's unit: 1.16M, 289k, 62.6 %, 0.18 s."""
    if value is None:
        return "failed"
    unit = cell["unit"]
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit:
        return f"{value:.3g} {unit}"
    if value >= 1e6:
        return f"{value / 1e6:.2f}M"
    if value < 1e3:
        return f"{value:.0f}"
    return f"{value / 1e3:.0f}k" if value >= 1e5 else f"{value / 1e3:.1f}k"


def _table(cells: Cells) -> list[str]:
    # There is one row per title: an engine with another configuration in another cell has another title.
    titles = list(dict.fromkeys(engine["title"] for cell in cells.values() for engine in cell["engines"].values()))
    head = "| | " + " | ".join(cell["title"] for cell in cells.values()) + " |"
    lines = [head, "|---|" + "---|" * len(cells)]
    for title in sorted(titles, key=lambda title: title.startswith(OURS_TITLE)):
        row = [_entry(cell, title) for cell in cells.values()]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    return lines


def _entry(cell: dict[str, Any], title: str) -> str:
    engine = next((engine for engine in cell["engines"].values() if engine["title"] == title), None)
    if engine is None:
        return "–"
    return show_value(engine["value"], cell) + ("†" if engine["is_noisy"] and engine["value"] is not None else "")


def _targets(cells: Cells) -> list[str]:
    rows = [_judge(target, cells[target.cell]) for target in TARGETS if target.cell in cells]
    rows = [row for row in rows if row]
    return ["| cell | target | reached | |", "|---|---|---|---|", *rows] if rows else []


def _judge(target: Target, cell: dict[str, Any]) -> str:
    ours, our_name = _best(cell, target.ours, smallest=target.at_most)
    if our_name is None:
        return ""
    theirs, their_name = _best(cell, target.theirs)
    our_title = cell["engines"][our_name]["title"].replace("**", "")
    wanted = f"{our_title} {'≤' if target.at_most else '≥'} {_bound(target, cell, their_name)}"
    if ours is None or (target.theirs and not theirs):
        return f"| {cell['title']} | {wanted} | not measured | ? |"
    reached = ours / theirs if theirs else ours
    is_met = reached <= target.factor if target.at_most else reached >= target.factor
    shown = f"{reached:.3g}×" if theirs else show_value(ours, cell)
    verdict = "met" if is_met else "**missed**" + (f" (later: {target.later})" if target.later else "")
    return f"| {cell['title']} | {wanted} | {shown} | {verdict} |"


def _bound(target: Target, cell: dict[str, Any], their_name: str | None) -> str:
    if not target.theirs:
        return show_value(target.factor, cell)
    name = their_name or target.theirs[0]
    title = (cell["engines"][name]["title"] if name in cell["engines"] else ENGINES[name].title).replace("**", "")
    best = "best of " if len(target.theirs) > 1 else ""
    return f"{target.factor:g}× {best}{title}"


def _best(cell: dict[str, Any], names: Sequence[str], *, smallest: bool = False) -> tuple[float | None, str | None]:
    """Return the best value among engines, and the engine's name. Without any value, return the first engine present."""
    present = [name for name in names if name in cell["engines"]]
    valued = [(cell["engines"][name]["value"], name) for name in present if cell["engines"][name]["value"] is not None]
    if not valued:
        return None, present[0] if present else None
    return min(valued) if smallest else max(valued)


def _failures(cells: Cells) -> list[str]:
    lines = [
        f"- {engine['title']}, {cell['title']}: {engine['failure']}"
        for cell in cells.values()
        for engine in cell["engines"].values()
        if engine["failure"]
    ]
    return ["", "Not measured:", "", *sorted(set(lines))] if lines else []


def main() -> None:
    """Print the tables of one or more raw results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Tables from raw results.")
    parser.add_argument("results", nargs="+", type=Path)
    print(to_markdown(merge([json.loads(path.read_text()) for path in parser.parse_args().results])), end="")


if __name__ == "__main__":
    main()
