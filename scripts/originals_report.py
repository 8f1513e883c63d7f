"""Writes docs/originals.md from the results in build/originals, where each run of a suite writes one."""

import json
from dataclasses import dataclass
from typing import Any

from diengine_env import ROOT
from originals_suites import Suite, read_suites

RESULTS = ROOT / "build" / "originals"
PAGE = ROOT / "docs" / "originals.md"
HEAD = """# The originals' own tests, run with stepmill's classes

Written by `make test-originals`; do not edit. Each suite is the original library's own test code, from its public repository or
its package, with our classes in the place of its own. "Listed" cases fail, each for the reason below; a failure that is not
listed fails the run. A suite's checkout lies in the folder that `STEPMILL_ORIGINALS` names; a suite without its checkout is
left out.
"""


@dataclass(frozen=True)
class Result:
    """The result of one suite. Without `faults`, all `failed` cases are in the list of expected failures."""

    suite: str
    title: str
    version: str
    commit: str
    date: str
    seconds: float
    passed: int
    failed: int
    skipped: int
    faults: int
    training: dict[str, Any] | None


def write_report(*, is_forced: bool = False) -> None:
    """Write the page if there is a result of every suite, or `is_forced`; otherwise name the missing ones."""
    suites = read_suites()
    results = {suite.name: read_result(suite.name) for suite in suites}
    missing = [name for name, result in results.items() if result is None]
    if missing and not is_forced:
        print(f"docs/originals.md is not written: there is no result of {', '.join(missing)}; --write writes it")
        return
    found = [(suite, results[suite.name]) for suite in suites]
    parts = [HEAD, _table(found), "\n## Trainings\n", _trainings(found), "\n## Listed cases\n"]
    parts += [_listed(suite) for suite in suites if suite.ours or suite.ours_unsteady]
    PAGE.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def read_result(name: str) -> Result | None:
    """Return the last result of a suite; None if there is none."""
    file = RESULTS / f"{name}.json"
    return Result(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def _table(found: list[tuple[Suite, Any]]) -> str:
    lines = [
        "| suite | version | checkout | cases | passed | listed | skipped | not as listed | seconds | date |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for suite, result in found:
        if result is None:
            lines.append(f"| {suite.title} | - | - | not run | | | | | | |")
            continue
        checkout = f"`{suite.source}` at {result.commit[:10]}" if suite.source else "the package"
        cases = result.passed + result.failed + result.skipped
        lines.append(
            f"| {result.title} | {result.version or '-'} | {checkout} | {cases} | {result.passed} | {result.failed} "
            f"| {result.skipped} | {result.faults} | {result.seconds:.0f} | {result.date} |"
        )
    return "\n".join(lines)


def _trainings(found: list[tuple[Suite, Any]]) -> str:
    lines = ["| library | what | command | steps | reward at the end | seconds |", "|---|---|---|---|---|---|"]
    for _, result in found:
        if result is not None and result.training is not None:
            told = result.training
            lines.append(
                f"| {result.title} | {told['what']} | `{told['command']}` | {told['steps']} | {told['reward']} "
                f"| {told['seconds']:.0f} |"
            )
    return "\n".join(lines)


def _listed(suite: Suite) -> str:
    lines = [f"### {suite.title}\n"]
    lines += [f"- `{case}`: {reason}" for case, reason in suite.ours.items()]
    lines += [f"- `{case}` (passes in some runs): {reason}" for case, reason in suite.ours_unsteady.items()]
    return "\n".join(lines) + "\n"
