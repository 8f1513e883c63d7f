"""Compare what stepmill costs with budget.toml: `budget.py`, or `budget.py --write` to lower limits after a fall.

Measured are the lines of code of each package (of tokens: no blank lines, comments or docstrings; Python and C++), the native
functions and methods that `pool/` uses, the options of a pool (at the top, and with the fields of records in place of these), the public names of
`Pool`, and the dependencies.

A limit names the page of docs/decisions that allows it: a row of a table there has the limit's name and, as the last number, the
greatest value. This needs no history. Where git has an earlier budget.toml, a limit above the earlier one needs a page that is newer.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "stepmill")
BUDGET = "budget.toml"
DECISIONS = "docs/decisions"
REASON = "## What was deleted"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
# Strings come first: a comment's sign in a string begins no comment.
CPP_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Limit:
    """The greatest value of one measure, and the number of the decision that allows it."""

    value: int
    decision: str


def python_lines(text: str) -> int:
    """Count the lines of Python with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def cpp_lines(text: str) -> int:
    """Count the lines of C or C++ with code."""
    code = CPP_TOKENS.sub(lambda token: token[0] if token[0][0] == '"' else "\n" * token[0].count("\n"), text)
    return sum(bool(line.strip()) for line in code.splitlines())


def count_lines(package: Path) -> dict[str, int]:
    """Return the lines of code of each folder of `package`, of the files beside them, and of all."""
    lines = {"total": 0}
    for path in sorted(package.rglob("*")):
        if path.suffix not in {".py", ".c", ".cpp", ".h", ".hpp"}:
            continue
        text = path.read_text(encoding="utf-8")
        own = python_lines(text) if path.suffix == ".py" else cpp_lines(text)
        inner = path.relative_to(package).parts
        room = inner[0] if len(inner) > 1 else "top"
        lines[room] = lines.get(room, 0) + own
        lines["total"] += own
    return lines


def parse_all(folder: Path) -> list[ast.Module]:
    """Return the trees of all Python files below `folder`."""
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]


def last_name(node: ast.AST | None) -> str | None:
    """Return the last name of `a.b.c` or `a`, else None."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def native_class(annotation: ast.AST | None) -> str | None:
    """Return X if an annotation is `_native.X`, alone or in a union."""
    found = re.search(r"\b_native\.([A-Z]\w*)", ast.unparse(annotation)) if annotation else None
    return found[1] if found else None


def native_holders(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Return the names of arguments, attributes and properties that are annotated with classes of the native module."""
    holders: dict[str, set[str]] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.arg):
            name, kind = node.arg, native_class(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            name, kind = last_name(node.target) or "", native_class(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            name, kind = node.name, native_class(node.returns)
        else:
            continue
        if kind:
            holders.setdefault(name, set()).add(kind)
    return holders


def native_uses(package: Path) -> set[str]:
    """Return the functions of the native module, and the methods and properties of its classes, that `pool/` uses."""
    stub = ast.parse((package / "_native.pyi").read_text(encoding="utf-8"))
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    methods = {
        node.name: {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        for node in stub.body
        if isinstance(node, ast.ClassDef)
    }
    holders = native_holders(parse_all(package))
    used: set[str] = set()
    for node in (node for tree in parse_all(package / "pool") for node in ast.walk(tree)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = last_name(node.value)
        if owner == "_native" and node.attr in functions:
            used.add(node.attr)
        kinds = holders.get(owner or "", set())
        used.update(f"{kind}.{node.attr}" for kind in kinds if node.attr in methods.get(kind, ()))
    return used


def find_class(trees: list[ast.Module], name: str) -> ast.ClassDef:
    """Return the definition of a class."""
    return next(node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def count_options(spec: Path) -> tuple[int, int]:
    """Count the options of a pool, and the same with the fields of records in place of these."""
    classes = {node.name: node for tree in parse_all(spec) for node in tree.body if isinstance(node, ast.ClassDef)}
    fields = [field for field in classes["PoolOptions"].body if isinstance(field, ast.AnnAssign)]
    inner = [classes.get(ast.unparse(field.annotation)) for field in fields]
    records = [kind for kind in inner if kind is not None and [last_name(base) for base in kind.bases] == ["Record"]]
    num_fields = sum(isinstance(item, ast.AnnAssign) for kind in records for item in kind.body)
    return len(fields), len(fields) - len(records) + num_fields


def public_names(pool: ast.ClassDef) -> set[str]:
    """Return the names of a class without an underscore: methods, properties and attributes that `__init__` sets."""
    names: set[str | None] = set()
    for node in pool.body:
        names.add(node.name if isinstance(node, ast.FunctionDef) else None)
        names.add(last_name(node.target) if isinstance(node, ast.AnnAssign) else None)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names.update(item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute) and is_set(item))
    return {name for name in names if name and not name.startswith("_")}


def is_set(attribute: ast.Attribute) -> bool:
    """Return whether an expression assigns to an attribute of `self`."""
    return isinstance(attribute.ctx, ast.Store) and last_name(attribute.value) == "self"


def measure(root: Path) -> dict[str, int]:
    """Return all measures of a checkout."""
    package = root / PACKAGE
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pool = find_class(parse_all(package / "pool"), "Pool")
    at_top, leaves = count_options(package / "spec")
    return {
        **{f"lines.{room}": lines for room, lines in count_lines(package).items()},
        "native.used_by_pool": len(native_uses(package)),
        "options.at_top": at_top,
        "options.of_a_pool": leaves,
        "names.of_Pool": len(public_names(pool)),
        "dependencies.at_run_time": len(project["dependencies"]),
    }


def read_limits(text: str) -> dict[str, Limit]:
    """Read budget.toml."""
    return {
        f"{table}.{name}": Limit(entry["limit"], entry["decision"])
        for table, entries in tomllib.loads(text).items()
        for name, entry in entries.items()
    }


def git(root: Path, *arguments: str) -> str | None:
    """Return what git prints, or None if it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=root, check=False)
    return done.stdout if done.returncode == 0 else None


def earlier_revisions(root: Path) -> Iterator[str]:
    """Yield the revisions with which limits are compared. A shallow clone may have none but HEAD."""
    yield from ("HEAD", "HEAD^")
    for branch in ("main", "origin/main"):
        yield (git(root, "merge-base", "HEAD", branch) or "HEAD").strip()


def granted(root: Path, name: str, decision: str) -> int | None:
    """Return the greatest value that a decision allows, or None if no page says so and says what was deleted."""
    for page in (root / DECISIONS).glob(f"{decision}-*.md"):
        text = page.read_text(encoding="utf-8")
        row = re.search(rf"^\| `{re.escape(name)}` \|.*$", text, re.MULTILINE)
        numbers = re.findall(r"\d[\d,]*", row[0].replace(name, "")) if row else []
        if numbers and REASON in text:
            return int(numbers[-1].replace(",", ""))
    return None


def check_history(root: Path, limits: Mapping[str, Limit]) -> Iterator[str]:
    """Yield what is wrong with limits that are above earlier ones."""
    for revision in dict.fromkeys(earlier_revisions(root)):
        text = git(root, "show", f"{revision}:{BUDGET}")
        pages = git(root, "ls-tree", "--name-only", revision, f"{DECISIONS}/") or ""
        for name, old in read_limits(text or "").items():
            limit = limits.get(name)
            if limit and limit.value > old.value and f"{DECISIONS}/{limit.decision}-" in pages:
                yield f"{name}: the limit was {old.value} and is {limit.value}: raise it by a new page of {DECISIONS}"


def check(root: Path, limits: Mapping[str, Limit], measured: Mapping[str, int]) -> Iterator[str]:
    """Yield what is wrong."""
    for name, value in measured.items():
        if name not in limits:
            yield f"{name} is {value} and has no limit: add it to {BUDGET} with a page of {DECISIONS}"
        elif value > limits[name].value:
            yield f"{name} is {value}, at most {limits[name].value} allowed: delete something, or see CONTRIBUTING.md"
    for name, limit in limits.items():
        most = granted(root, name, limit.decision)
        if most is None:
            yield f"{name}: no page {limit.decision} of {DECISIONS} has a row for it and a section {REASON!r}"
        elif limit.value > most:
            yield f"{name}: the limit is {limit.value}, but page {limit.decision} of {DECISIONS} allows {most}"
    yield from dict.fromkeys(check_history(root, limits))


def lower_limits(limits: Mapping[str, Limit], measured: Mapping[str, int]) -> dict[str, int]:
    """Return the limits that may be lowered. Lines of code keep a hundredth for repairs."""
    lower = {}
    for name in measured.keys() & limits.keys():
        kept = measured[name] // 1000 * 10 + 10 if name.startswith("lines.") else 0
        if measured[name] + kept < limits[name].value:
            lower[name] = measured[name] + kept
    return dict(sorted(lower.items()))


def write_limits(text: str, lower: Mapping[str, int]) -> str:
    """Return budget.toml with lower limits."""
    table = ""
    lines = []
    for line in text.splitlines(keepends=True):
        table = line[1:].partition("]")[0] if line.startswith("[") else table
        name = f"{table}.{line.split(' ')[0]}"
        lines.append(re.sub(r"limit = \d+", f"limit = {lower[name]}", line) if name in lower else line)
    return "".join(lines)


def main() -> int:
    """Print what is wrong, and which limits may be lowered. The exit status is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="lower the limits of what has become less")
    parser.add_argument("--show", action="store_true", help="print all measures")
    arguments = parser.parse_args()
    text = (ROOT / BUDGET).read_text(encoding="utf-8")
    limits, measured = read_limits(text), measure(ROOT)
    lower = lower_limits(limits, measured)
    for name, value in measured.items() if arguments.show else ():
        lowered = f"; may be lowered to {lower[name]:,}" if name in lower else ""
        print(f"{name:26} {value:7,} of {limits[name].value if name in limits else 0:7,}{lowered}")
    if arguments.write:
        (ROOT / BUDGET).write_text(write_limits(text, lower), encoding="utf-8")
    elif lower:
        print(f"budget: {len(lower)} limits may be lowered (--show prints them, --write lowers them)")
    wrong = list(check(ROOT, limits, measured))
    print(*wrong, f"budget: {len(wrong)} over" if wrong else "budget: all within limits", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
