"""How a run is shown: on a terminal, as plain lines, and as a summary for people and for programs."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

from stepmill.observe.monitor import open_run_view
from stepmill.observe.report import PlainView, per_second, plain_line, summary_json, summary_text
from stepmill.observe.run import EpisodeTally, RunPlan, Setup, Snapshot
from stepmill.spec.stats import FAULT_KINDS, Durations, LearnerStats, PoolStats, WorkerStats

SETUP = Setup(
    env_id="Some-v0",
    num_envs=8,
    num_workers=2,
    backend="process",
    batch_size=8,
    policy="random",
    seed=3,
    is_atari=False,
    start_s=0.5,
)


def snapshot(num_workers: int = 2, **changes) -> Snapshot:
    stats = stats_of(num_workers, 2.0)
    made = Snapshot(
        elapsed_s=2.0,
        steps=1234,
        batches=160,
        episodes=EpisodeTally().summary(),
        policy_share=0.1,
        pool_share=0.85,
        total=stats,
        recent=stats,
    )
    return dataclasses.replace(made, **changes)


def with_faults(**kinds: int) -> PoolStats:
    stats = stats_of(2, 2.0)
    stats.faults[0] = [kinds.get(kind, 0) for kind in FAULT_KINDS]
    return stats


def stats_of(num_workers: int, elapsed_s: float) -> PoolStats:
    """Return what a pool of one env per worker counts after some seconds, at 250 steps per second of each worker."""
    steps = int(250 * elapsed_s)
    workers = tuple(
        WorkerStats(i, 0, 0.6 * elapsed_s, 0.0, 0.1 * elapsed_s, 0.3 * elapsed_s, steps, 3, 0, 0, 0, 0, None, False)
        for i in range(num_workers)
    )
    steps_taken = Durations(
        np.full((num_workers, 1), steps),
        np.array([0.01]),
        np.full(num_workers, 0.6 * elapsed_s),
        np.full(num_workers, 0.01),
    )
    learner = LearnerStats(0.05 * elapsed_s, 0.8 * elapsed_s, 0.05 * elapsed_s, 0.1 * elapsed_s, steps, steps)
    faults = np.zeros((num_workers, len(FAULT_KINDS)), np.int64)
    none = np.zeros(num_workers, np.int64)
    return PoolStats(elapsed_s, num_workers, workers, learner, steps_taken, steps_taken, faults, none, none, 0, 0)


def draw(shown: Snapshot, width: int = 110, height: int = 40, encoding: str = "utf-8") -> list[str]:
    """Return the lines of the last picture."""
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding, write_through=True)
    console = Console(file=file, force_terminal=True, width=width, height=height, color_system=None)
    seconds = itertools.count(1.0)
    with open_run_view(console, RunPlan(num_envs=8, batch_size=8, steps=2468)) as view:
        view.began(SETUP, lambda: stats_of(len(shown.total.workers), next(seconds)))
        view.show(shown)
        buffer.truncate(buffer.seek(0))
        view.show(shown)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", buffer.getvalue().decode(encoding)).splitlines()


def test_a_run_is_shown_with_its_progress_its_episodes_and_where_the_time_of_its_pool_goes():
    tally = EpisodeTally()
    tally.add(*(_column(values) for values in ([10.0, 30.0], [4, 6])))
    text = "\n".join(draw(snapshot(episodes=tally.summary())))
    for expected in (
        "stepmill Some-v0",
        "8 envs in 2 workers (process), batches of 8, random policy, seed 3",
        "1,234 env-steps, 50 % of the run",
        "2 episodes, return 20.0, length 5.0",
        "500.0 steps/s",
        "elsewhere 10%",
        "longest steps",
        "Ctrl-C stops",
    ):
        assert expected in text


def _column(values):
    return np.asarray(values)


@pytest.mark.parametrize(("width", "height"), [(200, 60), (110, 30), (80, 24), (60, 15), (30, 10)])
@pytest.mark.parametrize("num_workers", [1, 64])
def test_the_picture_of_a_run_fits_the_terminal(width, height, num_workers):
    lines = draw(snapshot(num_workers), width, height)
    assert all(len(line) <= width - len("^C") for line in lines)
    assert len(lines) <= height


def test_hidden_workers_are_counted():
    text = "\n".join(draw(snapshot(64), 110, 24))
    assert "and 60 more workers" in text


def test_the_picture_of_a_run_needs_no_more_than_ascii():
    text = "\n".join(draw(snapshot(), encoding="ascii"))
    text.encode("ascii")
    assert "ssssspppwww" in text


def test_a_run_without_a_single_step_is_shown():
    nothing = snapshot(1, elapsed_s=0.0, steps=0, recent=stats_of(1, 0.0), batches=0)
    file = io.StringIO()
    with open_run_view(Console(file=file, force_terminal=True), RunPlan(num_envs=8, batch_size=8)) as view:
        view.began(SETUP, lambda: stats_of(1, 0.0))
        view.show(nothing)
        view.show(dataclasses.replace(nothing, elapsed_s=0.1))
    assert "0 episodes" in file.getvalue()


def test_a_plain_line_has_the_numbers_of_now():
    assert plain_line(snapshot()) == (
        "2.0 s · 1,234 env-steps · 500.0 env-steps/s · 0 episodes · return - · length - · env 70 % waiting 30 %"
    )
    assert "waiting" not in plain_line(snapshot(0))


def test_the_plain_view_writes_whole_lines():
    file = io.StringIO()
    view = PlainView(file)
    view.starting("8 envs of Some-v0")
    view.began(SETUP, lambda: stats_of(2, 1.0))
    view.show(snapshot())
    first, second, third = file.getvalue().splitlines()
    assert (first, third) == ("starting 8 envs of Some-v0", plain_line(snapshot()))
    assert second == "8 envs in 2 workers (process), batches of 8, random policy, seed 3"


def test_the_summary_tells_people_of_every_worker():
    text = summary_text(SETUP, snapshot(), is_interrupted=True)
    assert text.splitlines()[0].endswith("seed 3, interrupted")
    assert "none ended" in text
    assert "worker 1      env 70 %, waiting 30 %, 250.0 steps/s" in text


def test_the_summary_counts_the_faults_that_the_policy_absorbed():
    faulty = snapshot(total=with_faults(timed_out=3, neighbour=2))
    assert "  faults        3 timed out, 2 lost with another env" in summary_text(SETUP, faulty, is_interrupted=False)
    assert "faults: 3 timed out" in plain_line(faulty)
    assert "faults" not in summary_text(SETUP, snapshot(), is_interrupted=False)


def test_envs_that_do_not_answer_are_named_while_the_run_goes_on():
    mute = snapshot(silent=(0, 3), silence_s=12.3)
    assert plain_line(mute).endswith(" · no answer from envs 0, 3 for 12 s")
    assert any("no answer" in line and "envs 0, 3 for 12 s" in line for line in draw(mute))
    assert "no answer from env 5 for 2 s" in plain_line(snapshot(silent=(5,), silence_s=2.0))
    many = snapshot(silent=tuple(range(20)), silence_s=2.0)
    assert "envs 0, 1, 2, 3, 4, 5, 6, 7 and 12 others for 2 s" in plain_line(many)
    assert "no answer" not in "\n".join([plain_line(snapshot()), *draw(snapshot())])


def test_the_summary_of_many_workers_stays_short():
    text = summary_text(SETUP, snapshot(40), is_interrupted=False)
    assert "24 more workers" in text
    assert len(text.splitlines()) < 24


def test_the_summary_for_programs_is_strict_json():
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(summary_json(SETUP, snapshot(), is_interrupted=False), parse_constant=refuse)
    assert found["env_id"] == "Some-v0"
    assert found["steps"] == 1234
    assert found["episodes"]["return_mean"] is None
    assert found["steps_per_s"] == 617.0
    assert found["workers"][1]["wait_share"] == pytest.approx(0.3)
    assert found["interrupted"] is False


def test_returns_may_be_nan():
    tally = EpisodeTally()
    tally.add(_column([math.nan, 1.0]), _column([3, 3]))
    summary = tally.summary()
    assert math.isnan(summary.return_mean)
    assert summary.length_mean == 3
    assert json.loads(summary_json(SETUP, snapshot(episodes=summary), is_interrupted=False))


@pytest.mark.parametrize(
    ("rate", "text"), [(1234567.0, "1,234,567"), (999.94, "999.9"), (12.34, "12.3"), (0.126, "0.13"), (0.0, "0.00")]
)
def test_a_rate_has_three_digits_or_more(rate, text):
    assert per_second(rate) == text
