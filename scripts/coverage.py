"""Join docs/coverage.toml with what test runs have shown, and write docs/COVERAGE.md: `python scripts/coverage.py [--check]`.

Each run of the tests with `--covers build/covers/NAME.json` leaves a file; all that are there count. Exit status 1 if an id has
neither a test that ran and passed nor a reason, if a mark names an id that is not in the table, or, with --check, if the page on
disk is not what would be written.
"""

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "coverage.toml"
PAGE = ROOT / "docs" / "COVERAGE.md"
RUNS = ROOT / "build" / "covers"
SYSTEMS = {
    "A": "ALF FastParallelEnvironment",
    "D": "DI-engine env managers",
    "M": "actorcritic MultiEnv",
    "T": "TorchRL MultiThreadedEnv over EnvPool",
    "U": "Unity ML-Agents SubprocessEnvManager",
    "X": "What users ask for or suffer from",
    "G": "Gates across all systems",
}


@dataclass(frozen=True)
class Item:
    """One behaviour or fault. `tests` passed; `failed` are tests that claim it and did not pass."""

    name: str
    what: str
    frontend: str
    not_done: str
    tests: tuple[str, ...]
    failed: tuple[str, ...]

    @property
    def state(self) -> str:
        if self.failed:
            return "**failed**"
        if self.tests:
            return "partly" if self.not_done else "shown"
        return "not done" if self.not_done else "**open**"


def read_shown(runs: Path) -> dict[str, dict[str, bool]]:
    """Return by id which tests have passed; a test that failed in one run has failed."""
    shown: dict[str, dict[str, bool]] = defaultdict(dict)
    for file in sorted(runs.glob("*.json")):
        for name, tests in json.loads(file.read_text()).items():
            for test, has_passed in tests.items():
                shown[name][test] = shown[name].get(test, True) and has_passed
    return shown


def read_items(table: Path, runs: Path) -> list[Item]:
    shown = read_shown(runs)
    items = []
    for name, entry in tomllib.loads(table.read_text()).items():
        tests = shown.get(name, {})
        items.append(
            Item(
                name,
                entry["what"],
                entry["frontend"],
                entry.get("not_done", ""),
                tuple(sorted(test for test, has_passed in tests.items() if has_passed)),
                tuple(sorted(test for test, has_passed in tests.items() if not has_passed)),
            )
        )
    return items


def marked_ids(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (id, place) of each mark in the tests, also of those that no run collects."""
    for path in sorted(folder.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = (node for node in nodes if isinstance(node, ast.Call))
        arguments = (argument for call in calls if _is_covers(call.func) for argument in call.args)
        for argument in arguments:
            value = argument.value if isinstance(argument, ast.Constant) else ast.unparse(argument)
            yield str(value), f"{path.relative_to(folder.parent)}:{argument.lineno}"


def _is_covers(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "covers"


def find_faults(items: list[Item], marks: list[tuple[str, str]]) -> list[str]:
    known = {item.name for item in items}
    faults = [f"{place}: {name!r} is not in {TABLE.name}" for name, place in marks if name not in known]
    for item in items:
        if not item.what:
            faults.append(f"{item.name} does not say what it is")
        if item.failed:
            faults.append(f"{item.name} is claimed by a test that did not pass: {', '.join(item.failed)}")
        elif not item.tests and not item.not_done:
            faults.append(f"{item.name} has neither a test that ran and passed nor a reason why it is not done")
    return faults


def write_page(items: list[Item]) -> str:
    lines = [
        "# Coverage",
        "",
        "What the five source systems do, what they do wrong, and which test shows that stepmill does it, or does it right.",
        "Written by `make coverage` from [coverage.toml](coverage.toml) and the tests that ran and passed; do not edit.",
    ]
    for prefix, title in SYSTEMS.items():
        mine = [item for item in items if item.name.split("-")[0] == prefix]
        counts = ", ".join(
            f"{sum(item.state == state for item in mine)} {state.strip('*')}"
            for state in ("shown", "partly", "not done", "**open**", "**failed**")
            if any(item.state == state for item in mine)
        )
        lines += ["", f"## {title}: {counts}", "", "| id | what | front-end | state | tests |", "|---|---|---|---|---|"]
        for item in mine:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in item.tests + item.failed)
            state = f"{item.state}: {item.not_done}" if item.not_done else item.state
            lines.append(f"| {item.name} | {item.what} | {item.frontend} | {state} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, or check it; print what is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/coverage.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare docs/COVERAGE.md instead of writing it")
    is_check = parser.parse_args().check
    items = read_items(TABLE, RUNS)
    faults = find_faults(items, list(marked_ids(ROOT / "tests")))
    page = write_page(items)
    if not is_check:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        faults.append(f"docs/{PAGE.name} is not what the tests have shown; run make coverage")
    for fault in faults:
        print(fault, file=sys.stderr)
    states = [item.state.strip("*") for item in items]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
