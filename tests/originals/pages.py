"""Runs the program of a page of docs/switching with the original library.

A page's program marks each line that differs: `ours  # was: theirs`. The program of the original has the marked lines' second
part. Where only the original's line exists, the first part is `pass`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WAS = re.compile(r"^(\s*)\S.*?\s+# was: (.*)$")


def program_of(name: str, *, is_original: bool) -> str:
    """Return the Python code of docs/switching/NAME.md, in which blocks are marked as python or py."""
    lines: list[str] = []
    is_inside = False
    for line in (ROOT / "docs" / "switching" / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            is_inside = line.strip() in ("```py", "```python")
        elif is_inside:
            marked = _WAS.match(line)
            lines.append(marked[1] + marked[2] if marked and is_original else line)
    return "\n".join(lines) + "\n"


def run_page(name: str, folder: Path, *, is_original: bool, path: str = "") -> None:
    """Run the program of a page in `folder`, and fail with its errors.

    Args:
        path: a folder to import the original from.
    """
    text = program_of(name, is_original=is_original)
    assert not is_original or text != program_of(name, is_original=False), f"{name}.md has no '# was:'"
    assert not is_original or "stepmill" not in text
    program = folder / "page.py"
    program.write_text(text, encoding="utf-8")
    run_program(folder, str(program), path=path)


def run_training(name: str, folder: Path, amount: int) -> None:
    """Run the training of `tests.originals.NAME.train` with ours, in `folder`. It fails unless the rewards rise."""
    run_program(folder, "-m", f"tests.originals.{name}.train", "ours", str(amount))


def run_program(folder: Path, *arguments: str, path: str = "", limit_s: float = 240, **variables: str) -> str:
    """Run Python with arguments in `folder`, fail with its errors, and return its output.

    Args:
        path: a folder to import from before all others.
        variables: further environment variables.
    """
    paths = os.pathsep.join(filter(None, [path, str(ROOT), *sys.path]))
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout
