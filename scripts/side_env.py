"""Make an environment on top of .venv: it uses .venv's packages, and can have its own stepmill or additional libraries.

Usage: side_env.py FOLDER [--editable] [--torch]. Without --editable, it does not use .venv's editable stepmill. With --torch it also
uses the packages of .venvs/torch, which is made first: all environments share one torch, whose installation takes a minute.
"""

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_ENV = ROOT / ".venvs" / "torch"


def make_side_env(folder: Path, *, editable: bool, has_torch: bool = False) -> Path:
    """Make the environment if it does not exist, and return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        # Without a pip of its own, which takes seconds to install: it uses .venv's.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    shared = sysconfig.get_path("purelib")
    # A plain path line adds the folder. addsitedir also runs the .pth files in it, including the editable install's.
    lines = [_packages_of(make_torch_env())] if has_torch else []
    lines.append(f"import site; site.addsitedir({shared!r})" if editable else shared)
    Path(_packages_of(python), "beside.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return python


def make_torch_env() -> Path:
    """Make .venvs/torch, with the torch of benchmarks/peers.txt, if it does not exist, and return its Python."""
    python = make_side_env(TORCH_ENV, editable=True)
    peers = (ROOT / "benchmarks" / "peers.txt").read_text(encoding="utf-8").splitlines()
    wanted = [next(line for line in peers if line.startswith("torch==")), "array-api-compat>=1.12"]  # for Gymnasium
    note = TORCH_ENV / "packages"
    if not note.exists() or note.read_text(encoding="utf-8").split() != wanted:
        # The caller reads stdout, so pip's output goes to stderr.
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted], stdout=sys.stderr, check=True)
        note.write_text("\n".join(wanted), encoding="utf-8")
    return python


def _packages_of(python: Path) -> str:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--editable", action="store_true")
    parser.add_argument("--torch", action="store_true")
    given = parser.parse_args()
    wanted = given.folder.resolve()
    is_torch_env = wanted == TORCH_ENV
    print(make_torch_env() if is_torch_env else make_side_env(wanted, editable=given.editable, has_torch=given.torch))
    sys.exit(0)
