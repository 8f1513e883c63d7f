"""An archive of a release leads to the repository that built it."""

import re
import shutil

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

from scripts import check_release, release_links

ADDRESS = "https://github.com/somebody/stepmill"


@pytest.fixture
def project(tmp_path):
    for name in ("pyproject.toml", "CITATION.cff", "README.md"):
        shutil.copy(release_links.ROOT / name, tmp_path / name)
    return tmp_path


def test_a_checkout_of_a_release_has_the_addresses_of_its_repository(project):
    release_links.write_links(ADDRESS, "v9.8.7", project)
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert metadata["name"] == "stepmill"
    assert metadata["urls"]["Homepage"] == ADDRESS
    assert metadata["urls"]["Changelog"] == f"{ADDRESS}/blob/v9.8.7/CHANGELOG.md"
    assert f"\nrepository-code: {ADDRESS}\n" in (project / "CITATION.cff").read_text()


def test_every_link_of_the_readme_is_an_address(project):
    before = re.findall(r"\]\(([^)]*)\)", (project / "README.md").read_text())
    release_links.write_links(ADDRESS, "v9.8.7", project)
    text = (project / "README.md").read_text()
    after = re.findall(r"\]\(([^)]*)\)", text)
    assert len(after) == len(before)
    assert all(link.startswith("https://") for link in after)
    assert f"({ADDRESS}/raw/v9.8.7/docs/pictures/kill_worker.svg)" in text
    assert f"({ADDRESS}/blob/v9.8.7/docs/quickstart.md#which-backend)" in text
    assert f"({ADDRESS}/tree/v9.8.7/examples/)" in text


def test_this_repository_names_no_address_that_a_release_would_contradict():
    assert check_release.problems_of("v0")[-1].startswith("pyproject.toml has no [project.urls]")
