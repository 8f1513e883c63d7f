"""The coverage table cannot lie: what no test has shown is named."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the script reads TOML with the standard library of 3.11", allow_module_level=True)

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("coverage_script", ROOT / "scripts" / "coverage.py")
assert _SPEC is not None
assert _SPEC.loader is not None
coverage = importlib.util.module_from_spec(_SPEC)
sys.modules["coverage_script"] = coverage
_SPEC.loader.exec_module(coverage)

TABLE = """
["A-1"]
what = "starts"
frontend = "alf"

["A-2"]
what = "stops"
frontend = "alf"
not_done = "no one asked"
"""


def faults_of(folder: Path, shown: dict[str, dict[str, bool]], *marks: tuple[str, str]) -> list[str]:
    (folder / "table.toml").write_text(TABLE)
    (folder / "run.json").write_text(json.dumps(shown))
    found: list[str] = coverage.find_faults(coverage.read_items(folder / "table.toml", folder), list(marks))
    return found


def test_an_id_is_covered_by_a_test_that_passed_or_by_a_reason(tmp_path: Path) -> None:
    assert faults_of(tmp_path, {"A-1": {"tests/t.py::test_x": True}}) == []


def test_an_id_without_test_and_reason_is_a_fault(tmp_path: Path) -> None:
    assert ["A-1 has neither" in fault for fault in faults_of(tmp_path, {})] == [True]


def test_a_test_that_did_not_pass_takes_its_claim_away(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, {"A-1": {"tests/t.py::test_x": True, "tests/t.py::test_y": False}})
    assert "test_y" in fault


def test_a_failure_in_one_run_outweighs_a_success_in_another(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"A-1": {"tests/t.py::test_x": False}}))
    (fault,) = faults_of(tmp_path, {"A-1": {"tests/t.py::test_x": True}})
    assert "did not pass" in fault


def test_a_mark_with_an_unknown_id_is_a_fault(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, {"A-1": {"tests/t.py::test_x": True}}, ("A-99", "tests/t.py:3"))
    assert "A-99" in fault


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


def test_every_known_id_stands_in_the_table_once() -> None:
    names = [item.name for item in coverage.read_items(coverage.TABLE, coverage.RUNS)]
    assert len(names) == len(set(names)) == 197
