"""The only file that imports matplotlib: timelines of traces, and bar charts of comparisons. Nothing is shown in a window."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stepmill.observe.trace import LEARNER, Events, TraceKind
from stepmill.spec.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXTRA = "plot"
COLOURS = {
    TraceKind.STEP: "#2e8b57",
    TraceKind.RESET: "#e0a800",
    TraceKind.WAIT: "#d9d9d9",
    TraceKind.SEND: "#1f77b4",
    TraceKind.GATHER: "#9467bd",
}
MAX_DRAWN = 5000  # events per track; a picture cannot show more
TRACK_INCHES = 0.35
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em;max-width:80em}} td,th{{padding:0.2em 1em;text-align:right}} svg{{width:100%;height:auto}}</style>
</head><body><h1>{title}</h1><p>{text}</p>{table}{picture}</body></html>
"""


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        MissingExtraError: it is not.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError(module="matplotlib", extra=EXTRA)


def draw_timeline(events: Events) -> Figure:
    """Return a picture with a track per thread: who worked, and who waited."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_tracks = len(events.threads)
    figure = Figure(figsize=(14, 1.2 + TRACK_INCHES * num_tracks), layout="constrained")
    axes = figure.add_subplot()
    for track, recorded in enumerate(events.threads):
        for kind, colour in COLOURS.items():
            of_kind = recorded[recorded["kind"] == kind][:MAX_DRAWN]
            spans = [
                ((int(begin) - events.began_ns) / 1e6, (int(end) - int(begin)) / 1e6)
                for begin, end in zip(of_kind["begin_ns"], of_kind["end_ns"], strict=True)
            ]
            axes.broken_barh(spans, (track - 0.4, 0.8), facecolors=colour)
    for when_ns, track, text in events.moments:
        at_ms = (when_ns - events.began_ns) / 1e6
        axes.plot([at_ms], [track], marker="x", color="red")
        axes.annotate(text, (at_ms, track), color="red", fontsize="x-small")
    axes.set_yticks(range(num_tracks), [_track_name(track) for track in range(num_tracks)])
    axes.set_ylim(num_tracks - 0.5, -0.5)
    axes.set_xlabel("ms since the begin of the recording")
    patches = [Patch(color=colour, label=kind.name.lower()) for kind, colour in COLOURS.items()]
    axes.legend(handles=patches, ncols=len(patches), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _track_name(track: int) -> str:
    return "learner" if track == LEARNER else f"worker {track - 1}"


def save_timeline(events: Events, path: str | Path) -> None:
    """Write a timeline: one self-contained page if the path ends with .html, else a picture in the format of its ending.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UsageError: the file cannot be written, or its ending is unknown.
    """
    require_matplotlib()
    figure = draw_timeline(events)
    if Path(path).suffix != ".html":
        save_figure(figure, path)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    lost = f", {events.num_lost} were lost" if events.num_lost else ""
    text = f"{(events.ended_ns - events.began_ns) / 1e6:.1f} ms, {events.num_events} events{lost}"
    svg = picture.getvalue()
    page = PAGE.format(
        title="Timeline of a stepmill pool",
        text=html.escape(text),
        table=_shares(events),
        picture=svg[svg.index("<svg") :],
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write {str(path)!r}: {exc.strerror}; choose another path") from exc


def _shares(events: Events) -> str:
    """Return a table: for each track, the share of the time in each activity."""
    span_ns = max(events.ended_ns - events.began_ns, 1)
    rows = ["<tr><th></th>" + "".join(f"<th>{kind.name.lower()}</th>" for kind in COLOURS) + "</tr>"]
    for track, recorded in enumerate(events.threads):
        cells = []
        for kind in COLOURS:
            of_kind = recorded[recorded["kind"] == kind]
            cells.append(f"<td>{float((of_kind['end_ns'] - of_kind['begin_ns']).sum()) / span_ns:.0%}</td>")
        rows.append(f"<tr><th>{_track_name(track)}</th>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def draw_bars(title: str, unit: str, values: Mapping[str, float]) -> Figure:
    """Return a chart with one horizontal bar per name, the largest value first."""
    from matplotlib.figure import Figure

    names = sorted(values, key=lambda name: -values[name])
    figure = Figure(figsize=(9, 1.0 + 0.45 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, [values[name] for name in names], color="#1f77b4")
    axes.bar_label(bars, labels=[f"{values[name]:,.0f}" for name in names], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title)
    axes.set_xlabel(unit)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a picture in the format of the path's ending.

    Raises:
        UsageError: the file cannot be written, or its ending is unknown.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise UsageError(f"cannot write {str(path)!r}: {exc}; choose a path that ends with .png, .svg or .pdf") from exc


def text_bars(values: Mapping[str, float], width: int = 40) -> Sequence[str]:
    """Return the same chart as lines of text."""
    largest = max(values.values(), default=0.0) or 1.0
    longest = max((len(name) for name in values), default=0)
    return [
        f"{name:<{longest}}  {'█' * round(value / largest * width):<{width}}  {value:,.0f}"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
    ]
