"""Plot the tables of docs/performance.md and the curves of the examples as SVG, in the colours of the drawings.

The tables are the only source: a plot cannot show another number than the table beside it. `render_all` returns the files.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docs_drawings
import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib import ticker

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"
CURVES = ROOT / "examples" / "output"
# Matplotlib knows no CSS variables: it draws in these colours, which are replaced afterwards.
COLOURS = {
    "#010101": "var(--ink)",
    "#020202": "var(--faint)",
    "#030303": "var(--series-1)",
    "#040404": "var(--series-2)",
    "#050505": "var(--series-3)",
    "#060606": "var(--series-4)",
}
INK, FAINT, *SERIES = COLOURS
_UNITS = {"k": 1e3, "M": 1e6, "": 1.0}
_RATIO = re.compile(r"([\d.]+)×")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stepmill",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
}


def tables(text: str, mark: str) -> list[list[list[str]]]:
    """Return the tables between `<!-- MARK:begin -->` and `<!-- MARK:end -->`: rows of cells, the head first, without the rule."""
    block = text.partition(f"<!-- {mark}:begin -->")[2].partition(f"<!-- {mark}:end -->")[0]
    found = re.findall(r"(?:^\|.*\n)+", block, flags=re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()] for table in found]
    return [[row for row in table if not row[-1].startswith("---")] for table in rows]


def number(text: str) -> float | None:
    """Return the value at the start of a cell: 1.25M is 1250000; None if there is none."""
    match = re.match(r"([\d.]+)([kM]?)", text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def render_all() -> dict[Path, str]:
    """Return the plots that the repository should hold, with their texts."""
    text = PAGE.read_text(encoding="utf-8")
    with mpl.rc_context(_STYLE):
        plots = {
            PLOTS / "noop.svg": plot_noop(tables(text, "noop")[0]),
            PLOTS / "ratios.svg": plot_ratios(tables(text, "bench")[0], "times Gymnasium's best vector env"),
            PLOTS / "efficiency.svg": plot_efficiency(tables(text, "bench")[0]),
            PLOTS / "frontends.svg": plot_ratios(tables(text, "bench")[1], "times the class that it replaces"),
        }
        for path in sorted(CURVES.glob("*.csv")):
            plots[path.with_suffix(".svg")] = plot_curve(path)
    return plots


def plot_noop(table: Sequence[Sequence[str]]) -> str:
    """Env-steps/s over the number of envs, a line per engine."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    counts = [int(head.removeprefix("n=")) for head in table[0][1:]]
    order = sorted(table[1:], key=lambda row: -(number(row[-1]) or 0))
    for row, colour in zip(order, SERIES, strict=False):
        values = [number(cell) or math.nan for cell in row[1:]]
        axes.plot(counts, values, marker="o", color=colour, linewidth=2)
        title = row[0].replace("**", "")
        axes.annotate(title, (counts[-1], values[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("log")
    axes.set_xlabel("number of envs")
    axes.set_ylabel("env-steps/s")
    axes.set_xlim(counts[0] * 0.9, counts[-1] * 1.1)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    return _svg(figure, "noop", "Env-steps per second of a no-op env, over the number of envs")


def plot_ratios(table: Sequence[Sequence[str]], label: str) -> str:
    """A bar per row: the number before × in the row."""
    found = [(row, _RATIO.search("|".join(row[1:]))) for row in table[1:]]
    rows = [(_label(row), float(ratio[1])) for row, ratio in found if ratio]
    figure, axes = plt.subplots(figsize=(6.8, 0.5 + 0.27 * len(rows)))
    names, values = zip(*reversed(rows), strict=True)
    axes.barh(range(len(rows)), [value - 1 for value in values], left=1, color=SERIES[0], height=0.65)
    for position, value in enumerate(values):
        text = f"{value:g}×"
        axes.annotate(text, (max(value, 1), position), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), names)
    axes.set_xscale("log")
    axes.set_xlim(min(*values, 0.9) * 0.7, max(values) * 1.9)
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel(f"stepmill: {label}")
    return _svg(figure, label.rsplit(maxsplit=1)[-1], f"How many {label}")


def _label(row: Sequence[str]) -> str:
    """Return a label without the cell's long name: of front-ends, the class that is replaced."""
    if len(row) < 4 or not _RATIO.search(row[3]):
        return row[0].removeprefix("efficiency ")
    ours, theirs = (re.search(r"\((.*)\)$", cell) for cell in row[1:3])
    is_own = theirs is not None and theirs[1].startswith("process")  # a front-end beside the Pool itself
    title = f"Pool ({ours[1]})" if is_own and ours else theirs[1] if theirs else ""
    return f"{title}, {row[0].rpartition(', ')[2]}"


def plot_efficiency(table: Sequence[Sequence[str]]) -> str:
    """Grouped bars of the efficiency of envs whose steps and resets differ in length."""
    rows = [row for row in table[1:] if row[0].startswith("efficiency")]
    figure, axes = plt.subplots(figsize=(6.8, 3.4))
    for index, title in enumerate(("stepmill", "Gymnasium", "best other engine")):
        values = [number(row[1 + index]) or 0.0 for row in reversed(rows)]
        places = [place + 0.26 * (1 - index) for place in range(len(rows))]
        axes.barh(places, values, height=0.24, color=SERIES[index], label=title)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:g} %", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row[0].removeprefix("efficiency ") for row in reversed(rows)])
    axes.set_xlim(0, 112)
    axes.set_xlabel("env time / (wall time × what could run at once), %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.16), ncols=3)
    return _svg(figure, "efficiency", "Efficiency where steps and resets differ in length")


def plot_curve(path: Path) -> str:
    """A learning curve: a line for each column after the first, which is the number of env-steps."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = list(csv.reader(file))
    figure, axes = plt.subplots(figsize=(6.0, 2.8))
    for column, colour in zip(range(1, len(head)), SERIES, strict=False):
        points = [(float(row[0]), float(row[column])) for row in rows if row[column]]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, label=head[column])
    axes.set_xlabel(head[0])
    if len(head) > 2:
        axes.legend(loc="best")
    else:
        axes.set_ylabel(head[1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}")
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    return _svg(figure, path.stem, f"Learning curve of {path.stem}")


def _svg(figure: Any, name: str, title: str) -> str:
    """Return a figure as SVG that takes its colours from CSS variables, with ids of its own."""
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Title": title})
    plt.close(figure)
    svg = file.getvalue()
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)
    style = f"<style>{docs_drawings.STYLE}</style>"
    svg = svg.replace("<svg ", '<svg class="stepmill" role="img" ', 1)
    svg = re.sub(r"<metadata>.*?</metadata>", f"<title>{title}</title>\n {style}", svg, count=1, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
