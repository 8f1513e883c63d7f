"""A pytest plugin: RL Zoo's programs, which its tests start, make stepmill's SB3VecEnv. As a program, it runs one of them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from typing import Any

_call = subprocess.call


def _call_with_ours(command: list[str], **keywords: Any) -> int:
    """Start this file with the arguments of `python`."""
    assert command[0] == "python"
    return _call([sys.executable, __file__, *command[1:]], **keywords)


def _run_with_ours() -> None:
    """Run a program by its file, or by its module after `-m`."""
    from rl_zoo3.exp_manager import ExperimentManager

    from stepmill.frontends.sb3 import SB3VecEnv

    ExperimentManager.default_vec_env_cls = SB3VecEnv
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""  # as for a program in the working directory
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _run_with_ours()
else:
    subprocess.call = _call_with_ours
