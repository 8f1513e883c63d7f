"""Check the sizes of files, functions and parameter lists, and the depth of nesting.

All lines count, including docstrings and comments. Of C++ only the length of files is checked.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_PARAMETERS = 7
MAX_NESTING = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Excess:
    """One measure that exceeds its limit."""

    path: Path
    line: int
    what: str
    size: int
    limit: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.what} is {self.size}, at most {self.limit} allowed"


def count_parameters(function: Function) -> int:
    """Count the parameters without self and cls; *args and **kwargs count one each."""
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    return len(positional) + len(arguments.kwonlyargs) + bool(arguments.vararg) + bool(arguments.kwarg)


def nesting(node: ast.AST, *, is_elif: bool = False) -> int:
    """Return the depth of nested blocks in `node`, including itself. An elif is at the same depth as its if."""
    own = 0 if is_elif or not isinstance(node, BLOCKS) else 1
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            continue
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, is_elif=chained))
    return own + deepest


def check_function(path: Path, function: Function) -> Iterator[Excess]:
    """Yield the excesses of one function, without its nested functions."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    depth = max((nesting(statement) for statement in function.body if not isinstance(statement, SCOPES)), default=0)
    sizes = (
        (f"length of {function.name}()", lines, MAX_FUNCTION_LINES),
        (f"number of parameters of {function.name}()", count_parameters(function), MAX_PARAMETERS),
        (f"nesting of {function.name}()", depth, MAX_NESTING),
    )
    for what, size, limit in sizes:
        if size > limit:
            yield Excess(path, function.lineno, what, size, limit)


def check_file(path: Path) -> Iterator[Excess]:
    """Yield the excesses of one file."""
    text = path.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield Excess(path, 1, "file length", lines, MAX_FILE_LINES)
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from check_function(path, node)


def find_files() -> Iterator[Path]:
    """Yield all Python and C++ files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    for name in sorted(set(listed.split("\0"))):
        path = ROOT / name
        if path.suffix in {".py", ".cpp", ".hpp", ".h", ".c"} and path.is_file():
            yield path


def main() -> int:
    """Print each excess. The exit status is 1 if there is one."""
    excesses = [excess for path in find_files() for excess in check_file(path)]
    for excess in excesses:
        print(excess)
    print(f"sizes: {len(excesses)} too large" if excesses else "sizes: all within limits")
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main())
