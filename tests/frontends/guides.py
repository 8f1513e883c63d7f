"""Runs the code of a switching guide: its ```py blocks, which need the library that one switches from."""

from __future__ import annotations

from pathlib import Path

from tests.harness.scripts import ROOT, run_file


def code_of(name: str, language: str = "py") -> str:
    """Return the blocks of docs/switching/NAME.md in a language as one program."""
    lines, is_inside = [], False
    for line in (ROOT / "docs" / "switching" / f"{name}.md").read_text().splitlines():
        if line.startswith("```"):
            is_inside = line.strip() == f"```{language}"
        elif is_inside:
            lines.append(line)
    return "\n".join(lines) + "\n"


def run_guide(name: str, folder: Path, *, ignored: str = "") -> None:
    """Run the blocks of docs/switching/NAME.md as one program, and fail with its errors.

    Args:
        ignored: pattern of a warning that is the library's own affair; all others are errors.
    """
    first = f"import warnings; warnings.filterwarnings('ignore', {ignored!r})" if ignored else ""
    program = folder / "guide.py"
    program.write_text(f"{first}\n{code_of(name)}")
    done = run_file(program)
    assert done.returncode == 0, done.stderr
