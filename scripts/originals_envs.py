"""Makes the environments for the tests of the originals. They are separate, because their NumPy and protobuf versions conflict."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from diengine_env import ROOT, make_diengine_env
from side_env import make_side_env

from benchmarks.setup import RAY, SKRL, TORCH, TORCH_COMPILER, ZOO

# ALF 0.1.0 asks for a fork of gin-config and for versions that CPython 3.11 does not have; these work.
ALF_FIRST = (TORCH, "numpy<2")
ALF_PACKAGES = (
    "torchvision==0.15.2",  # a newer one's operators need CUDA, and its import fails without them
    "gin-config==0.4.0",
    "gym==0.26.2",
    "gym-notices",
    "setuptools<70",
    "absl-py",
    "fasteners",
    "psutil",
    "opencv-python-headless<4.12",
    "pillow<12",
    "matplotlib<3.10",
    "contourpy<1.3",
    "cycler",
    "fonttools",
    "kiwisolver",
    "pyparsing",
    "python-dateutil",
    "six",
    "tensorboard",
    "tensorboard-data-server",
    "protobuf>=6",
    "grpcio",
    "markdown",
    "werkzeug",
    "h5py<3.12",
    "pathos",
    "dill",
    "multiprocess",
    "pox",
    "ppft",
    "rectangle-packer",
    "scipy<1.15",
    "cnest",
    "pybind11",
    "pygame",
    "requests",
    "urllib3",
    "idna",
    "certifi",
    "charset-normalizer",
)
# PettingZoo's butterfly, classic and sisl envs, with what imports its Atari envs need.
FARAMA_PACKAGES = ("pettingzoo[atari,butterfly,classic,sisl]==1.27.0", "supersuit==3.11.0")
# Gymnasium's, SB3's and TorchRL's tests draw envs and read settings. sb3-contrib's own tests run in the same environment.
FRONTENDS_EXTRA = ("pygame", "pyyaml", "sb3-contrib==2.9.2")
# imitation 1.0.1 asks for older versions of Gymnasium and SB3; what its tests of rollouts and wrappers use works with these.
IMITATION_PACKAGES = (
    "imitation==1.0.1",
    "seals==0.2.1",
    "hypothesis",
    "sortedcontainers",
    "sacred",
    "munch",
    "jsonpickle",
    "wrapt",
    "py-cpuinfo",
    "GitPython",
    "gitdb",
    "smmap",
    "docopt-ng",
    "colorama",
    "packaging",
    "huggingface_sb3",
    "huggingface_hub==0.35.3",
    "wasabi",
    "filelock",
)
# LeRobot 0.4.4 asks for an older torch; its envs and its evaluation work with this one. A newer torchvision needs CUDA, as for ALF.
LEROBOT_ITSELF = ("lerobot==0.4.4", "torchvision==0.15.2")
LEROBOT_PACKAGES = (
    TORCH,
    "gym-pusht==0.1.8",
    "pymunk<7",
    "datasets>=4,<5",
    "huggingface-hub>=0.34.2,<0.36",
    "draccus==0.10.0",
    "einops",
    "termcolor",
    "diffusers<0.36",
    "accelerate<2",
    "jsonlines",
    "deepdiff",
    "av<16",
    "pyserial",
)
RLLIB_PACKAGES = (RAY, "ale-py", "mujoco", *TORCH_COMPILER)
ZOO_PACKAGES = (*ZOO, "gymnasium[box2d]")
TRAINERS_FIRST = (TORCH, "numpy==1.23.5")
TRAINERS_ITSELF = ("mlagents==1.1.0", "mlagents-envs==1.1.0")  # their metadata refuses CPython 3.11
TRAINERS_PACKAGES = (
    "numpy==1.23.5",
    "protobuf<3.21",
    "cattrs<1.7",
    "attrs",
    "tensorboard==2.11.2",
    "setuptools<80",
    "grpcio",
    "h5py<3.12",
    "Pillow<11",
    "pyyaml",
    "filelock",
)

_SIDES: dict[str, list[tuple[str, ...]]] = {
    "farama": [FARAMA_PACKAGES],
    "lerobot": [("--no-deps", *LEROBOT_ITSELF), LEROBOT_PACKAGES],
    "rllib": [RLLIB_PACKAGES],
    "skrl": [SKRL],
    "zoo": [ZOO_PACKAGES],
}


class MissingToolError(RuntimeError):
    """An original cannot be built on this machine; the text says what is missing."""


def make_environment(name: str, source: Path | None) -> tuple[Path, list[Path]]:
    """Return an environment's Python and the folders that its programs need on their path; `source` is the checkout."""
    if name == "diengine":
        return make_diengine_env(), []
    if name == "frontends":
        script = ROOT / "scripts" / "frontends_env.sh"
        made = subprocess.run([str(script), sys.executable], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        python = ROOT / made.stdout.split()[-1]
        _pip(python, [FRONTENDS_EXTRA, ("--no-deps", *IMITATION_PACKAGES)])
        return python, []
    if name == "trainers":
        python = _install(name, [TRAINERS_FIRST, _without_dependencies(TRAINERS_ITSELF), TRAINERS_PACKAGES])
        if source is not None:
            _copy_trainers_tests(python, source)
        return python, []
    if name in _SIDES:
        return _install(name, _SIDES[name]), []
    assert name == "alf"
    assert source is not None
    python = _install(name, [ALF_FIRST, _without_dependencies(ALF_PACKAGES)])
    return python, [_build_alf(python, source)]


def _copy_trainers_tests(python: Path, source: Path) -> None:
    """Copy the trainers' tests, and the repository's conftest, into the installed package: they import one another by its name."""
    library = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    target = python.parent.parent / "lib" / library / "site-packages" / "mlagents" / "trainers" / "tests"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source / "ml-agents" / "mlagents" / "trainers" / "tests", target)
    shutil.copy(source / "conftest.py", target)


def _without_dependencies(packages: Sequence[str]) -> tuple[str, ...]:
    return ("--no-deps", "--ignore-requires-python", *packages)


def _install(name: str, steps: Sequence[Sequence[str]]) -> Path:
    folder = ROOT / ".venvs" / name
    python = make_side_env(folder, editable=True, has_torch=True)
    note = folder / "packages"
    wanted = "\n".join(word for step in steps for word in step)
    if note.exists() and note.read_text(encoding="utf-8") == wanted:
        return python
    note.unlink(missing_ok=True)
    _pip(python, steps)
    note.write_text(wanted, encoding="utf-8")
    return python


def _pip(python: Path, steps: Sequence[Sequence[str]]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    for step in steps:
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *step]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)


def _build_alf(python: Path, source: Path) -> Path:
    """Copy ALF's sources into its environment, compile its extension there, and return the folder to import from."""
    place = ROOT / ".venvs" / "alf" / "source"
    target = place / "alf" / "environments" / f"_penv{sysconfig.get_config_var('EXT_SUFFIX')}"
    commit = read_commit(source)
    note = place / "COMMIT"
    if target.exists() and note.exists() and note.read_text(encoding="utf-8") == commit:
        return place
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source / "alf", place / "alf")
    ask = "import pybind11, sysconfig; print(pybind11.get_include(), sysconfig.get_path('include'))"
    found = subprocess.run([str(python), "-c", ask], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    command = [
        "c++",
        "-O2",
        "-shared",
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        *(f"-I{folder}" for folder in found),
    ]
    command += [str(place / "alf" / "environments" / "parallel_environment.cpp"), "-o", str(target), "-lrt"]
    if subprocess.run(command, check=False).returncode:
        raise MissingToolError(
            "ALF's _penv does not compile; it needs a C++ compiler and Boost (Debian's libboost-dev)"
        )
    note.write_text(commit, encoding="utf-8")
    return place


def read_commit(source: Path) -> str:
    """Return the commit of a checkout, from its file COMMIT or from git."""
    note = source / "COMMIT"
    if note.exists():
        return note.read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    return run.stdout.strip() or "unknown"
