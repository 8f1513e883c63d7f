"""The prose check finds banned phrases and misspelt words, and skips what is excluded."""

import pytest

from scripts import check_prose

RULES = """
[accepted]
RetryIn
[banned]
\\banew\\b => write "again"
[unchecked]
tests
"""


def test_a_banned_phrase_is_reported_with_its_line_and_advice():
    rules = check_prose.read_rules(RULES)
    found = list(check_prose.find_banned("It begins.\nIt begins Anew.\nrenewal", rules.banned))
    assert found == [(2, "Anew", 'write "again"')]


@pytest.mark.parametrize(("name", "is_unchecked"), [("tests/a.py", True), ("tests", True), ("tests2/a.py", False)])
def test_unchecked_paths_are_whole_folders(name, is_unchecked):
    assert check_prose.is_unchecked(name, check_prose.read_rules(RULES).unchecked) is is_unchecked


def test_a_front_end_that_is_not_described_everywhere_is_reported():
    files = {
        "src/stepmill/frontends/batch_rows.py": "",
        "src/stepmill/frontends/new_lib/env.py": "",
        "pyproject.toml": '[project.optional-dependencies]\nold = ["old"]\n[project.scripts]\n',
        "CHANGELOG.md": "- Something else.\n",
        "docs/guides/other.md": "`stepmill.frontends.old_lib`\n",
    }
    others = [place for place in check_prose.PLACES_OF_FRONT_ENDS if place != "CHANGELOG.md"]
    files |= dict.fromkeys(others, "old_lib\n")
    found = check_prose.undescribed([*files], files.__getitem__)
    missing = [
        "docs/switching/new_lib.md",
        "pyproject.toml",
        "CHANGELOG.md",
        *others[:-1],
    ]  # without an extra nothing to try
    assert [line.partition(":")[0] for line in found] == missing
    files["pyproject.toml"] = files["pyproject.toml"].replace("old =", "new-lib =")
    files |= dict.fromkeys(check_prose.PLACES_OF_FRONT_ENDS, "- The front-end `new_lib`.\n")
    files["docs/switching/new_lib.md"] = "# New\n"
    assert check_prose.undescribed([*files], files.__getitem__) == []


def test_a_misspelt_word_is_reported_unless_it_is_accepted(tmp_path):
    pytest.importorskip("codespell_lib")
    path = tmp_path / "text.md"
    path.write_text("teh RetryIn\n")  # codespell:ignore teh
    (line,) = check_prose.misspelt([str(path)], check_prose.read_rules(RULES).accepted)
    assert "teh ==> the" in line  # codespell:ignore teh
