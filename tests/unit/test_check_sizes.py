"""The size check finds what is too large and nothing else."""

import ast
import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sizes.py"


@pytest.fixture(scope="module")
def check_sizes():
    spec = importlib.util.spec_from_file_location("check_sizes", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(code):
    return ast.parse(code).body[0]


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("()", 0),
        ("(self, a)", 1),
        ("(cls, a, /, b)", 2),
        ("(a, *rest, b, **others)", 4),
    ],
)
def test_parameters_are_those_that_a_caller_gives(check_sizes, signature, expected):
    assert check_sizes.count_parameters(function(f"def f{signature}: pass")) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("pass", 0),
        ("if a:\n  pass\n elif b:\n  pass\n else:\n  pass", 1),
        ("for a in b:\n  if a:\n   with a:\n    pass", 3),
        ("if a:\n  pass\n else:\n  if b:\n   pass\n  pass", 2),
        ("try:\n  pass\n except OSError:\n  while a:\n   pass", 2),
    ],
)
def test_nesting_counts_blocks_inside_blocks(check_sizes, body, expected):
    assert max(map(check_sizes.nesting, function(f"def f():\n {body}").body)) == expected


def test_a_function_inside_a_function_starts_anew(check_sizes):
    code = "def f():\n if a:\n  if b:\n   if c:\n    def g():\n     if d:\n      pass"
    assert list(check_sizes.check_function(SCRIPT, function(code))) == []


def test_what_is_too_large_is_named_with_its_size(check_sizes, tmp_path):
    path = tmp_path / "large.py"
    parameters = ", ".join(f"p{number}" for number in range(8))
    path.write_text(f"def f({parameters}):\n" + "    pass\n" * 500)
    found = {(excess.what, excess.size) for excess in check_sizes.check_file(path)}
    assert found == {("file length", 501), ("length of f()", 501), ("number of parameters of f()", 8)}
