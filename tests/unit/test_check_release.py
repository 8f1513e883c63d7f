"""A release is published only if tag, version, citation and changelog agree."""

import pytest

from scripts import check_release


@pytest.fixture
def project(tmp_path):
    (tmp_path / "src/stepmill").mkdir(parents=True)
    (tmp_path / "src/stepmill/_version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\nlicense: y\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2030-01-31\n")
    (tmp_path / "pyproject.toml").write_text("[project.urls]\n")
    (tmp_path / "conda").mkdir()
    (tmp_path / "conda/recipe.yaml").write_text('context:\n  version: "1.2.3"\n')
    return tmp_path


def test_a_release_in_which_everything_agrees_has_no_problem(project):
    assert check_release.problems_of("v1.2.3", project) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("src/stepmill/_version.py", '__version__ = "1.2.4"\n', "the tag is v1.2.3"),
        ("CITATION.cff", "version: 1.2.2\n", "CITATION.cff has another version"),
        ("conda/recipe.yaml", '  version: "1.2.2"\n', "conda/recipe.yaml has another version"),
        ("CHANGELOG.md", "## [Unreleased]\n\n## [1.2.3] - 2030-01-31\n", "newest section"),
        ("pyproject.toml", "[project]\n", "no [project.urls]"),
    ],
)
def test_what_does_not_agree_is_named(project, name, text, problem):
    (project / name).write_text(text)
    assert problem in "\n".join(check_release.problems_of("v1.2.3", project))


def test_the_version_of_this_project_is_also_that_of_the_citation():
    assert not [problem for problem in check_release.problems_of("v0") if "CITATION" in problem]
