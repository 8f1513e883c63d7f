"""Remembers which behaviours of docs/coverage.toml a run of the tests has shown.

`@pytest.mark.covers("A-1", "A-B2")` names what a test shows; `--covers FILE` writes, at the end, which tests of each id passed
and which did not. A test that was skipped has shown nothing; one that failed while it was set up or torn down, has failed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest


class Covers:
    """The plugin behind `--covers`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids: dict[str, tuple[str, ...]] = {}
        self._failed: set[str] = set()
        self._passed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # An attribute of the report travels from a process of pytest-xdist to the one that writes the file.
        report.covers = [each for mark in item.iter_markers("covers") for each in mark.args]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ids[report.nodeid] = tuple(getattr(report, "covers", ()))
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # a process of pytest-xdist
            return
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
