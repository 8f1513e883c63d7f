"""`make run` installs what stepmill and its Atari envs need, and nothing else; the tests that scripts name exist."""

import re
import subprocess

import pytest

from tests.harness.scripts import ROOT

tomllib = pytest.importorskip("tomllib")  # CPython 3.11


def test_make_run_installs_the_dependencies_and_the_extra_atari():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["atari"]]
    (named,) = re.findall(r"^RUN_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(named.split()) == sorted(re.split("[>=]", each)[0] for each in needed)


def test_the_files_of_tests_that_a_script_names_exist():
    scripts = [ROOT / "scripts/test_versions.py", *ROOT.glob("scripts/*.sh")]
    words = {word for each in scripts for word in re.findall(r"\btests/[\w/,{}]+\.py", each.read_text())}
    paths = subprocess.check_output(["bash", "-c", f"echo {' '.join(words)}"], text=True).split()
    assert len(paths) > len(words)
    assert [path for path in paths if not (ROOT / path).exists()] == []
