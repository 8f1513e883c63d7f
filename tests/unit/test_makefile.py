"""`make run` installs what stepmill and its Atari envs need, and nothing else."""

import re

import pytest

from tests.harness.scripts import ROOT

tomllib = pytest.importorskip("tomllib")  # CPython 3.11


def test_make_run_installs_the_dependencies_and_the_extra_atari():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["atari"]]
    (named,) = re.findall(r"^RUN_PACKAGES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(named.split()) == sorted(re.split("[>=]", each)[0] for each in needed)
