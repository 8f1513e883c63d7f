"""Compiles shared libraries for tests of kernels in C."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import stepmill

WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(source: Path, folder: Path, *flags: str) -> Path:
    """Compile a file in C or C++; the test is skipped where there is no compiler."""
    compiler = shutil.which("c++" if source.suffix == ".cpp" else "cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / f"lib{source.stem}.so"
    flags = ("-O2", *WARNINGS, "-shared", "-fPIC", f"-I{stepmill.get_include()}", *flags)
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library


def build_text(text: str, folder: Path, name: str = "kernel.c") -> Path:
    """Compile a source text."""
    source = folder / name
    source.write_text(text)
    return build(source, folder)
