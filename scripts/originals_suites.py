"""Reads and checks the suites of `make test-originals`, which are the TOML files of tests/originals/suites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import tomllib
from diengine_env import ROOT

SUITES = ROOT / "tests" / "originals" / "suites"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of one library, and those of them that are expected to fail.

    Attributes:
        title: the library, for tables.
        package: its distribution's name; the version that ran is recorded.
        environment: see originals_envs.
        source: folder below $STEPMILL_ORIGINALS; empty if the tests come with the installed package.
        needs_source: False if stepmill's own tests and the training run without the source, too.
        copy: folders and files of the source that the tests need in their folder.
        shards: arguments of pytest, a list for each of the runs that are started at the same time.
        plugin: the module of tests/originals/plugins that replaces the original classes by stepmill's.
        compares: whether the tests also run with the original classes.
        own_tests: tests of stepmill that run in that environment, too.
        training: a module that trains a policy, with its arguments; its last line of output is JSON.
        test_limit_s, limit_s: time limits of a test and of the run.
        ours, original: the reason for each failing test, with stepmill's and with the original classes. A name that ends
            in * matches all names that begin with it.
        ours_unsteady, original_unsteady: reason by test that passes in some runs and fails in others.
        original_hanging: tests of `original` that wait until their own limits, which take a minute each; they are ended sooner.
    """

    name: str
    title: str
    package: str
    environment: str
    source: str = ""
    needs_source: bool = True
    copy: Sequence[str] = ()
    shards: Sequence[Sequence[str]]
    plugin: str
    compares: bool = False
    own_tests: Sequence[str] = ()
    training: Sequence[str] = ()
    test_limit_s: int = 60
    limit_s: int = 1200
    ours: Mapping[str, str] = field(default_factory=dict)
    original: Mapping[str, str] = field(default_factory=dict)
    ours_unsteady: Mapping[str, str] = field(default_factory=dict)
    original_unsteady: Mapping[str, str] = field(default_factory=dict)
    original_hanging: Sequence[str] = ()


def read_suites(names: Sequence[str] = ()) -> list[Suite]:
    """Return the suites that are named, or all."""
    files = sorted(SUITES.glob("*.toml"))
    unknown = set(names) - {file.stem for file in files}
    if unknown:
        raise SystemExit(f"no such suites: {sorted(unknown)}; there are {[file.stem for file in files]}")
    return [_read(file) for file in files if not names or file.stem in names]


def _read(file: Path) -> Suite:
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    unknown = set(content) - {each.name for each in fields(Suite)}
    if unknown:
        raise SystemExit(f"{file}: unknown keys {sorted(unknown)}")
    return Suite(name=file.stem, **content)


def reason_of(case: str, listed: Mapping[str, str]) -> str | None:
    """Return the reason why a case is listed, or None if it is not."""
    if case in listed:
        return listed[case]
    prefixes = [name for name in listed if name.endswith("*") and case.startswith(name[:-1])]
    return listed[max(prefixes, key=len)] if prefixes else None


def unexpected(outcomes: Mapping[str, str], listed: Mapping[str, str], unsteady: Mapping[str, str]) -> list[str]:
    """Return the differences from the list: cases that fail and are not listed, and listed cases that do not fail."""
    failed = {case for case, outcome in outcomes.items() if outcome == "failed" and reason_of(case, unsteady) is None}
    faults = [f"{case} failed, and is not listed" for case in sorted(failed) if reason_of(case, listed) is None]
    for entry in listed:
        meant = {case for case in failed if case == entry or (entry.endswith("*") and case.startswith(entry[:-1]))}
        if not meant:
            faults.append(f"{entry} is listed, and did not fail")
    return faults
