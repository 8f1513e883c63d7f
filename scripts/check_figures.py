"""Check the measured figures in the text of README.md and docs/: `check_figures.py`. The exit status is 1 if one has no raw result.

A block of text, that is lines without an empty one between them, names its results by a comment, at its end or in the line above:

    <!-- measured: simulators -->
    An env that does nothing made 31,100 steps per second.

The names are those of tables of docs/measured.toml, of tables that commands write between marks, and of cells of docs/performance.json. Each number of such a block must be one of
these results, or be listed as part of their set-up, and each result must be in a block that names it. In all other blocks, a number with the
unit of a measurement must be listed as a setting of the page: a limit, a default or a definition.

Code, tables between marks and docs/decisions, whose pages are of their dates, are not checked.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.readme import VALUES  # noqa: E402 - the root is put on the path first
from benchmarks.report import show_value  # noqa: E402

RESULTS = ROOT / "docs" / "measured.toml"
# Other commands write and check the whole pages.
WRITTEN = ("docs/env_packages.md", "docs/originals.md")
_MARKED = re.compile(r"<!-- (\w+):begin -->(.*?)<!-- \1:end -->", re.DOTALL)
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_NAMES = re.compile(r"<!-- measured: ([\w, -]+) -->")
_NOT_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|\b\d{4}-\d\d-\d\d\b|\bdecision\s\d+")
_NUMBER = r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?(?:e-\d+)?)(?!\.?\d|x\d)"
_UNIT = r"(?:[kM]\b|[ ]?(?:×|%|ns\b|[µum]?s\b|[kKMG]i?B\b|seconds?\b|minutes?\b|hours?\b|times\b|bytes\b|(?:[a-z-]+ )?per second|[a-z-]*/s\b))"
_FIGURE = re.compile(rf"{_NUMBER}(?:(?:, | and | to | or |–){_NUMBER})*{_UNIT}")
_ANY = re.compile(rf"{_NUMBER}(?:[kM]\b| million)?")
_SCALES = {"k": 1e3, "M": 1e6, " million": 1e6}


@dataclass(frozen=True)
class Block:
    """Lines of a page without an empty one between them, without code; the names of the results that it shows, if it does."""

    page: str
    line: int
    text: str
    names: tuple[str, ...]


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page."""
    for pattern in (_FENCE, _MARKED):
        text = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in re.finditer(r"(?:^.*\S.*\n?)+", text, re.MULTILINE):
        body = found[0]
        if all(line.startswith("    ") for line in body.splitlines()):
            continue
        names = [name for listed in _NAMES.findall(body) for name in listed.split(", ")]
        yield Block(page, text.count("\n", 0, found.start()) + 1, _NOT_TEXT.sub(" ", body), tuple(names))


def numbers(text: str) -> list[float]:
    """Return the numbers of a text: 31,100 is 31100, and 7.9M is 7900000."""
    return [_value(found) for found in _ANY.findall(text)]


def _value(text: str) -> float:
    scale = next((each for each in _SCALES if text.endswith(each)), "")
    return float(text.removesuffix(scale).replace(",", "")) * _SCALES.get(scale, 1.0)


def figures(text: str) -> list[str]:
    """Return the numbers with the unit of a measurement, each with its unit, as in 2.4, 3 and 7 ms."""
    return [found[0] for found in _FIGURE.finditer(text)]


def find_unknown(pages: Mapping[str, str], results: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    """Return a line for each number that has no result, for each result that is on no page, and for each setting that is on none."""
    settings: dict[str, list[str]] = results["settings"]
    measured = {name: each for name, each in results.items() if name != "settings"}
    known = {name: {*map(float, each.get("values", {}).values())} for name, each in measured.items()}
    for name, cell in cells.items():
        values = [engine["value"] for engine in cell["engines"].values()]
        known.setdefault(name, set()).update(number for value in values for number in numbers(show_value(value, cell)))
    for name, body in (found for text in pages.values() for found in _MARKED.findall(text)):
        known.setdefault(name, set()).update(numbers(_NOT_TEXT.sub(" ", body)))
    wrong, shown = [], {name: set[float]() for name in measured}
    unused = {page: set(listed) for page, listed in settings.items()}
    for page, text in pages.items():
        for block in blocks(page, text):
            place = f"{page}:{block.line}"
            if not block.names:
                found = figures(block.text)
                unused.get(page, set()).difference_update(found)
                wrong += [
                    f"{place}: {each!r} is neither measured nor a setting"
                    for each in found
                    if each not in settings.get(page, ())
                ]
                continue
            if unknown := [name for name in block.names if name not in known]:
                wrong.append(f"{place}: there are no results of {', '.join(unknown)}")
                continue
            found_numbers = numbers(block.text)
            setup = {float(each) for name in block.names for each in measured.get(name, {}).get("setup", ())}
            for name in block.names:
                shown.get(name, set()).update(found_numbers)
            wrong += [
                f"{place}: {each:g} is no result of {', '.join(block.names)}"
                for each in found_numbers
                if each not in setup and not any(each in known[name] for name in block.names)
            ]
    wrong += [
        f"{RESULTS.name}: {name}: {text!r} is on no page"
        for name, each in measured.items()
        for text, value in each.get("values", {}).items()
        if float(value) not in shown[name]
    ]
    return wrong + [f"{RESULTS.name}: {page} has no {each!r}" for page, rest in unused.items() for each in sorted(rest)]


def read_pages() -> dict[str, str]:
    """Return the texts of the pages by their paths."""
    found = [ROOT / "README.md", ROOT / "docs" / "gallery.txt", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {str(path.relative_to(ROOT)): path for path in found if "decisions" not in path.parts}
    return {name: path.read_text(encoding="utf-8") for name, path in names.items() if name not in WRITTEN}


def main() -> int:
    """Check the pages, and return the exit status."""
    cells = json.loads(VALUES.read_text(encoding="utf-8"))["cells"]
    lines = find_unknown(read_pages(), tomllib.loads(RESULTS.read_text(encoding="utf-8")), cells)
    if lines:
        print(*lines, "name the results of these numbers, or list them, in docs/measured.toml", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
