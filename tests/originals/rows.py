"""Compares a page of docs/switching with the tests that run its statements with the original and with ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.originals.pages import ROOT

OURS, ORIGINAL = "ours", "original"


class Rows:
    """The rows of a page's table of differences that tests show. `@row("text")` marks a test."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._shown: set[str] = set()

    def __call__(self, text: str) -> Callable[[Any], Any]:
        """Note that a test shows the row that begins with this text."""
        self._shown.add(text)
        return lambda test: test

    def check(self, *folders: Path) -> None:
        """Fail unless each row has a test, each note has a row, and each name of "The same" is in a test of one of the folders."""
        text = (ROOT / "docs" / "switching" / f"{self._page}.md").read_text(encoding="utf-8")
        table = text.partition("## Differences")[2].partition("\n## ")[0].splitlines()
        rows = [line[2:] for line in table if line.startswith("| ") and not line.startswith("| What |")]
        assert [line for line in rows if not any(line.startswith(words) for words in self._shown)] == []
        assert [words for words in sorted(self._shown) if not any(line.startswith(words) for line in rows)] == []
        same = text.partition("## The same")[2].partition("\n## ")[0]
        programs = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("test_*.py"))
        assert same
        assert [name for name in re.findall(r"`(\w+)`", same) if name not in programs] == []
