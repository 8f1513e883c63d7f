"""The tables in docs/performance.md: a line per cell, with stepmill, Gymnasium and the best other engine; and all engines on the no-op env.

`python -m benchmarks.readme RESULTS.json [MORE.json]` writes them.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES
from benchmarks.paths import OURS, PEERS, ROOT
from benchmarks.report import OURS_TITLE, Cells, merge, show_value
from benchmarks.targets import TARGETS

PAGE = ROOT / "docs" / "performance.md"
MARKS = "<!-- {}:begin -->", "<!-- {}:end -->"
COMMAND = "`make bench-setup bench`, then `python -m benchmarks.readme benchmarks/results/FILE.json`"
_SECTIONS = {1: "no-op env", 2: "images", 3: "efficiency", 4: "", 5: ""}
FRONTENDS_SECTION = 7
NOOP_SECTION = 1
WIDTH = 120
NOISY = "† The machine was never quiet for three rounds. The value is that of the quietest rounds, and is less certain."
_BOUNDS = frozenset({"bare", "ceiling"})  # not engines, but upper bounds
_GYMNASIUM = "gym"
_SMALL_IS_GOOD = frozenset({"s", "MB/env", "MB"})

_LIBRARY = re.compile(r"^(DI-engine|TorchRL over EnvPool), ")  # a cell's title names it, and so does the engine's

Engine = dict[str, Any]


def write(results: dict[str, Any], path: Path = PAGE) -> None:
    """Write the tables of `results` between the marks of a document.

    Raises:
        ValueError: the document lacks the marks.
    """
    text = replace_block(path.read_text(), "bench", to_block(results))
    path.write_text(replace_block(text, "noop", to_noop_block(results)))


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
    """Return the table and its legend."""
    facts, plan = results["machine"], results["plan"]
    cells: Cells = results["cells"]
    lines = [
        "| | stepmill | Gymnasium | best other engine |",
        "|---|---|---|---|",
        *(_row(cells[key]) for key in sorted(_engines_only(cells), key=lambda key: int(cells[key]["section"]))),
        "",
        *_frontend_lines(cells),
    ]
    legend = (
        f"Values without a unit are env-steps/s. The number with × after a value of stepmill is its ratio to Gymnasium. The "
        f"configuration or the engine is in brackets. EnvPool and ALE run envs written in C++. The machine has {facts['cores']} cores "
        f"({facts['cpu']}). The versions are {_versions(facts['versions'])}. The values are medians over quiet rounds of "
        f"{plan['seconds']} s; † marks cells with too few quiet rounds. To make the tables, run {COMMAND}."
    )
    return "\n".join([*lines, textwrap.fill(legend, WIDTH, break_long_words=False, break_on_hyphens=False)]) + "\n"


def _engines_only(cells: Cells) -> list[str]:
    return [key for key, cell in cells.items() if cell["section"] in _SECTIONS]


def _frontend_lines(cells: Cells) -> list[str]:
    """Return the table of front-ends: for each target, stepmill's value and that of the class that it replaces."""
    rows = []
    for target in TARGETS:
        cell = cells.get(target.cell)
        if cell is None or cell["section"] != FRONTENDS_SECTION:
            continue
        ours, theirs = (
            _best([cell["engines"][name] for name in names], False) for names in (target.ours, target.theirs)
        )
        if ours is not None and theirs is not None:
            times = ours["value"] / theirs["value"]
            title = ours["title"].replace(OURS_TITLE, "").strip()
            env = _LIBRARY.sub("", cell["title"])
            rows.append(f"| {title} | {env} | {_value(ours, cell)} | {_show(theirs, cell)} | {times:.3g}× |")
    return ["| front-end | env | stepmill | replaces | ratio |", "|---|---|---|---|---|", *rows, ""] if rows else []


def _row(cell: dict[str, Any]) -> str:
    is_small_good = cell["unit"] in _SMALL_IS_GOOD
    engines: dict[str, Engine] = cell["engines"]
    ours = [engine for engine in engines.values() if engine["title"].startswith(OURS_TITLE)]
    gymnasium = [engine for name, engine in engines.items() if name.startswith(_GYMNASIUM)]
    others = [
        engine
        for name, engine in engines.items()
        if engine not in ours and engine not in gymnasium and name not in _BOUNDS
    ]
    base = _best(gymnasium, is_small_good)
    columns = [
        _show_ours(ours, base, cell, is_small_good),
        _show(base, cell),
        _show(_best(others, is_small_good), cell),
    ]
    label = " ".join(part for part in (_SECTIONS[cell["section"]], cell["title"]) if part)
    return f"| {label} | {' | '.join(columns)} |"


def _best(engines: Sequence[Engine], is_small_good: bool) -> Engine | None:
    measured = [engine for engine in engines if engine["value"] is not None]
    if not measured:
        return None
    pick = min if is_small_good else max
    return pick(measured, key=lambda engine: float(engine["value"]))


def _show_ours(ours: Sequence[Engine], base: Engine | None, cell: dict[str, Any], is_small_good: bool) -> str:
    """Return stepmill's best value and its ratio to Gymnasium; if small values are good, all values of stepmill."""
    if is_small_good:
        return ", ".join(_show(engine, cell) for engine in ours) or "–"
    best = _best(ours, is_small_good)
    if best is None or base is None or not base["value"]:
        return _show(best, cell)
    return f"{_show(best, cell)}, {best['value'] / base['value']:.3g}×"


def _show(engine: Engine | None, cell: dict[str, Any]) -> str:
    if engine is None:
        return "–"
    title = engine["title"].replace(OURS_TITLE, "").strip()
    return f"{_value(engine, cell)} ({title})"


def _versions(versions: dict[str, dict[str, str]]) -> str:
    known: dict[str, str] = {}
    for venv in (PEERS, OURS):
        known.update((name, version) for name, version in versions.get(venv, {}).items() if version != "missing")
    names = ("python", "numpy", *(name for spec in ENGINES.values() for name in spec.packages))
    return ", ".join(f"{name} {known[name]}" for name in dict.fromkeys(names) if name in known)


if __name__ == "__main__":
    write(merge([json.loads(Path(name).read_text()) for name in sys.argv[1:]]))
