"""A pytest plugin: ends the cases that $STEPMILL_HANGING names after HANG_S, in place of their own limits."""

from __future__ import annotations

import json
import os

import pytest

HANG_S = 20  # what such a case does before it hangs takes at most 5 s


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put a shorter limit before the marks of the cases: pytest-timeout takes the first."""
    hanging = json.loads(os.environ["STEPMILL_HANGING"])
    for item in items:
        parent = "" if item.parent is None else item.parent.name
        if f"{parent}::{item.name}" in hanging:
            item.add_marker(pytest.mark.timeout(HANG_S), append=False)
