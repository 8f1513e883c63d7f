"""Build the extension into this environment's editable install. A repeated build takes about a second.

The first call runs pip. Later calls only run CMake in pip's build directory and replace the binary by a rename, so that
processes that have mapped the old binary are not affected.
"""

import fcntl
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_DIR = ROOT / "build" / str(sys.implementation.cache_tag)
BINARY = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def is_installed() -> bool:
    """Whether this environment has an editable install that is newer than the build's configuration."""
    cache = BUILD_DIR / "CMakeCache.txt"
    stamp = installed_binary().with_name(".built")
    if not (cache.exists() and installed_binary().exists() and stamp.exists()):
        return False
    try:
        importlib.metadata.distribution("stepmill")
    except importlib.metadata.PackageNotFoundError:
        return False
    newest = max(
        (ROOT / name).stat().st_mtime for name in ("pyproject.toml", "CMakeLists.txt", "src/stepmill/_version.py")
    )
    return stamp.stat().st_mtime > newest and stamp.read_text() == python_files()


def python_files() -> str:
    """Return the names of all Python files, one per line. An editable install finds only the files that existed when it was made."""
    package = ROOT / "src" / "stepmill"
    return "".join(f"{path.relative_to(package)}\n" for path in sorted(package.rglob("*.py")))


def installed_binary() -> Path:
    return Path(sysconfig.get_path("platlib")) / "stepmill" / BINARY


def install() -> None:
    """Install through pip, without build isolation, so that the build directory stays valid. Print a line per compiled file."""
    command = [sys.executable, "-u", "-m", "pip", "install", "-v", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--no-build-isolation",
        f"--config-settings=build-dir={BUILD_DIR}",
        "--config-settings=cmake.args=-GNinja",
    ]
    command += ["--config-settings=cmake.define.STEPMILL_WERROR=ON", "-e", str(ROOT)]
    print("configuring the extension", flush=True)
    hidden: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            step = re.match(r"\s*(\[\d+/\d+\] \w+) .*?([\w.-]+)$", line.rstrip())
            if step:
                print(*step.groups(), flush=True)
            else:
                hidden.append(line)
    if pip.returncode:
        sys.exit(f"{''.join(hidden)}\npip ended with status {pip.returncode}")
    installed_binary().with_name(".built").write_text(python_files())


def rebuild() -> None:
    """Run CMake in pip's build directory, and replace the binary."""
    scripts = sysconfig.get_path("scripts")
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run(["cmake", "--build", str(BUILD_DIR)], check=True, env=environment)
    built, target = BUILD_DIR / BINARY, installed_binary()
    if built.stat().st_mtime > target.stat().st_mtime:
        fresh = target.with_suffix(".new")
        shutil.copyfile(built, fresh)
        fresh.chmod(0o755)
        fresh.replace(target)


def main() -> None:
    """Build. A second build of the same environment waits for the first."""
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    with (BUILD_DIR / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed():
            rebuild()
        else:
            install()


if __name__ == "__main__":
    main()
