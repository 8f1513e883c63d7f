"""What `make model` runs, which searches the model of the protocol with spin."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "model"


def mutants_in(text: str) -> set[str]:
    """Names of the switches that model files look at and do not set, sizes apart."""
    sizes = set(re.findall(r"^#ifndef (\w+)\n#define \1\b", text, re.MULTILINE))
    switches = set(re.findall(r"^#if(?:n?def| defined\() ?(\w+)", text, re.MULTILINE))
    switches |= set(re.findall(r"defined\((\w+)\)", text))
    return switches - sizes


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
