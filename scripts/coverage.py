"""Join docs/coverage.toml with the results of test runs, and write build/COVERAGE.md.

Each test run with `--covers build/covers/NAME.json` writes a file, and all these files are read. The exit status is 1 if an id
has neither a test that passed nor a reason why it is not done, or if a mark in the tests names an unknown id.
"""

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
PAGE = ROOT / "build" / "COVERAGE.md"
RUNS = ROOT / "build" / "covers"
SYSTEMS = {
    "A": "ALF FastParallelEnvironment",
    "D": "DI-engine env managers",
    "M": "actorcritic MultiEnv",
    "T": "TorchRL MultiThreadedEnv over EnvPool",
    "U": "Unity ML-Agents SubprocessEnvManager",
    "X": "What users of these libraries ask for or complain about",
    "G": "Requirements on all systems",
}


@dataclass(frozen=True)
class Item:
    """One behaviour or fault. `tests` passed; `failed` are tests marked with it that did not pass.

    An entry may have parts; a mark then names the part that its test shows, as "A-1/spawn". `missing` are the parts that no
    test has shown.
    """

    name: str
    what: str
    frontend: str
    not_done: str
    tests: tuple[str, ...]
    failed: tuple[str, ...]
    parts: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        if self.failed:
            return "**failed**"
        if self.tests:
            return "partly" if self.not_done or self.missing else "shown"
        return "not done" if self.not_done else "**open**"


def read_shown(runs: Path) -> dict[str, dict[str, bool]]:
    """Return, by id, whether each test has passed. A test that failed in one run counts as failed."""
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
        parts = entry.get("parts", {})
        by_part = {part: shown.get(f"{name}/{part}", {}) for part in parts}
        tests = dict(shown.get(name, {}))
        for found in by_part.values():
            for test, has_passed in found.items():
                tests[test] = tests.get(test, True) and has_passed
        items.append(
            Item(
                name,
                entry["what"],
                entry["frontend"],
                entry.get("not_done", ""),
                tuple(sorted(test for test, has_passed in tests.items() if has_passed)),
                tuple(sorted(test for test, has_passed in tests.items() if not has_passed)),
                tuple(f"{name}/{part}" for part in parts),
                tuple(text for part, text in parts.items() if not any(by_part[part].values())),
            )
        )
    return items


def marked_ids(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (id, file and line) of each mark in the tests, including tests that no run collects."""
    for path in sorted(folder.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = (node for node in nodes if isinstance(node, ast.Call))
        arguments = (argument for call in calls if _is_covers(call.func) for argument in call.args)
        for argument in arguments:
            value = argument.value if isinstance(argument, ast.Constant) else ast.unparse(argument)
            yield str(value), f"{path.relative_to(folder.parent)}:{argument.lineno}"


def _is_covers(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "covers"


def find_problems(items: list[Item], marks: list[tuple[str, str]]) -> list[str]:
    known = {name for item in items for name in (item.parts or (item.name,))}
    problems = [
        f"{place}: {name!r} is not in {TABLE.name}, or names no part of it"
        for name, place in marks
        if name not in known
    ]
    for item in items:
        if not item.what:
            problems.append(f"{item.name} has no description")
        if item.failed:
            problems.append(f"{item.name} has a test that did not pass: {', '.join(item.failed)}")
        elif not item.tests and not item.not_done:
            problems.append(f"{item.name} has neither a test that passed nor a reason why it is not done")
    return problems


def write_page(items: list[Item]) -> str:
    lines = [
        "# Coverage",
        "",
        "Behaviours and faults of the libraries that stepmill replaces, with the tests that show what stepmill does instead.",
        "Written by `make coverage` from docs/coverage.toml and the results of the tests.",
    ]
    for prefix, title in SYSTEMS.items():
        group = [item for item in items if item.name.split("-")[0] == prefix]
        counts = ", ".join(
            f"{sum(item.state == state for item in group)} {state.strip('*')}"
            for state in ("shown", "partly", "not done", "**open**", "**failed**")
            if any(item.state == state for item in group)
        )
        lines += ["", f"## {title}: {counts}", "", "| id | what | front-end | state | tests |", "|---|---|---|---|---|"]
        for item in group:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in item.tests + item.failed)
            reasons = [*([item.not_done] if item.not_done else []), *(f"not shown: {part}" for part in item.missing)]
            state = f"{item.state}: {'; '.join(reasons)}" if reasons else item.state
            lines.append(f"| {item.name} | {item.what} | {item.frontend} | {state} | {tests} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page, and print the problems."""
    items = read_items(TABLE, RUNS)
    problems = find_problems(items, list(marked_ids(ROOT / "tests")))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(write_page(items))
    for problem in problems:
        print(problem, file=sys.stderr)
    states = [item.state.strip("*") for item in items]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
