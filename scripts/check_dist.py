"""Build sdist and wheel, look into them, install each into an empty environment and step an env there.

The wheel's environment sees no compiler: its PATH holds the environment and nothing else.
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
IN_WHEEL = ("stepmill/__init__.py", "stepmill/py.typed", "stepmill/_native.pyi", "licenses/LICENSE")
IN_SDIST = ("/pyproject.toml", "/CMakeLists.txt", "/LICENSE", "/README.md", "/src/stepmill/_native/module.cpp")


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist. Returns both."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True)
    (sdist,) = DIST.glob("*.tar.gz")
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def require(archive: Path, names: Iterable[str], wanted: Iterable[str]) -> None:
    """Refuse an archive that lacks a wanted ending among its names."""
    listed = list(names)
    missing = [ending for ending in wanted if not any(name.endswith(ending) for name in listed)]
    if missing:
        raise SystemExit(f"{archive.name} lacks {', '.join(missing)}")


def check_contents(sdist: Path, wheel: Path) -> None:
    """Refuse archives with missing or stray files."""
    with tarfile.open(sdist) as archive:
        require(sdist, archive.getnames(), IN_SDIST)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    require(wheel, names, (*IN_WHEEL, ".so"))
    stray = [name for name in names if name.endswith((".cpp", ".hpp", ".h", ".a")) or not name.startswith("stepmill")]
    if stray:
        raise SystemExit(f"{wheel.name} has what does not belong there: {', '.join(stray)}")


def try_in_empty_environment(archive: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Install the archive with its dependencies into a new environment and step an env from a foreign directory."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    variables = {**environment, "PATH": environment["PATH"].format(bin=folder / "bin")}
    subprocess.run([str(python), "-m", "pip", "install", "-q", str(archive)], check=True, env=variables, cwd=folder)
    subprocess.run([str(python), str(ROOT / "scripts" / "smoke.py")], check=True, env=variables, cwd=folder)
    command = [str(folder / "bin" / "stepmill"), "--version"]
    subprocess.run(command, check=True, env=variables, cwd=folder)


def main() -> None:
    """Do all of it; any failure ends with exit status 1."""
    sdist, wheel = build()
    check_contents(sdist, wheel)
    with tempfile.TemporaryDirectory(prefix="stepmill-dist-") as temporary:
        base = Path(temporary)
        print(f"dist: {sdist.name} into an empty environment")
        try_in_empty_environment(sdist, base / "sdist", {**os.environ, "PATH": "{bin}:" + os.environ["PATH"]})
        print(f"dist: {wheel.name} into an empty environment, no compiler on PATH")
        without_compiler = {name: value for name, value in os.environ.items() if name not in {"CC", "CXX"}}
        try_in_empty_environment(wheel, base / "wheel", {**without_compiler, "PATH": "{bin}"})
    print("dist: both install and step an env")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"dist: {error}")
