r"""Draw docs/drawings/*.toml as SVG: `docs_drawings.py` writes docs/drawings/*.svg.

A drawing has a size and lists of boxes, arrows and texts, in units of pixels:

    size = [600, 200]
    [[box]]
    at = [10, 10, 120, 40]      # left, top, width, height
    text = "a line\nanother"
    kind = "accent"             # or "soft", "warn", "plain"
    [[arrow]]
    points = [[130, 30], [200, 30]]
    text = "send"               # beside the middle of the longest part; `shift = [x, y]` moves it
    dashed = true
    [[text]]
    at = [10, 100]
    text = "a title"
    kind = "title"              # or "note"; "middle" and "end" align it

The colours are CSS variables: the site sets them for its light and its dark theme, and elsewhere the reader's system does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import drawsvg
import tomllib

ROOT = Path(__file__).resolve().parent.parent
DRAWINGS = ROOT / "docs" / "drawings"
LINE = 17
# One set of colours for light and dark pages; docs/_static/site.css switches them with the theme of the site.
STYLE = """
svg.stepmill { --ink: #1f2937; --faint: #6b7280; --paper: #ffffff; --soft: #eef2f7; --accent: #dbeafe; --accent-line: #2563eb;
  --warn: #fee2e2; --warn-line: #dc2626; --series-1: #2563eb; --series-2: #d97706; --series-3: #059669; --series-4: #9333ea }
@media (prefers-color-scheme: dark) { svg.stepmill { --ink: #e5e7eb; --faint: #9ca3af; --paper: #131416; --soft: #262b33;
  --accent: #1e3a5f; --accent-line: #60a5fa; --warn: #4c1d1d; --warn-line: #f87171; --series-1: #60a5fa; --series-2: #fbbf24;
  --series-3: #34d399; --series-4: #c084fc } }
svg.stepmill:not(.recorded) text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif !important; fill: var(--ink) }
"""
_KINDS = {
    "plain": ("var(--paper)", "var(--ink)"),
    "soft": ("var(--soft)", "var(--faint)"),
    "accent": ("var(--accent)", "var(--accent-line)"),
    "warn": ("var(--warn)", "var(--warn-line)"),
}
Shape = Mapping[str, Any]


def draw(source: Mapping[str, Any]) -> str:
    """Return the SVG of a drawing."""
    width, height = source["size"]
    # `class` is how CSS finds the drawing; ids of markers must differ between drawings of one page.
    drawing = drawsvg.Drawing(width, height, id_prefix=f"{source['name']}-", class_="stepmill", role="img")
    drawing.append_css(STYLE)
    tip = drawsvg.Marker(-0.5, -4, 8, 4, scale=1, orient="auto", refX=7)
    tip.append(drawsvg.Lines(0, -3.5, 8, 0, 0, 3.5, close=True, fill="var(--ink)"))
    drawing.append(drawsvg.Title(source["title"]))
    for shape in source.get("box", []):
        _draw_box(drawing, shape)
    for shape in source.get("arrow", []):
        _draw_arrow(drawing, shape, tip)
    for shape in source.get("text", []):
        _draw_text(drawing, shape)
    text: str = drawing.as_svg(header="")
    return text.replace("\n\n", "\n") + "\n"


def _draw_box(drawing: Any, shape: Shape) -> None:
    x, y, width, height = shape["at"]
    fill, line = _KINDS[shape.get("kind", "plain")]
    rounding = 0 if shape.get("square") else 6
    dash = {"stroke_dasharray": "5 4"} if shape.get("dashed") else {}
    drawing.append(
        drawsvg.Rectangle(x, y, width, height, rx=rounding, fill=fill, stroke=line, stroke_width=1.3, **dash)
    )
    lines = shape.get("text", "").splitlines()
    top = y + 20 if shape.get("top") else y + height / 2 - LINE * (len(lines) - 1) / 2 + 4.5
    for number, line_text in enumerate(lines):
        is_head = number == 0 and shape.get("bold", len(lines) > 1)
        weight = "600" if is_head else "400"
        drawing.append(
            drawsvg.Text(line_text, 12.5, x + width / 2, top + LINE * number, text_anchor="middle", font_weight=weight)
        )


def _draw_arrow(drawing: Any, shape: Shape, tip: Any) -> None:
    points: Sequence[Sequence[float]] = shape["points"]
    flat = [value for point in points for value in point]
    dash = {"stroke_dasharray": "5 4"} if shape.get("dashed") else {}
    drawing.append(
        drawsvg.Lines(*flat, close=False, fill="none", stroke="var(--ink)", stroke_width=1.3, marker_end=tip, **dash)
    )
    if "text" in shape:
        middle = _middle(points)
        shift = shape.get("shift", [0, -7])
        anchor = shape.get("align", "middle")
        at = [middle[0] + shift[0], middle[1] + shift[1]]
        _draw_text(drawing, {"at": at, "text": shape["text"], "kind": "note", "align": anchor})


def _middle(points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the middle of the longest part of a line."""
    (x0, y0), (x1, y1) = max(
        pairwise(points), key=lambda part: abs(part[0][0] - part[1][0]) + abs(part[0][1] - part[1][1])
    )
    return (x0 + x1) / 2, (y0 + y1) / 2


def _draw_text(drawing: Any, shape: Shape) -> None:
    kind = shape.get("kind", "plain")
    size = 14 if kind == "title" else 12
    extra = {"font_weight": "600"} if kind == "title" else {}
    colour = {"style": "fill: var(--faint)"} if kind == "note" else {}
    anchor = shape.get("align", "start")
    for number, line in enumerate(shape["text"].splitlines()):
        y = shape["at"][1] + (LINE - 2) * number
        drawing.append(drawsvg.Text(line, size, shape["at"][0], y, text_anchor=anchor, **extra, **colour))


def render_all() -> dict[Path, str]:
    """Return the SVG files that docs/drawings should hold, with their texts."""
    sources = sorted(DRAWINGS.glob("*.toml"))
    return {
        path.with_suffix(".svg"): draw({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
        for path in sources
    }


if __name__ == "__main__":
    for file, svg in render_all().items():
        file.write_text(svg, encoding="utf-8")
        sys.stdout.write(f"{file.relative_to(ROOT)}\n")
