"""The model of the protocol names what it mirrors, and names are looked up here. `make model` searches it, with spin."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "model"
FOLDERS = {"C++": ROOT / "src" / "stepmill" / "_native", "Python": ROOT / "src" / "stepmill"}
# Definitions begin in the first column, calls do not.
DEFINED = {"C++": r"^\S[^;={{]*\b{name}\(", "Python": r"^\s*def {name}\("}
# The lines that name functions: `C++: f (file), g (file)`. The text up to the next language or the end of the comment.
NAMED = re.compile(r"(C\+\+|Python): ((?:\w+ \([\w/.]+\)(?:, )?)+)")


def named_functions() -> list[tuple[str, str, str]]:
    """Language, name and file of every function that the model says it mirrors."""
    found = set()
    for path in MODEL.glob("*.pml"):
        for language, names in NAMED.findall(path.read_text()):
            found |= {(language, name, file) for name, file in re.findall(r"(\w+) \(([\w/.]+)\)", names)}
    return sorted(found)


def mutants_in(text: str) -> set[str]:
    """Names of the switches that model files look at and do not set, sizes apart."""
    sizes = set(re.findall(r"^#ifndef (\w+)\n#define \1\b", text, re.MULTILINE))
    switches = set(re.findall(r"^#if(?:n?def| defined\() ?(\w+)", text, re.MULTILINE))
    switches |= set(re.findall(r"defined\((\w+)\)", text))
    return switches - sizes


@pytest.mark.parametrize(("language", "name", "file"), named_functions())
def test_every_function_that_the_model_names_exists(language, name, file):
    source = (FOLDERS[language] / file).read_text()
    assert re.search(DEFINED[language].format(name=name), source, re.MULTILINE), f"{file} defines no {name}"


def test_every_mutant_in_the_model_is_run(monkeypatch):
    monkeypatch.syspath_prepend(str(MODEL))
    import runs

    text = "".join(path.read_text() for path in sorted(MODEL.glob("*.pml")))
    sizes = {size for bounds in runs.BOUNDS.values() for size in bounds.sizes}
    assert mutants_in(text) - sizes == set(runs.MUTANTS) | set(runs.EQUIVALENTS)
    assert {bounds for bounds, _ in (*runs.MUTANTS.values(), *runs.EQUIVALENTS.values())} <= set(runs.BOUNDS)


def test_without_spin_the_target_fails_with_the_line_that_installs_it():
    nothing = {**os.environ, "PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, str(MODEL / "check.py")], env=nothing, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "apt-get install -y spin" in done.stderr
