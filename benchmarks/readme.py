"""The tables of measured numbers in docs/performance.md and README.md.

`python -m benchmarks.readme RESULTS.json [MORE.json]` writes the value of each engine into docs/performance.json, and the tables that are
made from it. `python -m benchmarks.readme --check` fails if a table is not the one that this file gives.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import all_cells
from benchmarks.engines import ENGINES
from benchmarks.paths import OURS, PEERS, ROOT
from benchmarks.report import OURS_TITLE, Cells, merge, show_value
from benchmarks.targets import TARGETS

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
VALUES = ROOT / "docs" / "performance.json"
MARKS = "<!-- {}:begin -->", "<!-- {}:end -->"
COMMAND = "`make bench-setup bench`, then `python -m benchmarks.readme benchmarks/results/FILE.json`"
_SECTIONS = {1: "no-op env", 2: "images", 3: "efficiency", 4: ""}
_START_SECTION = 5
FRONTENDS_SECTION = 7
NOOP_SECTION = 1
# By the first part of the names of its engines. EnvPool and ALE run envs in C++.
LIBRARIES = {
    "gym": "Gymnasium",
    "sb3": "SB3",
    "tianshou": "Tianshou",
    "torchrl": "TorchRL",
    "diengine": "DI-engine",
    "puffer": "PufferLib",
    "envpool": "EnvPool",
    "ale": "ALE",
}
README_CELLS = ("noop-32", "image84-32", "cpu-32", "cartpole-64", "kernel-cartpole-64", "halfcheetah-8", "pong-8")
WIDTH = 120
NOISY = "† The machine was never quiet for three rounds. The value is that of the quietest rounds, and is less certain."
_BOUNDS = frozenset({"bare", "ceiling"})  # not engines, but upper bounds
_GYMNASIUM = "gym"

_LIBRARY = re.compile(r"^(DI-engine|TorchRL over EnvPool), ")  # a cell's title names it, and so does the engine's

Engine = dict[str, Any]


def summarize(results: dict[str, Any]) -> dict[str, Any]:
    """Return what the tables need of the results: the machine, the plan, and the value of each engine."""
    cells = {
        key: {
            **{name: cell[name] for name in ("section", "title", "unit")},
            "engines": {
                name: {
                    "title": engine["title"],
                    "value": None if engine["value"] is None else float(f"{engine['value']:.4g}"),
                    "is_noisy": engine["is_noisy"],
                }
                for name, engine in cell["engines"].items()
            },
        }
        for key, cell in results["cells"].items()
    }
    order = [cell.key for cell in all_cells() if cell.key in cells]
    cells = {key: cells[key] for key in dict.fromkeys([*order, *cells])}
    return {"machine": results["machine"], "plan": results["plan"], "cells": cells}


def tables(values: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """Return the tables of each page by the name of their marks."""
    cells: Cells = values["cells"]
    chosen = {key: cells[key] for key in README_CELLS if key in cells}
    page = {"bench": to_block(values), "noop": to_noop_block(values), "ratios": to_ratios_block(cells)}
    if start := to_start_block(cells):  # measured for itself, because it takes long
        page["start"] = start
    return {PAGE: page, README: {"ratios": to_ratios_block(chosen)}}


def write(values: dict[str, Any]) -> None:
    """Write the tables between the marks of their pages.

    Raises:
        ValueError: a page lacks the marks.
    """
    texts = {path: _with_blocks(path.read_text(), blocks) for path, blocks in tables(values).items()}
    for path, text in texts.items():
        path.write_text(text)


def find_stale(values: dict[str, Any]) -> list[str]:
    """Return the names of pages with a number in a table that these values do not give."""
    pages = tables(values).items()
    return [
        str(path.relative_to(ROOT))
        for path, blocks in pages
        if path.read_text() != _with_blocks(path.read_text(), blocks)
    ]


def _with_blocks(text: str, blocks: dict[str, str]) -> str:
    for name, block in blocks.items():
        text = replace_block(text, name, block)
    return text


def replace_block(text: str, name: str, block: str) -> str:
    """Return a document with a new block between its marks of this name."""
    first, last = (mark.format(name) for mark in MARKS)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the document has no {first} ... {last}; put both marks where the table belongs")
    return f"{before}{first}\n{block}{last}{after}"


def to_noop_block(results: dict[str, Any]) -> str:
    """Return the table of the no-op env, a line per engine; the plot of the README is drawn from it."""
    cells = [cell for cell in results["cells"].values() if cell["section"] == NOOP_SECTION]
    titles = dict.fromkeys(
        engine["title"] for cell in cells for name, engine in cell["engines"].items() if name not in _BOUNDS
    )
    lines = [
        f"| no-op env, env-steps/s | {' | '.join(cell['title'] for cell in cells)} |",
        "|---|" + "---|" * len(cells),
    ]
    for title in sorted(titles, key=lambda title: not title.startswith(OURS_TITLE)):
        found = [
            next((engine for engine in cell["engines"].values() if engine["title"] == title), None) for cell in cells
        ]
        lines.append(f"| {title} | {' | '.join(_value(*pair) for pair in zip(found, cells, strict=True))} |")
    return "\n".join([*lines, "", NOISY]) + "\n"


def _value(engine: Engine | None, cell: dict[str, Any]) -> str:
    """Return a value with its mark, or a dash."""
    if engine is None or engine["value"] is None:
        return "–"
    return show_value(engine["value"], cell) + ("†" if engine["is_noisy"] else "")


def to_block(results: dict[str, Any]) -> str:
    """Return the tables of all cells and their legend."""
    facts, plan = results["machine"], results["plan"]
    cells: Cells = results["cells"]
    lines = [
        "| | stepmill | how | Gymnasium | how | ratio | best other engine | how | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(cell) for cell in _of_engines(cells)),
        "",
        *_frontend_lines(cells),
    ]
    legend = (
        f"Values without a unit are env-steps/s. A ratio says how many times as fast stepmill's value is. EnvPool and ALE run envs "
        f"written in C++. The machine has {facts['cores']} cores "
        f"({facts['cpu']}). The versions are {_versions(facts['versions'])}. The values are medians over quiet rounds of "
        f"{plan['seconds']} s; † marks cells with too few quiet rounds. To make the tables, run {COMMAND}."
    )
    return "\n".join([*lines, textwrap.fill(legend, WIDTH, break_long_words=False, break_on_hyphens=False)]) + "\n"


def to_start_block(cells: Cells) -> str:
    """Return the table of seconds and megabytes; an empty text if they were not measured."""
    rows = [_start_row(cell) for cell in cells.values() if cell["section"] == _START_SECTION]
    return "\n".join(["| | stepmill | Gymnasium | best other engine |", "|---|---|---|---|", *rows, ""]) if rows else ""


def to_ratios_block(cells: Cells) -> str:
    """Return a table of how many times as fast stepmill's fastest configuration is as the fastest of each library."""
    lines = [f"| | {' | '.join(LIBRARIES.values())} |", "|---|" + "---|" * len(LIBRARIES)]
    for cell in _of_engines(cells):
        ours = _best(_ours(cell))
        theirs = [_best(_of_library(cell, name)) for name in LIBRARIES]
        lines.append(f"| {_label(cell)} | {' | '.join(_ratio(ours, each) for each in theirs)} |")
    return "\n".join(lines) + "\n"


def _of_engines(cells: Cells) -> list[dict[str, Any]]:
    """Return the cells that compare engines by a value of which more is better, in the order of the sections."""
    return sorted(
        (cell for cell in cells.values() if cell["section"] in _SECTIONS), key=lambda cell: int(cell["section"])
    )


def _label(cell: dict[str, Any]) -> str:
    return " ".join(part for part in (_SECTIONS[cell["section"]], cell["title"]) if part)


def _ours(cell: dict[str, Any]) -> list[Engine]:
    return [engine for engine in cell["engines"].values() if engine["title"].startswith(OURS_TITLE)]


def _of_library(cell: dict[str, Any], library: str) -> list[Engine]:
    engines = cell["engines"].items()
    return [
        each for name, each in engines if name.partition("-")[0] == library and not each["title"].startswith(OURS_TITLE)
    ]


def _others(cell: dict[str, Any]) -> list[Engine]:
    return [engine for library in LIBRARIES if library != _GYMNASIUM for engine in _of_library(cell, library)]


def _ratio(ours: Engine | None, theirs: Engine | None) -> str:
    return f"{float(format(ours['value'] / theirs['value'], '.3g')):g}×" if ours and theirs and theirs["value"] else "–"


def _frontend_lines(cells: Cells) -> list[str]:
    """Return the table of front-ends: for each target, stepmill's value and that of the class that it replaces."""
    rows = []
    for target in TARGETS:
        cell = cells.get(target.cell)
        if cell is None or cell["section"] != FRONTENDS_SECTION:
            continue
        found = cell["engines"]
        ours, theirs = (
            _best([found[name] for name in names if name in found]) for names in (target.ours, target.theirs)
        )
        if ours is not None and theirs is not None:
            times = ours["value"] / theirs["value"]
            env = _LIBRARY.sub("", cell["title"])
            rows.append(f"| {_name(ours)} | {env} | {_value(ours, cell)} | {_show(theirs, cell)} | {times:.3g}× |")
    return ["| front-end | env | stepmill | replaces | ratio |", "|---|---|---|---|---|", *rows, ""] if rows else []


def _row(cell: dict[str, Any]) -> str:
    ours, gymnasium, other = (_best(engines) for engines in (_ours(cell), _of_library(cell, _GYMNASIUM), _others(cell)))
    columns = [*_value_and_title(ours, cell), *_value_and_title(gymnasium, cell), _ratio(ours, gymnasium)]
    columns += [*_value_and_title(other, cell), _ratio(ours, other)]
    return f"| {_label(cell)} | {' | '.join(columns)} |"


def _start_row(cell: dict[str, Any]) -> str:
    """Return a row of seconds or megabytes, of which fewer are better, with all values of stepmill."""
    ours = ", ".join(_show(engine, cell) for engine in _ours(cell)) or "–"
    theirs = (_best(engines, True) for engines in (_of_library(cell, _GYMNASIUM), _others(cell)))
    return f"| {cell['title']} | {ours} | {' | '.join(_show(engine, cell) for engine in theirs)} |"


def _value_and_title(engine: Engine | None, cell: dict[str, Any]) -> tuple[str, str]:
    return ("–", "–") if engine is None else (_value(engine, cell), _name(engine))


def _best(engines: Sequence[Engine], is_small_good: bool = False) -> Engine | None:
    measured = [engine for engine in engines if engine["value"] is not None]
    if not measured:
        return None
    pick = min if is_small_good else max
    return pick(measured, key=lambda engine: float(engine["value"]))


def _show(engine: Engine | None, cell: dict[str, Any]) -> str:
    if engine is None:
        return "–"
    return f"{_value(engine, cell)} ({_name(engine)})"


def _name(engine: Engine) -> str:
    """Return the title of an engine; of stepmill, its configuration."""
    return str(engine["title"]).replace(OURS_TITLE, "").strip()


def _versions(versions: dict[str, dict[str, str]]) -> str:
    known: dict[str, str] = {}
    for venv in (PEERS, OURS):
        known.update((name, version) for name, version in versions.get(venv, {}).items() if version != "missing")
    for spec in ENGINES.values():  # of a library with an environment of its own
        found = {name: versions.get(spec.venv, {}).get(name, "missing") for name in spec.packages}
        known.update((name, version) for name, version in found.items() if version != "missing")
    names = ("python", "numpy", *(name for spec in ENGINES.values() for name in spec.packages))
    return ", ".join(f"{name} {known[name]}" for name in dict.fromkeys(names) if name in known)


def main(arguments: Sequence[str]) -> int:
    """Write or check the tables."""
    if arguments == ["--check"]:
        stale = find_stale(json.loads(VALUES.read_text()))
        if stale:
            print(
                f"tables in {', '.join(stale)} do not follow from {VALUES.name}; run `python -m benchmarks.readme FILE.json`"
            )
        return int(bool(stale))
    values = summarize(merge([json.loads(Path(name).read_text()) for name in arguments]))
    VALUES.write_text(json.dumps(values, indent=1) + "\n")
    write(values)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
