"""Builds the peers' environments: `python -m benchmarks.setup [--only peers,diengine,pufferlib,stepmill,frontends,programs,ray,text,verdicts,envpool]`.

If a peer cannot be set up, the others are set up nevertheless, and the tables of the benchmark show the reason.

- `peers`: Gymnasium, SB3, Tianshou, TorchRL, EnvPool and ALE, with the versions of NumPy and Gymnasium that stepmill uses.
- `diengine`: DI-engine 0.5.3. pip cannot resolve it (it needs gym 0.25 and old build tools), so its dependencies are listed here.
- `pufferlib`: PufferLib 3.0.0 does not install. Its vector files are pure Python and are unpacked from the sdist, with a stub for `gym`.
- `frontends`: `.venvs/frontends`, with stepmill and the peers together.
- `programs`: `.venvs/programs`, with stepmill and what CleanRL's, RL Zoo's and skrl's programs import, for `python -m benchmarks.programs`.
- `ray`: `.venvs/ray-bench`, with stepmill, Ray, RLlib and Tianshou, for `python -m benchmarks.ray`.
- `text`: `.venvs/text-bench`, with stepmill, SkyRL-Gym and verifiers, for `python -m benchmarks.aio`.
- `verdicts`: `.venvs/verdicts`, with stepmill and Pebble, for `python -m benchmarks.verdicts`.
- `envpool`: the newest EnvPool, which needs Python 3.12 or newer, for the cells, and with stepmill, for
  `benchmarks/.venvs/envpool/bin/python -m benchmarks.kernels`.
- `stepmill`: needed only if the Python that runs this is not the peers' Python. stepmill is then also built in the peers' environment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.paths import DIENGINE, ENVPOOL, PEERS, PROGRAMS, PUFFER, ROOT, VENVS, user_environment

PYTHON = "3.11"  # a version for which all peers have wheels
PEER_LIST = ROOT / "benchmarks" / "peers.txt"
PEER_PACKAGES = (*(line for line in PEER_LIST.read_text().split("\n") if line and not line.startswith("#")), "uv")
TORCH = next(package for package in PEER_PACKAGES if package.startswith("torch=="))
ZOO = ("rl-zoo3==2.9.2", "requests")  # it imports requests, and does not install it
TORCH_COMPILER = ("sympy", "networkx", "jinja2")  # parts of torch that skrl and RLlib import need these
SKRL = ("skrl==2.0.0", *TORCH_COMPILER)
CLEANRL = ("tyro", "tensorboard", "tenacity")
RAY = "ray[rllib]==2.60.0"
PEBBLE = "pebble==5.2.3"
TEXT = ("skyrl-gym==0.4.0", "verifiers==0.4.0", PEBBLE)
NEWEST_ENVPOOL = "envpool==1.2.7"
ENVPOOL_PYTHON = "3.13"
STEP_LIMIT_S = 1800

DIENGINE_PACKAGES = (
    TORCH,
    "numpy==1.26.4",
    "gymnasium==1.4.0",
    "gym==0.25.1",
    "DI-treetensor>=0.4.0",
    "DI-toolkit>=0.1.0",
    "ale-py==0.12.1",
    "click>=7.0.0",
    "cloudpickle",
    "easydict>=1.9",
    "einops",
    "enum-tools",
    "flask<=2.0.3",
    "hickle",
    "imageio",
    "matplotlib",
    "mpire>=2.3.5",
    "mujoco",
    "opencv-python-headless<4.12",
    "psutil",
    "pynng",
    "pyyaml",
    "redis",
    "requests",
    "responses",
    "tabulate",
    "tensorboardX>=2.2",
    "trueskill",
    "URLObject",
    "wandb<=0.19.0",
    "werkzeug<=2.0.3",
    "yapf",
)
DIENGINE_ITSELF = "DI-engine==0.5.3"  # without dependencies: they are listed above
PUFFER_FILES = ("pufferlib.py", "emulation.py", "spaces.py", "vector.py")
PUFFER_INIT = (
    '"""The vector files of PufferLib 3.0.0, without its compiled parts."""\n\nfrom pufferlib.pufferlib import *\n'
)
GYM_STUB = '"""Replaces gym, of which PufferLib uses only the spaces."""\n\nfrom gymnasium import spaces\n'


class SetupError(RuntimeError):
    """A part could not be set up; the text says why."""


def set_up_peers() -> None:
    """Make one environment for the peers with compatible versions, with the NumPy and Gymnasium that stepmill uses."""
    python = _make_venv(PEERS)
    # torch first and alone, so that the other packages use this version and not the latest.
    _pip(python, "install", TORCH)
    _pip(python, "install", *PEER_PACKAGES, "-c", str(ROOT / "constraints.txt"))


def set_up_diengine() -> None:
    """Make a separate environment: no other peer works with NumPy 1.26 and gym 0.25."""
    python = _make_venv(DIENGINE)
    _pip(python, "install", TORCH, "numpy==1.26.4")
    _pip(python, "install", *DIENGINE_PACKAGES)
    _pip(python, "install", "--no-deps", DIENGINE_ITSELF)


def set_up_pufferlib() -> None:
    """Unpack the vector files. Only the unpacked source of the sdist is used; its build may fail."""
    python = VENVS / PEERS / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="stepmill-bench-") as cache:
        command = [str(python), "-m", "uv", "pip", "install", "--no-deps", "--no-build-isolation", "pufferlib==3.0.0"]
        environment = {**os.environ, "UV_CACHE_DIR": cache, "NO_OCEAN": "1", "NO_TRAIN": "1"}
        target = ["--python", str(python), "--target", str(Path(cache) / "unused")]
        result = subprocess.run(
            [*command, *target], env=environment, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False
        )
        found = sorted(Path(cache).glob("sdists-*/**/pufferlib/vector.py"))
        if not found:
            raise SetupError(f"no sdist of pufferlib 3.0.0 was unpacked: {result.stderr.strip()[-400:]}")
        package = PUFFER / "pufferlib"
        package.mkdir(parents=True, exist_ok=True)
        for name in PUFFER_FILES:
            shutil.copy(found[0].parent / name, package / name)
    (package / "__init__.py").write_text(PUFFER_INIT)
    (PUFFER / "gym").mkdir(exist_ok=True)
    (PUFFER / "gym" / "__init__.py").write_text(GYM_STUB)


def set_up_stepmill() -> None:
    """Make sure that stepmill runs on the same Python and NumPy as its peers; if not, build it in their environment."""
    # HalfCheetah imports it for rendering, even if nothing is rendered.
    _pip(Path(sys.executable), "install", "imageio")
    chosen = VENVS / "stepmill-python"
    chosen.unlink(missing_ok=True)
    peers = VENVS / PEERS / "bin" / "python"
    if _versions(Path(sys.executable)) == _versions(peers):
        return
    _pip(peers, "install", "scikit-build-core", "nanobind", "cmake", "ninja", "rich", "click", "cloudpickle")
    _pip(peers, "install", "--no-build-isolation", "--no-deps", str(ROOT))
    chosen.write_text(f"{peers}\n")


def set_up_frontends() -> None:
    """Make the environment of `make test-frontends`: stepmill with the libraries of its front-ends."""
    _run([str(ROOT / "scripts" / "frontends_env.sh"), sys.executable])


def set_up_programs() -> None:
    """Make the environment of programs of other projects, beside the one torch of all environments."""
    _pip(_make_side(PROGRAMS, "--torch"), "install", *ZOO, *SKRL, *CLEANRL)


def set_up_ray() -> None:
    """Make the environment of `python -m benchmarks.ray`. RLlib needs another Gymnasium than the other peers."""
    python = _make_side("ray-bench")
    tianshou = next(package for package in PEER_PACKAGES if package.startswith("tianshou=="))
    _pip(python, "install", TORCH)
    _pip(python, "install", RAY, tianshou, TORCH)


def set_up_text() -> None:
    """Make the environment in which `python -m benchmarks.aio` finds its peers. Neither of them needs torch."""
    _pip(_make_side("text-bench"), "install", *TEXT)


def set_up_verdicts() -> None:
    """Make the environment of `python -m benchmarks.verdicts`."""
    _pip(_make_side("verdicts"), "install", PEBBLE)


def set_up_envpool() -> None:
    """Make the environment of the newest EnvPool, with stepmill for `python -m benchmarks.kernels`."""
    python = _make_venv(ENVPOOL, ENVPOOL_PYTHON)
    _pip(python, "install", f"{ROOT}[numba,mujoco]", NEWEST_ENVPOOL, "-c", str(ROOT / "constraints.txt"))


PARTS: dict[str, Callable[[], None]] = {
    "peers": set_up_peers,
    "diengine": set_up_diengine,
    "pufferlib": set_up_pufferlib,
    "stepmill": set_up_stepmill,
    "frontends": set_up_frontends,
    "programs": set_up_programs,
    "ray": set_up_ray,
    "text": set_up_text,
    "verdicts": set_up_verdicts,
    "envpool": set_up_envpool,
}


def main() -> int:
    """Set up all parts, or those selected with --only. The exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.setup", description="Builds the peers' environments.")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas: " + ", ".join(PARTS))
    wanted = parser.parse_args().only.split(",")
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    failed = []
    for name in wanted:
        print(f"setting up {name}", flush=True)
        try:
            PARTS[name]()
        except (SetupError, subprocess.TimeoutExpired, OSError) as exc:
            failed.append(name)
            print(f"cannot set up {name}: {exc}", file=sys.stderr)
    return 1 if failed else 0


def _make_venv(name: str, version: str = PYTHON) -> Path:
    folder = VENVS / name
    python = folder / "bin" / "python"
    if not python.exists():
        maker = shutil.which(f"python{version}")
        if maker is None and version != f"{sys.version_info.major}.{sys.version_info.minor}":
            raise SetupError(f"no Python {version} found, which `{name}` needs; put python{version} on PATH")
        VENVS.mkdir(parents=True, exist_ok=True)
        _run([maker or sys.executable, "-m", "venv", str(folder)])
    return python


def _make_side(name: str, *options: str) -> Path:
    folder = ROOT / ".venvs" / name
    _run([sys.executable, str(ROOT / "scripts" / "side_env.py"), str(folder), "--editable", *options])
    return folder / "bin" / "python"


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", arguments[0], "-q", *arguments[1:]])


def _versions(python: Path) -> str:
    code = "import sys, numpy, gymnasium; print(sys.version_info[:2], numpy.__version__, gymnasium.__version__)"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=120, check=False).stdout


def _run(command: list[str]) -> None:
    result = subprocess.run(
        command, env=user_environment(), capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False
    )
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith(("ERROR", "error"))]
        raise SetupError("; ".join(lines[:4]) or result.stderr.strip()[-400:])


if __name__ == "__main__":
    sys.exit(main())
