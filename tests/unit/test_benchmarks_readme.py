"""The short tables of docs/performance.md: which values they show, and where they are written."""

from typing import Any

import pytest

from benchmarks import readme

MACHINE = {"cpu": "a", "cores": 2, "versions": {"peers": {"gymnasium": "1.4"}, "ours": {"gymnasium": "missing"}}}


def engine(title: str, value: float | None, *, is_noisy: bool = False) -> dict[str, Any]:
    return {"title": title, "value": value, "is_noisy": is_noisy, "failure": None}


def results(unit: str = "", **engines: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): entry for name, entry in engines.items()}
    cell = {"section": 1, "title": "n=8", "unit": unit, "engines": named}
    return {"machine": MACHINE, "plan": {"seconds": 1.5, "rounds": 3}, "cells": {"noop-8": cell}}


def row(data: dict[str, Any]) -> str:
    return next(line for line in readme.to_block(data).splitlines() if "n=8" in line)


def test_a_row_has_the_best_of_ours_of_gymnasium_and_of_the_others():
    data = results(
        ceiling=engine("ceiling", 9e6),
        gym_sync=engine("Gymnasium Sync", 1e5),
        gym_async=engine("Gymnasium Async", 5e4),
        sb3=engine("SB3", 4e4),
        puffer_1w=engine("PufferLib", 2e5, is_noisy=True),
        stepmill_1w=engine("**stepmill** 1 worker", 4e5),
        stepmill_2w=engine("**stepmill** 2 workers", 3e5),
    )
    assert row(data) == "| no-op env n=8 | 400k (1 worker), 4× | 100k (Gymnasium Sync) | 200k† (PufferLib) |"


def test_of_seconds_and_megabytes_the_smallest_is_best_and_all_of_ours_are_shown():
    data = results(
        "s",
        gym_async=engine("Gymnasium Async", 3.0),
        sb3=engine("SB3", 9.0),
        tianshou=engine("Tianshou", 2.0),
        stepmill_fork=engine("**stepmill** fork", 0.1),
        stepmill_spawn=engine("**stepmill** spawn", 1.0),
    )
    assert row(data) == "| no-op env n=8 | 0.1 s (fork), 1 s (spawn) | 3 s (Gymnasium Async) | 2 s (Tianshou) |"


def test_an_engine_that_was_not_measured_is_a_dash():
    data = results(gym_async=engine("Gymnasium Async", None), stepmill_2w=engine("**stepmill** 2 workers", 3e5))
    assert row(data) == "| no-op env n=8 | 300k (2 workers) | – | – |"


def test_versions_are_those_that_are_there():
    assert "gymnasium 1.4" in readme.to_block(results())


def test_the_table_of_the_no_op_env_has_a_line_per_engine_without_the_upper_bounds():
    data = results(
        ceiling=engine("ceiling", 9e6),
        gym_sync=engine("Gymnasium Sync", 1e5),
        sb3=engine("SB3", None),
        stepmill_1w=engine("**stepmill** 1 worker", 4e5, is_noisy=True),
    )
    assert readme.to_noop_block(data).splitlines() == [
        "| no-op env, env-steps/s | n=8 |",
        "|---|---|",
        "| **stepmill** 1 worker | 400k† |",
        "| Gymnasium Sync | 100k |",
        "| SB3 | – |",
        "",
        readme.NOISY,
    ]


def test_only_what_stands_between_the_marks_is_replaced():
    text = "before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n"
    assert readme.replace_block(text, "bench", "new\n") == text.replace("old", "new")


def test_a_document_without_marks_is_left_alone(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("no marks")
    with pytest.raises(ValueError, match="no <!-- bench:begin -->"):
        readme.write(results(), path)
    assert path.read_text() == "no marks"


def test_the_performance_page_has_its_marks():
    text = readme.PAGE.read_text()
    assert readme.replace_block(text, "bench", "") != text
    assert readme.replace_block(text, "noop", "") != text
