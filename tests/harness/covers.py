"""Remembers which behaviours of docs/coverage.toml a run of the tests has shown.

`@pytest.mark.covers("A-1", "A-B2")` names what a test shows; `--covers FILE` writes, at the end, which tests of each id passed
and which did not. A test that was skipped has shown nothing; one that failed while it was set up or torn down, has failed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest


class Covers:
    """The plugin behind `--covers`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids: dict[str, tuple[str, ...]] = {}
        self._failed: set[str] = set()
        self._passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ids = tuple(each for mark in item.iter_markers("covers") for each in mark.args)
            if ids:
                self._ids[item.nodeid] = ids

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        shown: dict[str, dict[str, bool]] = defaultdict(dict)
        for node, ids in self._ids.items():
            if node not in self._passed | self._failed:
                continue
            name = node.split("[")[0]
            for each in ids:
                # One failing parameter is enough to take the claim away.
                shown[each][name] = shown[each].get(name, True) and node not in self._failed
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(shown, indent=1, sort_keys=True))
