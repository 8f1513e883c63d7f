"""The public API is the one that tests/unit/public_api.txt lists, and each of its names has a docstring."""

import pytest

from scripts import public_api
from tests.harness.scripts import run_source

OLD = "stepmill.Pool:00 recv:01\nstepmill.make:02\n"


def test_the_public_names_and_signatures_are_those_of_the_snapshot():
    assert public_api.SNAPSHOT.read_text() == public_api.current(), (
        "the public API has changed: describe it in CHANGELOG.md, then run: python scripts/public_api.py --write"
    )


def test_every_public_class_and_function_has_a_docstring():
    assert public_api.undocumented() == []


def test_every_public_name_is_on_a_page_and_every_public_class_has_an_example():
    done = run_source("import sys; sys.path.insert(0, 'scripts'); import docs_api; docs_api.api_pages()")
    assert done.returncode == 0, done.stderr


def test_every_module_that_is_listed_has_public_names():
    assert [module for module in public_api.MODULES if not public_api.public_names(module)] == []


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("recv:01", "recv:03", ["stepmill.Pool.recv"]),
        ("make:02", "make:03", ["stepmill.make"]),
        ("recv", "receive", ["stepmill.Pool.receive", "stepmill.Pool.recv"]),
    ],
)
def test_what_was_changed_added_or_removed_is_named(old, new, changed):
    assert public_api.changed_names(OLD, OLD.replace(old, new)) == changed


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["stepmill.Pool.recv"], []),
        (["stepmill.Pool.send"], ["stepmill.Pool.send"]),
        (["stepmill.Rollout.collect"], []),
        (["stepmill.frontends.sb3.SB3VecEnv.step"], []),
        (["stepmill.frontends.alf.ProcessEnvironment.step"], ["stepmill.frontends.alf.ProcessEnvironment.step"]),
        (["stepmill.Old"], ["stepmill.Old"]),
    ],
)
def test_only_the_newest_section_of_the_changelog_counts(names, missing):
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n- `recv` and `Rollout`; `stepmill.frontends.sb3`.\n\n## 0.1.0\n\n- `Old`.\n"
    )
    assert public_api.missing_from_changelog(names, changelog) == missing


def test_the_names_of_a_lazily_loaded_module_lead_to_their_definitions():
    names = {public.path: public.definition for public in public_api.all_names()}
    found = names["stepmill.frontends.torchrl.StepmillEnv"]
    assert found.is_class
    assert found.canonical_path.startswith("stepmill.frontends.torchrl.")


def test_the_members_of_a_class_are_inherited_ones_and_attributes_that_its_constructor_sets_too():
    (error,) = (public for public in public_api.all_names() if public.path == "stepmill.EnvTimeout")
    members = {word.partition(":")[0] for word in public_api.describe(error).split()}
    assert {"__init__", "env_id", "message", "timeout_s"} <= members
