"""The tables of measured numbers: which values they show, where they are written, and that no page has another number."""

import json
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.cells import all_cells

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
    assert row(data) == "| no-op env n=8 | 400k | 1 worker | 100k | Gymnasium Sync | 4× | 200k† | PufferLib | 2× |"


def test_of_seconds_and_megabytes_the_smallest_is_best_and_all_of_ours_are_shown():
    data = results(
        "s",
        gym_async=engine("Gymnasium Async", 3.0),
        sb3=engine("SB3", 9.0),
        tianshou=engine("Tianshou", 2.0),
        stepmill_fork=engine("**stepmill** fork", 0.1),
        stepmill_spawn=engine("**stepmill** spawn", 1.0),
    )
    data["cells"]["noop-8"]["section"] = 5
    assert (
        readme.to_start_block(data["cells"]).splitlines()[-1]
        == "| n=8 | 0.1 s (fork), 1 s (spawn) | 3 s (Gymnasium Async) | 2 s (Tianshou) |"
    )


def test_an_engine_that_was_not_measured_is_a_dash():
    data = results(gym_async=engine("Gymnasium Async", None), stepmill_2w=engine("**stepmill** 2 workers", 3e5))
    assert row(data) == "| no-op env n=8 | 300k | 2 workers | – | – | – | – | – | – |"


def test_a_ratio_is_to_the_fastest_class_of_each_library():
    data = results(
        bare=engine("bare loop", 9e6),
        gym_sync=engine("Gymnasium Sync", 2e5),
        gym_async=engine("Gymnasium Async", 5e4),
        sb3=engine("SB3 SubprocVecEnv", 4e4),
        sb3_dummy=engine("SB3 DummyVecEnv", 8e5),
        stepmill_2w=engine("**stepmill** 2 workers", 4e5),
    )
    head, _, line = readme.to_ratios_block(data["cells"]).splitlines()
    ratios = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert (ratios["Gymnasium"], ratios["SB3"], ratios["Tianshou"]) == ("2×", "0.5×", "–")


def test_each_engine_is_of_a_known_library_or_an_upper_bound():
    bounds = {"bare", "ceiling", "multi", "unity", "alf"}
    parts = {engine.name.partition("-")[0] for cell in all_cells() for engine in cell.engines} - {"stepmill"}
    assert parts - bounds == {*readme.LIBRARIES}


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


@pytest.fixture
def pages(tmp_path, monkeypatch):
    for name, marks in (("PAGE", ("bench", "noop", "ratios")), ("README", ("ratios",))):
        path = tmp_path / f"{name}.md"
        path.write_text("".join(f"<!-- {mark}:begin -->\n<!-- {mark}:end -->\n" for mark in marks))
        monkeypatch.setattr(readme, name, path)
    monkeypatch.setattr(readme, "VALUES", tmp_path / "performance.json")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    return tmp_path


def run_file(folder):
    path = folder / "run.json"
    path.write_text(
        json.dumps(results(gym_sync=engine("Gymnasium Sync", 123456.0), stepmill_1w=engine("**stepmill**", 4e5)))
    )
    return str(path)


def test_the_tables_follow_from_the_file_of_values(pages):
    assert readme.main([run_file(pages)]) == 0
    assert "3.24×" in readme.PAGE.read_text()
    assert readme.main(["--check"]) == 0


@pytest.mark.parametrize("name", ["PAGE", "README"])
def test_a_number_that_was_changed_by_hand_is_found(pages, name, capsys):
    readme.main([run_file(pages)])
    page = getattr(readme, name)
    page.write_text(page.read_text().replace("3.24×", "3.25×"))
    if name == "README":  # whose cells are not in this run
        page.write_text(page.read_text().replace("Gymnasium", "gymnasium"))
    assert readme.main(["--check"]) == 1
    assert f"{name}.md" in capsys.readouterr().out


def test_pages_without_marks_are_left_alone(pages):
    readme.README.write_text("no marks")
    before = readme.PAGE.read_text()
    with pytest.raises(ValueError, match="no <!-- ratios:begin -->"):
        readme.main([run_file(pages)])
    assert (readme.README.read_text(), readme.PAGE.read_text()) == ("no marks", before)
