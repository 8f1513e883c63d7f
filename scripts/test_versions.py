"""Build and test with the oldest and the newest supported CPython of this machine, and with newer ones in a chroot.

It searches python3.X on PATH and in pyenv's folder. Each version has a separate environment under .venvs. Versions that this machine
need not have are those of Debian's unstable suite, in .venvs/debian-unstable, which `debootstrap` makes once, in about two minutes, as
root. Where that cannot be, a line says so, and they are left out.

    python scripts/test_versions.py [--whole]

With --whole all tests of `make test` are run, not some folders; it takes four times as long.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = ((3, 10), (3, 11), (3, 12), (3, 13))
IN_CHROOT = ((3, 14), (3, 15))
CHROOT = ROOT / ".venvs" / "debian-unstable"
NEEDED = [
    "numpy",
    "gymnasium",
    "cloudpickle",
    "click",
    "rich",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "psutil",
    "scikit-build-core",
    "nanobind",
    "cmake",
    "ninja",
    "pathspec",
    "packaging",
    "typing-extensions",
    "griffelib",
]
OPTIONAL = (
    "dm-env",
    "pettingzoo",
    "ale-py",
    "numba",
    "mujoco",
    "opencv-python-headless",
    "matplotlib",
    "imageio",  # Gymnasium renders MuJoCo with it
    "imageio-ffmpeg",
)
# Mounts of this process alone end with it.
ENTER = """mount --bind /dev "$0/dev" && mount --bind /dev/pts "$0/dev/pts" && mount -t tmpfs tmpfs "$0/dev/shm" \
    && mount -t proc proc "$0/proc" && exec chroot "$0" "$@\""""
FOLDERS = ["tests/unit", "tests/contract", "tests/crash/test_revive.py", "tests/crash/test_recovery_replay.py"]
SELECTED = "not soak and not torch"
if "--whole" in sys.argv:
    FOLDERS, SELECTED = ["tests"], f"{SELECTED} and not slow"


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
    command = [str(python), "-m", "pytest", "-n", "4", "--dist", "worksteal", "-m", SELECTED, *folders]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def why_no_chroot() -> str | None:
    """Make the chroot if there is none yet; return why there can be none, or None."""
    if os.geteuid() != 0 or not shutil.which("debootstrap") or not shutil.which("unshare"):
        return "it needs root and Debian's debootstrap"
    ready = CHROOT / "ready"
    if not ready.exists():
        shutil.rmtree(CHROOT, ignore_errors=True)
        CHROOT.parent.mkdir(exist_ok=True)
        include = "--include=ca-certificates,g++,make,libc6-dev,git"
        made = subprocess.run(["debootstrap", "--variant=minbase", include, "unstable", str(CHROOT)], check=False)
        if made.returncode != 0:
            return f"debootstrap ended with status {made.returncode}"
        ready.touch()
    for name in ("etc/resolv.conf", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
        if Path("/", name).exists():
            shutil.copy(Path("/", name), CHROOT / name)
    return None


def run_in_chroot(*command: str) -> bool:
    """Run a command in the chroot; return whether it succeeded."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_", "http", "HTTP", "no_proxy"))
    }
    environ = {**kept, "HOME": "/root", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PIP_CONSTRAINT": ""}
    inside = ["unshare", "--mount", "sh", "-c", ENTER, str(CHROOT), *command]
    return subprocess.run(inside, check=False, env=environ).returncode == 0


def test_in_chroot(version: tuple[int, int]) -> bool | None:
    """Build and test in the chroot, whose Python packages are there already or come from Debian. None if they cannot be had."""
    name = f"python{version[0]}.{version[1]}"
    packages = [name, f"{name}-venv", f"{name}-dev", "git"]  # an older chroot may lack git
    if not all((CHROOT / "usr" / "bin" / each).exists() for each in (name, "git")) and not (
        run_in_chroot("apt-get", "-o", "Acquire::Check-Valid-Until=false", "update", "-q")
        and run_in_chroot("apt-get", "install", "-q", "-y", *packages)
    ):
        return None
    source = CHROOT / "src"
    shutil.rmtree(source, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for file in (each for each in files.split("\0") if each and (ROOT / each).is_file()):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    python, pip = (
        f"/{name}/bin/python",
        [f"/{name}/bin/python", "-m", "pip", "install", "-q", "-c", "/src/constraints.txt"],
    )
    if not (CHROOT / name).exists() and not run_in_chroot(f"/usr/bin/{name}", "-m", "venv", f"/{name}"):
        return None
    if not run_in_chroot(*pip, "--only-binary", ":all:", *NEEDED):
        print(f"versions: {name}: not all of these have wheels: {' '.join(NEEDED)}")
        return None
    missing = [each for each in OPTIONAL if not run_in_chroot(*pip, "--only-binary", ":all:", each)]
    print(
        f"versions: {name}: without wheels, so that their tests are left out: {', '.join(missing) or 'none'}",
        flush=True,
    )
    if not run_in_chroot(
        python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--force-reinstall", "/src"
    ):
        return False
    folders = [each for each in FOLDERS if (ROOT / each).exists()]
    selected = ["-m", "not soak and not torch and not slow", "--rootdir", "/src"]
    return run_in_chroot(
        "sh", "-c", 'cd /src && exec "$0" -m pytest -n 4 --dist worksteal "$@"', python, *selected, *folders
    )


def main() -> int:
    """Test the oldest, the newest and the versions in the chroot. The exit status is 1 if a test failed."""
    pythons = find_pythons()
    chosen = sorted({min(pythons), max(pythons)})
    print("versions: found", ", ".join(f"{major}.{minor}" for major, minor in sorted(pythons)))
    failed = []
    for version in chosen:
        name = f"{version[0]}.{version[1]}"
        print(f"versions: CPython {name}", flush=True)
        if not test_on(version, pythons[version]):
            failed.append(name)
    reason = why_no_chroot()
    for version in IN_CHROOT:
        name = f"{version[0]}.{version[1]}"
        has_passed = None if reason else test_in_chroot(version)
        if has_passed is None:
            print(f"versions: CPython {name} is left out: {reason or 'Debian or PyPI lacks what it needs'}", flush=True)
        elif has_passed:
            chosen.append(version)
        else:
            failed.append(name)
    if failed:
        print(f"versions: tests failed on {', '.join(failed)}")
        return 1
    print("versions: tests passed on", " and ".join(f"{major}.{minor}" for major, minor in chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
