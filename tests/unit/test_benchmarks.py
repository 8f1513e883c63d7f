"""The parts of the benchmark that judge results: quiet rounds, what is counted, which targets are met."""

import os
import subprocess
import sys

import pytest

from benchmarks.cpu import NUM_CORES, Reading, foreign_share
from benchmarks.harness import FOREIGN_LIMIT, Outcome
from benchmarks.instructions import count_parts
from benchmarks.paths import ROOT
from benchmarks.report import merge, show_value, to_markdown

MACHINE = {"cpu": "a", "cores": 2, "kernel": "b", "commit": "c", "versions": {}, "pufferlib": "d"}


def one_round(value: float, foreign: float = 0.0) -> dict[str, float]:
    return {"value": value, "foreign": foreign}


def results(ours: float | None, theirs: float | None) -> dict:
    engines = {
        name: {"title": name, "value": value, "is_noisy": False, "failure": None if value else "broke"}
        for name, value in (("stepmill-2w", ours), ("gym-async", theirs))
    }
    cell = {"section": 1, "title": "n=8", "unit": "", "engines": engines}
    return {"machine": MACHINE, "plan": {"seconds": 1, "rounds": 3}, "cells": {"noop-8": cell}}


def test_what_the_engine_itself_used_is_not_foreign():
    before, after = Reading(100.0, 10.0, 0.0), Reading(100.0 + NUM_CORES, 10.0 + NUM_CORES, 1.0)
    assert foreign_share(before, after) == 0.0


def test_what_others_used_is_a_share_of_all_cores():
    before, after = Reading(100.0, 10.0, 0.0), Reading(100.0 + NUM_CORES, 10.0, 1.0)
    assert foreign_share(before, after) == pytest.approx(1.0)


def test_a_noisy_round_does_not_count():
    outcome = Outcome([one_round(1), one_round(2), one_round(3), one_round(99, 2 * FOREIGN_LIMIT)])
    assert outcome.value(3) == 2
    assert not outcome.is_noisy(3)


def test_too_few_quiet_rounds_take_the_quietest_and_say_so():
    outcome = Outcome([one_round(1), one_round(2, 0.5), one_round(3, 0.3), one_round(4, 0.9)])
    assert outcome.value(3) == 2
    assert outcome.is_noisy(3)


def test_a_ratio_at_the_target_is_met():
    text = to_markdown(results(ours=12e5, theirs=1e5))
    assert "| n=8 | stepmill-2w ≥ 12× gym-async | 12× | met |" in text


def test_a_ratio_below_the_target_is_missed():
    text = to_markdown(results(ours=11e5, theirs=1e5))
    assert "**missed**" in text


def test_a_peer_that_failed_stays_in_the_table_with_its_reason():
    text = to_markdown(results(ours=1e6, theirs=None))
    assert "| gym-async | failed |" in text
    assert "- gym-async, n=8: broke" in text
    assert "not measured" in text


def test_a_later_run_replaces_only_what_it_measured():
    later = results(ours=5.0, theirs=6.0)
    del later["cells"]["noop-8"]["engines"]["gym-async"]
    engines = merge([results(ours=1.0, theirs=2.0), later])["cells"]["noop-8"]["engines"]
    assert {name: engine["value"] for name, engine in engines.items()} == {"stepmill-2w": 5.0, "gym-async": 2.0}


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1.163e6, "", "1.16M"),
        (289_400, "", "289k"),
        (7_352, "", "7.4k"),
        (0.626, "%", "62.6 %"),
        (0.184, "s", "0.184 s"),
    ],
)
def test_values_read_like_the_tables(value, unit, shown):
    assert show_value(value, {"unit": unit}) == shown


MARKED = """
import os, signal
from benchmarks.instructions import TRACE_ME, ptrace
ptrace(TRACE_ME, 0)
os.kill(os.getpid(), signal.SIGSTOP)
for size in (20, 20, 1020):
    os.kill(os.getpid(), signal.SIGUSR1)
    sum(range(size))
    os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.slow
def test_instructions_between_marks_are_counted():
    with subprocess.Popen([sys.executable, "-c", MARKED], env={**os.environ, "PYTHONPATH": str(ROOT)}) as traced:
        _, small, large = count_parts(traced.pid)
    assert small > 20
    assert 10 < (large - small) / 1000 < 1000, "each number takes some instructions"
