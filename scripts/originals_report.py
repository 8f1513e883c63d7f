"""Writes docs/originals.md from the results in build/originals, where each run of a suite writes one."""

import json
from dataclasses import dataclass
from typing import Any

from diengine_env import ROOT
from originals_suites import Suite, read_suites

RESULTS = ROOT / "build" / "originals"
PAGE = ROOT / "docs" / "originals.md"
HEAD = """# The originals' own tests

`make test-originals` writes this page; do not edit it. Each suite is the original library's own test code, from its public
repository or its package. It runs with stepmill's classes in the place of the library's classes. "Listed" cases fail, each for
the reason below, and a failure that is not listed fails the run. "Our tests" counts the tests of stepmill that passed: they run
programs with the original and with stepmill, or compare their signatures. actorcritic has no tests of its own. The folder that
`STEPMILL_ORIGINALS` names has the checkouts of the suites. A suite without its checkout is left out.
"""


@dataclass(frozen=True)
class Result:
    """The result of one suite. Without `faults`, all `failed` cases are in the list of expected failures.

    `own_tests` of stepmill passed in the original's environment.
    """

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
    own_tests: int = 0


def write_report() -> None:
    """Write the page. Suites without a result in build/originals keep their rows of the present page."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    found = [(suite, read_result(suite.name)) for suite in read_suites()]
    parts = [HEAD, _table(found, page), "\n## Trainings\n", _trainings(found, page), "\n## Listed cases\n"]
    parts += [_listed(suite) for suite, _ in found if suite.ours or suite.ours_unsteady]
    PAGE.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def read_result(name: str) -> Result | None:
    """Return the last result of a suite; None if there is none."""
    file = RESULTS / f"{name}.json"
    return Result(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def _table(found: list[tuple[Suite, Result | None]], page: str) -> str:
    lines = [
        "| suite | version | checkout | cases | passed | listed | skipped | not as listed | our tests | seconds | date |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for suite, result in found:
        if result is None:
            results, _, _ = page.partition("## Trainings")
            lines += _rows_of(suite, results) or [f"| {suite.title} | - | - | not run | | | | | | | |"]
            continue
        checkout = f"`{suite.source}` at {result.commit[:10]}" if suite.source else "the package"
        cases = result.passed + result.failed + result.skipped
        lines.append(
            f"| {result.title} | {result.version or '-'} | {checkout} | {cases} | {result.passed} | {result.failed} "
            f"| {result.skipped} | {result.faults} | {result.own_tests} | {result.seconds:.0f} | {result.date} |"
        )
    return "\n".join(lines)


def _trainings(found: list[tuple[Suite, Result | None]], page: str) -> str:
    lines = ["| library | training | command | steps | reward at the end | seconds |", "|---|---|---|---|---|---|"]
    for suite, result in found:
        if result is None:
            lines += _rows_of(suite, page.partition("## Trainings")[2])
        elif result.training is not None:
            training = result.training
            lines.append(
                f"| {result.title} | {training['what']} | `{training['command']}` | {training['steps']} "
                f"| {training['reward']} | {training['seconds']:.0f} |"
            )
    return "\n".join(lines)


def _rows_of(suite: Suite, text: str) -> list[str]:
    """Return the rows of a table that begin with the suite's title."""
    return [line for line in text.splitlines() if line.startswith(f"| {suite.title} |")]


def _listed(suite: Suite) -> str:
    lines = [f"### {suite.title}\n"]
    lines += [f"- `{case}`: {reason}" for case, reason in suite.ours.items()]
    lines += [f"- `{case}` (passes in some runs): {reason}" for case, reason in suite.ours_unsteady.items()]
    return "\n".join(lines) + "\n"
