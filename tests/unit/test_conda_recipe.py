"""The recipe for conda-forge agrees with pyproject.toml and the version."""

import re
from pathlib import Path

import pytest

import stepmill

tomllib = pytest.importorskip("tomllib")  # CPython 3.11
ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "conda" / "recipe.yaml").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(section):
    """Return the packages of a section with their versions, without spaces, but for Python and pip."""
    listed = re.search(rf"^  {section}:\n((?:    - .*\n)+)", RECIPE, re.MULTILINE)[1]
    names = [line.removeprefix("    - ").replace(" ", "") for line in listed.splitlines()]
    return {name for name in names if not name.startswith(("python", "pip", "${{"))}


def test_it_has_the_version_and_the_text_of_the_project():
    assert f'version: "{stepmill.__version__}"' in RECIPE
    assert f"summary: {PROJECT['project']['description']}" in RECIPE
    assert f"python {PROJECT['project']['requires-python']}" in RECIPE


def test_it_needs_what_the_project_needs():
    assert requirements("run") == set(PROJECT["project"]["dependencies"])
    assert requirements("host") == set(PROJECT["build-system"]["requires"])


def test_its_command_is_the_projects():
    (command,) = PROJECT["project"]["scripts"].items()
    assert f"- {command[0]} = {command[1]}" in RECIPE
