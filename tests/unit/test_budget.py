"""The budget counts code, and a limit rises by a new decision only."""

import subprocess

import pytest

budget = pytest.importorskip("scripts.budget", reason="CPython 3.10 does not have tomllib")


@pytest.fixture
def checkout(tmp_path):
    """A repository with a limit of 10 for `lines.pool`, allowed by decision 0001."""
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "-b", "main", tmp_path], check=True)
    decide(tmp_path, "0001", 10)
    commit(tmp_path)
    return tmp_path


def decide(checkout, number, limit, *, reason="## What was deleted\n\nNothing.\n"):
    row = f"| `lines.pool` | 9 | {limit:,} |"
    (checkout / "docs" / "decisions" / f"{number}-a-decision.md").write_text(f"# A page\n\n{row}\n\n{reason}")
    set_limit(checkout, limit, number)


def set_limit(checkout, limit, number):
    (checkout / "budget.toml").write_text(f'[lines]\npool = {{ limit = {limit}, decision = "{number}" }}\n')


def commit(checkout):
    settings = (
        "user.name=a",
        "user.email=a@b",
        "commit.gpgsign=false",
        "maintenance.auto=false",
    )  # no process that outlives git
    git = ["git", "-C", str(checkout), *(word for each in settings for word in ("-c", each))]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a change"], check=True)


def wrong(checkout, measured):
    limits = budget.read_limits((checkout / "budget.toml").read_text())
    return list(budget.check(checkout, limits, {"lines.pool": measured}))


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ('"""A docstring."""\n\n# a comment\nx = 1  # another\n', 1),
        ('def f():\n    """Say what\n    it does."""\n    return """two\nlines"""\n', 3),
        ("x = [\n    1,\n\n    2,\n]\n", 4),
    ],
)
def test_lines_of_python_are_lines_with_tokens(code, lines):
    assert budget.python_lines(code) == lines


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("// one\n/* two\n three */\nint x;  // four\n\n", 1),
        ('auto a = "/*";\nint b;\nauto c = "*/";\n', 3),
        ("int a; /* so\nint b;\n*/ int c;\n", 2),
    ],
)
def test_lines_of_cpp_are_those_outside_comments(code, lines):
    assert budget.cpp_lines(code) == lines


def test_a_method_counts_where_the_name_before_it_is_annotated_with_its_class(tmp_path):
    (tmp_path / "pool").mkdir()
    (tmp_path / "_native.pyi").write_text("def now() -> int: ...\nclass State:\n    def send(self) -> None: ...\n")
    (tmp_path / "pool" / "a.py").write_text(
        "def f(state: _native.State, other: int):\n    state.send()\n    other.send()\n"
    )
    assert budget.native_uses(tmp_path) == {"State.send"}
    (tmp_path / "pool" / "b.py").write_text("_native.now()\n")
    assert budget.native_uses(tmp_path) == {"State.send", "now"}


def test_more_than_the_limit_is_an_error_and_less_is_not(checkout):
    assert wrong(checkout, 10) == []
    assert ["lines.pool is 11, at most 10 allowed" in line for line in wrong(checkout, 11)] == [True]


def test_a_measure_without_a_limit_is_an_error(checkout):
    assert "has no limit" in next(budget.check(checkout, {}, {"lines.new": 1}))


@pytest.mark.parametrize("number", ["0001", "0002"])
def test_a_limit_is_at_most_the_number_in_its_page(checkout, number):
    decide(checkout, number, 12)
    set_limit(checkout, 13, number)
    assert any(f"page {number} of docs/decisions allows 12" in line for line in wrong(checkout, 9))


def test_a_limit_rises_by_a_page_that_is_new(checkout):
    decide(checkout, "0002", 1200)
    assert wrong(checkout, 1100) == []
    commit(checkout)
    assert wrong(checkout, 1100) == [], "the parent commit does not have the page either"


def test_a_limit_does_not_rise_by_an_edited_page(checkout):
    decide(checkout, "0001", 12)
    (problem,) = wrong(checkout, 9)
    assert problem.startswith("lines.pool: the limit was 10 and is 12")
    commit(checkout)
    assert wrong(checkout, 9) == [problem]


def test_a_page_that_does_not_say_what_was_deleted_allows_nothing(checkout):
    decide(checkout, "0002", 12, reason="## Why\n")
    assert any("no page 0002" in line for line in wrong(checkout, 9))


def test_write_lowers_limits_and_leaves_a_hundredth_for_repairs():
    limits = {"lines.pool": budget.Limit(5000, "0001"), "names.of_Pool": budget.Limit(40, "0001")}
    lower = budget.lower_limits(limits, {"lines.pool": 4005, "names.of_Pool": 39})
    assert lower == {"lines.pool": 4055, "names.of_Pool": 39}
    text = '[lines]  # of code\npool = { limit = 5000, decision = "0001" }\n[names]\nof_Pool = { limit = 40, decision = "0001" }\n'
    assert budget.read_limits(budget.write_limits(text, lower))["lines.pool"].value == 4055
