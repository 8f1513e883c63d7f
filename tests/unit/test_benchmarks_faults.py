"""The benchmark of faults runs its scenarios, finds what remains, and shows the results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults import SCENARIOS, SUBJECTS, Outcome, load, run_scenario, store, to_block

STEPMILL = SUBJECTS[0]


def test_the_death_of_a_worker_is_reported_and_the_other_envs_go_on():
    outcome = run_scenario(STEPMILL, "kill")
    assert outcome.failure is None
    assert outcome.error == "WorkerDied"
    assert outcome.kept is True
    assert outcome.reported_ms is not None
    assert outcome.whole_ms is not None
    assert outcome.close_s is not None
    assert outcome.left == []


def test_an_engine_that_is_not_set_up_is_named():
    absent = type(STEPMILL)("absent", "Absent", "absent", venv="no-such-environment")
    assert run_scenario(absent, "raise").failure == "not set up"


def test_the_table_shows_what_was_never_reported(tmp_path: Path):
    rows = {
        "sb3": {
            "raise": Outcome(reported_ms=12.3, error="EOFError", kept=False, left=["2 processes"]),
            "kill": Outcome(),
            "hang": Outcome(failure="never began to step"),
            "parent": Outcome(gone_s=0.02),
            "ctrl-c": Outcome(tracebacks=4, left=["1 process"]),
            "wait": Outcome(cpu_percent=0.25),
        }
    }
    row = next(line for line in to_block(rows).splitlines() if line.startswith("| SB3"))
    assert row.split(" | ")[1:] == [
        "EOFError after 12 ms; others lost; **never** closed; left: 2 processes",
        "**never** reported",
        "never began to step",
        "gone after 20 ms",
        "**never** gone, 4 tracebacks; left: 1 process",
        "0.2 % |",
    ]


def test_results_that_are_stored_give_the_same_table(tmp_path: Path):
    results = {"gym-async": {name: Outcome(failure="not run") for name in SCENARIOS}}
    results["gym-async"]["raise"] = Outcome(reported_ms=7.25, error="EnvError", kept=False, left=["1 process"])
    results["gym-async"]["wait"] = Outcome(cpu_percent=0.0)
    store(results, tmp_path / "faults.json")
    assert load(tmp_path / "faults.json") == results


def test_there_is_nothing_to_read_before_the_first_run(tmp_path: Path):
    assert load(tmp_path / "faults.json") == {}
