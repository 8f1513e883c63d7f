"""Tracebacks of workers show the lines of envs that are defined in the script, whichever cloudpickle sends them."""

from __future__ import annotations

from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import pytest

from stepmill.worker import messages
from tests.harness.scripts import run_file

PROGRAM = """
import gymnasium, numpy as np, stepmill

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        STATEMENT  # the line to be shown

if __name__ == "__main__":
    with stepmill.Pool([Broken] * 2, backend="process") as pool:
        pool.reset(seed=0)
        try:
            pool.step(np.zeros(2, int))
        except stepmill.EnvError as error:
            print(error.message)
            print(error.remote_traceback)
"""


def run_program(folder: Path, statement: str) -> str:
    path = folder / "program.py"
    path.write_text(PROGRAM.replace("STATEMENT", statement))
    done = run_file(path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_traceback_of_an_env_of_the_script_shows_its_file_and_lines(tmp_path: Path) -> None:
    shown = run_program(tmp_path, "return (lambda: {}['missing'])()")
    assert f'File "{tmp_path / "program.py"}", line 10, in step' in shown
    assert "# the line to be shown" in shown


@pytest.mark.parametrize("statement", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_debugger_in_a_worker_ends_with_an_error_that_names_the_serial_backend(
    tmp_path: Path, statement: str
) -> None:
    assert "has no terminal; use backend='serial'" in run_program(tmp_path, statement)


def test_code_keeps_its_file_if_cloudpickle_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce_like_3_1_3(code: CodeType) -> Any:
        return known(code.replace(co_filename="<dynamic-code>"))

    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, reduce_like_3_1_3)

    def outer() -> CodeType:
        return (lambda: None).__code__

    assert cloudpickle.loads(cloudpickle.dumps(outer)).__code__.co_filename == "<dynamic-code>"
    loaded: Any = messages.load(messages.dump(outer))
    assert (loaded.__code__.co_filename, loaded().co_filename) == (__file__, __file__)
