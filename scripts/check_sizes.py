"""Check the lengths of files, and of Python's functions. All lines count, including docstrings and comments.

Ruff checks the number of parameters and the depth of nesting.
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
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield Excess(path, node.lineno, f"length of {node.name}()", lines, MAX_FUNCTION_LINES)


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
