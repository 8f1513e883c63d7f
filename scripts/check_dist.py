"""Build the sdist and, from it, the wheel; check their contents, install the wheel into an empty environment, step an env.

The wheel is installed without a compiler: PATH has only the environment. pip builds an sdist in the same way, in isolation.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
KERNEL_HEADER = "stepmill/include/stepmill_kernel.h"
IN_WHEEL = (KERNEL_HEADER, "stepmill/__init__.py", "stepmill/py.typed", "stepmill/_native.pyi", "licenses/LICENSE")
IN_SDIST = ("/pyproject.toml", "/CMakeLists.txt", "/LICENSE", "/README.md", "/src/stepmill/_native/module.cpp")


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist. Return both."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True)
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def require(archive: Path, names: Iterable[str], wanted: Iterable[str]) -> None:
    """Exit with an error if an archive has no file with one of the wanted endings."""
    listed = list(names)
    missing = [ending for ending in wanted if not any(name.endswith(ending) for name in listed)]
    if missing:
        raise SystemExit(f"{archive.name} lacks {', '.join(missing)}")


def check_contents(sdist: Path, wheel: Path) -> None:
    """Exit with an error if a file is missing or does not belong into the archive."""
    with tarfile.open(sdist) as archive:
        require(sdist, archive.getnames(), IN_SDIST)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    require(wheel, names, (*IN_WHEEL, ".so"))
    sources = [name for name in names if name.endswith((".cpp", ".hpp", ".h", ".a")) and name != KERNEL_HEADER]
    stray = [*sources, *(name for name in names if not name.startswith("stepmill"))]
    if stray:
        raise SystemExit(f"{wheel.name} has files that do not belong there: {', '.join(stray)}")


def try_in_empty_environment(archive: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Install the archive with its dependencies into a new environment, and step an env there from another directory."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    variables = {**environment, "PATH": environment["PATH"].format(bin=folder / "bin")}
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(archive)], check=True, env=variables, cwd=folder)
    subprocess.run([str(python), str(ROOT / "scripts" / "smoke.py")], check=True, env=variables, cwd=folder)
    command = [str(folder / "bin" / "stepmill"), "--version"]
    subprocess.run(command, check=True, env=variables, cwd=folder)


def main() -> None:
    """Build and check both archives. The exit status is 1 after a failure."""
    sdist, wheel = build()
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory(prefix="stepmill-dist-") as temporary:
        base = Path(temporary)
        print(f"dist: {wheel.name} into an empty environment, no compiler on PATH")
        without_compiler = {name: value for name, value in os.environ.items() if name not in {"CC", "CXX"}}
        try_in_empty_environment(wheel, base / "wheel", {**without_compiler, "PATH": "{bin}"})
    print("dist: the wheel that the sdist gives installs, and steps an env")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"dist: {error}")
