"""Make an environment on top of .venv: it uses .venv's packages, and can have its own stepmill or additional libraries.

Usage: side_env.py FOLDER [--editable]. Without --editable, it does not use .venv's editable stepmill.
"""

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path


def make_side_env(folder: Path, *, editable: bool) -> Path:
    """Make the environment if it does not exist, and return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    shared = sysconfig.get_path("purelib")
    # A plain path line adds the folder. addsitedir also runs the .pth files in it, including the editable install's.
    line = f"import site; site.addsitedir({shared!r})" if editable else shared
    (own / "beside.pth").write_text(line + "\n", encoding="utf-8")
    return python


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--editable", action="store_true")
    given = parser.parse_args()
    print(make_side_env(given.folder.resolve(), editable=given.editable))
    sys.exit(0)
