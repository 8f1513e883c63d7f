"""Plot the tables of docs/performance.md, and the curves of the examples and of docs/plots, as SVG, in the colours of the drawings.

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
MARKS = "os^Dv*Xp"  # of libraries
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
            PLOTS / "ratios.svg": plot_libraries(tables(text, "ratios")[0]),
            PLOTS / "efficiency.svg": plot_efficiency(tables(text, "bench")[0]),
            PLOTS / "frontends.svg": plot_ratios(tables(text, "bench")[1], "times the class that it replaces"),
        }
        for path in sorted([*CURVES.glob("*.csv"), *PLOTS.glob("*.csv")]):
            plots[path.with_suffix(".svg")] = plot_bars(path) if is_of_bars(path) else plot_curve(path)
    return plots


def plot_noop(table: Sequence[Sequence[str]]) -> str:
    """Env-steps/s over the number of envs: a line per engine, with its name at the right end."""
    figure, axes = plt.subplots(figsize=(3.6, 3.6))
    counts = [int(head.removeprefix("n=")) for head in table[0][1:]]
    lines = noop_lines(table)
    ends = [math.log10(values[-1]) for values in lines.values()]
    for (name, values), label in zip(lines.items(), spread(ends, gap=0.27), strict=True):
        is_ours = name.startswith("stepmill")
        colour = SERIES[0] if is_ours else SERIES[1] if name.startswith("Gymnasium") else FAINT
        axes.plot(counts, values, marker="o", markersize=4, color=colour, linewidth=2.6 if is_ours else 1.4)
        # A thin line leads from the end of a line to its name, which may have been moved up or down.
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        place = (counts[-1] * 2, 10**label)
        weight = "bold" if is_ours else "normal"
        axes.annotate(name, (counts[-1], values[-1]), place, va="center", weight=weight, arrowprops=arrow)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_yscale("log")
    axes.set_xlabel("number of envs")
    axes.set_ylabel("env-steps/s")
    axes.set_xlim(counts[0] * 0.8, counts[-1] * 1.2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k")
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    return _svg(figure, "noop", "Env-steps per second of a no-op env, over the number of envs")


def noop_lines(table: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Return the values of each engine's best configuration, the fastest engine first.

    stepmill and Gymnasium have two lines: envs in the caller's thread, and envs in processes. Of stepmill's processes only plain
    pools count, not those with options. The best configuration has the highest geometric mean.
    """
    best: dict[str, list[float]] = {}
    for row in table[1:]:
        title = row[0].replace("**", "")
        words = title.split(",")[0].split()
        name = " ".join(words[:2]) if words[0] in ("stepmill", "Gymnasium") else words[0]
        values = [number(cell) or math.nan for cell in row[1:]]
        if name == "stepmill thread" or (name == "stepmill process" and title.count(",") > 1):
            continue
        if name not in best or math.prod(values) > math.prod(best[name]):
            best[name] = values
    return dict(sorted(best.items(), key=lambda item: -item[1][-1]))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return `places`, highest first, moved as little as it takes to keep them `gap` apart."""
    groups: list[tuple[float, int]] = []  # the highest place of a group, and how many it holds
    for place in places:
        groups.append((place, 1))
        while len(groups) > 1 and groups[-2][0] - gap * groups[-2][1] < groups[-1][0]:
            (top, above), (lower, below) = groups[-2:]
            lower_top = lower + gap * above
            groups[-2:] = [((top * above + lower_top * below) / (above + below), above + below)]
    return [top - gap * index for top, count in groups for index in range(count)]


def plot_libraries(table: Sequence[Sequence[str]]) -> str:
    """A line per cell: a mark for each library, at how many times as fast stepmill is as the library's fastest class."""
    libraries, rows = table[0][1:], list(reversed(table[1:]))
    figure, axes = plt.subplots(figsize=(3.6, 1.2 + 0.42 * len(rows)))
    smallest = [min(number(cell) or math.inf for cell in row[1:]) for row in rows]
    for library, mark, colour in zip(libraries, MARKS, (SERIES[0], SERIES[1], *[INK] * len(libraries)), strict=False):
        points = [(number(row[1 + libraries.index(library)]), place) for place, row in enumerate(rows)]
        known = [(value, place) for value, place in points if value is not None]
        if known:
            axes.plot(
                *zip(*known, strict=True),
                mark,
                color=colour,
                markersize=5,
                fillstyle="none" if colour == INK else "full",
                label=library,
            )
    for place, value in enumerate(smallest):
        axes.annotate(
            f"{value:.2g}×",
            (1, place),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    _name_bars(axes, [_label(row) for row in rows], 0.16)
    axes.set_xscale("log")
    _mark_one(axes, len(rows), 0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel("stepmill relative to each library's fastest class;\nright: to the fastest of all")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, handletextpad=0.1, columnspacing=0.8)
    return _svg(figure, "ratios", "How many times as fast as the fastest class of each library")


def plot_ratios(table: Sequence[Sequence[str]], label: str) -> str:
    """A bar per row of front-ends: the number before × in the row."""
    found = [(row, _RATIO.search("|".join(row[1:]))) for row in table[1:]]
    rows = [(_label(row), float(ratio[1])) for row, ratio in found if ratio]
    figure, axes = plt.subplots(figsize=(3.6, 0.5 + 0.42 * len(rows)))
    names, values = zip(*reversed(rows), strict=True)
    axes.barh(range(len(rows)), [value - 1 for value in values], left=1, color=SERIES[0], height=0.4)
    for position, value in enumerate(values):
        text = f"{value:g}×"
        axes.annotate(text, (max(value, 1), position), (4, 0), textcoords="offset points", va="center", fontsize=9)
    _name_bars(axes, names, 0.22)
    axes.set_xscale("log")
    axes.set_xlim(min(*values, 0.9) * 0.7, max(values) * 1.9)
    _mark_one(axes, len(rows), 0.2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_xlabel(f"stepmill: {label}")
    return _svg(figure, label.rsplit(maxsplit=1)[-1], f"How many {label}")


def _mark_one(axes: Any, num_rows: int, above: float) -> None:
    """Mark 1× in each row, with a line that does not cross the names of the rows."""
    places = range(num_rows)
    axes.vlines([1] * num_rows, [place - 0.3 for place in places], [place + above for place in places], FAINT)


def _name_bars(axes: Any, names: Sequence[str], above: float) -> None:
    """Write a name above each bar: beside them, long names would leave no room for the bars on a phone."""
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(names) - 0.3)
    axes.spines["left"].set_visible(False)
    for position, name in enumerate(names):
        axes.text(0.0, position + above, name, transform=axes.get_yaxis_transform(), va="bottom")


def _label(row: Sequence[str]) -> str:
    """Return a row's name without the name of its section; of front-ends, with the env."""
    return f"{row[0]}, {row[1]}" if len(row) == 5 else row[0].removeprefix("efficiency ")


def plot_efficiency(table: Sequence[Sequence[str]]) -> str:
    """Grouped bars of the efficiency of envs whose steps and resets differ in length."""
    rows = [row for row in table[1:] if row[0].startswith("efficiency")]
    figure, axes = plt.subplots(figsize=(3.6, 4.2))
    for index, (title, column) in enumerate((("stepmill", 1), ("Gymnasium", 3), ("best other engine", 6))):
        values = [number(row[column]) or 0.0 for row in reversed(rows)]
        places = [place + 0.22 * (1 - index) for place in range(len(rows))]
        axes.barh(places, values, height=0.2, color=SERIES[index], label=title)
        for place, value in zip(places, values, strict=True):
            axes.annotate(f"{value:g} %", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _name_bars(axes, [row[0].removeprefix("efficiency ") for row in reversed(rows)], 0.34)
    axes.set_xlim(0, 112)
    axes.set_xlabel("env time / (wall time × what could run), %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)
    return _svg(figure, "efficiency", "Efficiency where steps and resets differ in length")


def plot_curve(path: Path) -> str:
    """A learning curve: a line for each column after the first, which is the number of env-steps."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = list(csv.reader(file))
    figure, axes = plt.subplots(figsize=(6.0, 2.8))
    for column, colour in zip(range(1, len(head)), SERIES, strict=False):
        points = [(float(row[0]), float(row[column])) for row in rows if row[column]]
        width = (
            5.0 if path.parent == PLOTS and column == 1 else 1.6
        )  # the original's curve is seen beside one that is equal
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, label=head[column])
    axes.set_xlabel(head[0])
    if len(head) > 2:
        axes.legend(loc="best")
    else:
        axes.set_ylabel(head[1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}")
    axes.grid(axis="y", color=FAINT, alpha=0.25)
    return _svg(figure, path.stem, f"Learning curve of {path.stem}")


def is_of_bars(path: Path) -> bool:
    """Return whether the first column has names, and not numbers of env-steps."""
    return path.read_text(encoding="utf-8").startswith("way of")


def plot_bars(path: Path) -> str:
    """A bar for each row: a name and a percentage."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = list(csv.reader(file))
    names, values = [row[0] for row in reversed(rows)], [float(row[1]) for row in reversed(rows)]
    figure, axes = plt.subplots(figsize=(6.0, 0.5 + 0.42 * len(rows)))
    colours = [SERIES[0] if "once" in name or name.startswith("stepmill") else FAINT for name in names]
    axes.barh(range(len(rows)), values, color=colours, height=0.4)
    for position, value in enumerate(values):
        axes.annotate(f"{value:g} %", (value, position), (4, 0), textcoords="offset points", va="center", fontsize=9)
    _name_bars(axes, names, 0.22)
    axes.set_xlim(0, max(values) * 1.15)
    axes.set_xlabel(head[1])
    return _svg(figure, path.stem, f"{head[1].partition(',')[0].capitalize()} by {head[0]}")


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
