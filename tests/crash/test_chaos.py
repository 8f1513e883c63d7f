"""Workers are broken at random, and no transition is lost, doubled, or given to the wrong env."""

from __future__ import annotations

import pytest

from stepmill.testing.chaos import run_chaos


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_transition_is_right_while_workers_die_stop_and_hang() -> None:
    report = run_chaos(20.0, seed=1)

    assert not report.wrong, report
    assert min(report.inflicted.values()) > 0, report
    assert report.broken > 0, report
    assert report.capsules > 0, report
    assert report.transitions > 500, report
