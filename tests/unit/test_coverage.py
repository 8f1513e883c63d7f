"""The coverage table names every behaviour that no test has shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

coverage = pytest.importorskip("scripts.coverage", reason="CPython 3.10 does not have tomllib")
TABLE = """
["A-1"]
what = "starts"
frontend = "alf"

["A-2"]
what = "stops"
frontend = "alf"
not_done = "no one asked"
"""


def problems_of(folder: Path, shown: dict[str, dict[str, bool]], *marks: tuple[str, str]) -> list[str]:
    (folder / "table.toml").write_text(TABLE)
    (folder / "run.json").write_text(json.dumps(shown))
    found: list[str] = coverage.find_problems(coverage.read_items(folder / "table.toml", folder), list(marks))
    return found


SHOWN = {"A-1": {"tests/t.py::test_x": True}}


@pytest.mark.parametrize(
    ("shown", "marks", "expected"),
    [
        (SHOWN, [], []),  # A-2 has a reason
        ({}, [], ["A-1 has neither"]),
        ({"A-1": {"tests/t.py::test_x": True, "tests/t.py::test_y": False}}, [], ["test_y"]),
        (SHOWN, [("A-99", "tests/t.py:3")], ["A-99"]),
    ],
)
def test_an_id_needs_a_test_that_passed_or_a_reason_and_a_mark_an_id(
    tmp_path: Path, shown: dict[str, dict[str, bool]], marks: list[tuple[str, str]], expected: list[str]
) -> None:
    problems = problems_of(tmp_path, shown, *marks)
    assert [part in problem for part, problem in zip(expected, problems, strict=True)] == [True] * len(expected)


def test_a_failure_in_one_run_outweighs_a_success_in_another(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"A-1": {"tests/t.py::test_x": False}}))
    (problem,) = problems_of(tmp_path, SHOWN)
    assert "did not pass" in problem


def test_marks_are_found_in_tests_that_no_run_collects(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text('@pytest.mark.soak\n@pytest.mark.covers("A-1", "A-B2")\ndef test_x(): ...\n')
    assert [name for name, _ in coverage.marked_ids(tmp_path)] == ["A-1", "A-B2"]


def test_a_skipped_test_has_shown_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from pathlib import Path\nfrom tests.harness.covers import Covers\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'covers(*ids): x')\n"
        "    config.pluginmanager.register(Covers(Path('shown.json')))\n"
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.covers("A-1")
        @pytest.mark.parametrize("number", [1, 2])
        def test_good(number): pass

        @pytest.mark.covers("A-2")
        def test_skipped(): pytest.skip("not here")

        @pytest.mark.covers("A-3")
        @pytest.mark.parametrize("number", [1, 2])
        def test_half(number): assert number == 1

        @pytest.mark.covers("A-4")
        def test_not_asked_for(): pass
        """
    )
    pytester.inline_run(
        "-p", "no:cacheprovider", "--deselect", "test_a_skipped_test_has_shown_nothing.py::test_not_asked_for"
    )
    shown = {name: list(tests.values()) for name, tests in json.loads(Path("shown.json").read_text()).items()}
    assert shown == {"A-1": [True], "A-3": [False]}


PARTED = """
["A-1"]
what = "starts"
frontend = "alf"
parts = { fork = "by fork", spawn = "by spawn" }
"""


def parted_item(folder: Path, shown: dict[str, dict[str, bool]]) -> object:
    (folder / "table.toml").write_text(PARTED)
    (folder / "run.json").write_text(json.dumps(shown))
    (item,) = coverage.read_items(folder / "table.toml", folder)
    return item


def test_an_entry_is_shown_once_all_of_its_parts_are(tmp_path: Path) -> None:
    item: Any = parted_item(tmp_path, {"A-1/fork": {"tests/t.py::test_x": True}})
    assert (item.state, item.missing) == ("partly", ("by spawn",))
    assert "partly: not shown: by spawn" in coverage.write_page([item])
    item = parted_item(tmp_path, {f"A-1/{part}": {"tests/t.py::test_x": True} for part in ("fork", "spawn")})
    assert (item.state, item.missing) == ("shown", ())


def test_a_mark_of_an_entry_with_parts_must_name_one(tmp_path: Path) -> None:
    item = parted_item(tmp_path, {"A-1/fork": {"tests/t.py::test_x": True}})
    problems = coverage.find_problems([item], [("A-1", "t.py:1"), ("A-1/fork", "t.py:2"), ("A-1/other", "t.py:3")])
    assert [text.partition(":")[0] + text.split(":")[1] for text in problems] == ["t.py1", "t.py3"]
