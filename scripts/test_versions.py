"""Build and test with the oldest and the newest supported CPython of this machine.

It searches python3.X on PATH and in pyenv's folder. Each version has a separate environment under .venvs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 11), (3, 12), (3, 13))
FOLDERS = ("tests/unit", "tests/contract", "tests/crash/test_revive.py", "tests/crash/test_recovery_replay.py")


def find_pythons() -> dict[tuple[int, int], Path]:
    """Return one interpreter for each supported version that is installed."""
    found = {sys.version_info[:2]: Path(sys.executable)}
    for major, minor in SUPPORTED:
        candidates = [shutil.which(f"python{major}.{minor}")]
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        candidates += [str(path) for path in sorted(root.glob(f"versions/{major}.{minor}.*/bin/python"))]
        for candidate in candidates:
            if candidate and (major, minor) not in found and runs_as(candidate) == (major, minor):
                found[major, minor] = Path(candidate)
    return {version: path for version, path in found.items() if version in SUPPORTED}


def runs_as(python: str) -> tuple[int, int] | None:
    """Return the version of a CPython; None if it does not run, such as a shim of pyenv without an installed version."""
    code = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    match = re.fullmatch(r"cpython (\d+) (\d+)\s*", answer.stdout)
    return (int(match[1]), int(match[2])) if answer.returncode == 0 and match else None


def test_on(version: tuple[int, int], base: Path) -> bool:
    """Make an environment for this version, install stepmill as a user does, and run the tests there."""
    folder = ROOT / ".venvs" / f"{version[0]}.{version[1]}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([str(base), "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "-r", str(ROOT / "constraints.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--force-reinstall", str(ROOT)], check=True)
    folders = [name for name in FOLDERS if (ROOT / name).exists()]
    command = [str(python), "-m", "pytest", "-n", "4", "--dist", "worksteal", "-m", "not soak and not torch", *folders]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> int:
    """Test the oldest and the newest version. The exit status is 1 if a test failed."""
    pythons = find_pythons()
    chosen = sorted({min(pythons), max(pythons)})
    print("versions: found", ", ".join(f"{major}.{minor}" for major, minor in sorted(pythons)))
    failed = []
    for version in chosen:
        name = f"{version[0]}.{version[1]}"
        print(f"versions: CPython {name}", flush=True)
        if not test_on(version, pythons[version]):
            failed.append(name)
    if failed:
        print(f"versions: tests failed on {', '.join(failed)}")
        return 1
    print("versions: tests passed on", " and ".join(f"{major}.{minor}" for major, minor in chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
