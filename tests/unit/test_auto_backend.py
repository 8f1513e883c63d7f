"""Which backend "auto" is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stepmill.pool import auto_backend as auto_backend_module
from stepmill.pool.auto_backend import auto_backend, begin_start
from stepmill.spec.errors import UsageError
from stepmill.spec.options import PoolOptions
from tests.harness.hangs import HANG_GUARD_S


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({"num_envs": 1}, "serial"),
        ({"num_envs": 8, "num_workers": 0}, "serial"),
        ({"num_envs": 2}, "process"),
        ({"num_envs": 512}, "process"),
        ({"num_envs": 16, "step_s": 8e-6}, "serial"),
        ({"num_envs": 18, "step_s": 8e-6}, "process"),
        ({"num_envs": 2, "step_s": 1e-3}, "process"),
        ({"num_envs": 64, "step_s": 1e-7}, "serial"),
    ],
)
def test_auto_is_serial_if_it_is_known_to_be_faster(arguments, backend):
    assert auto_backend(**arguments) == backend


@pytest.fixture
def starter_raises(monkeypatch: pytest.MonkeyPatch):
    """Let the early start raise this."""

    def set_error(error: Exception) -> None:
        def prepare(*_: object) -> None:
            raise error

        monkeypatch.setattr(auto_backend_module, "prepare_starter", prepare)

    return set_error


@pytest.mark.parametrize("error", [OSError(11, "no process"), UsageError("no executable")])
def test_an_early_start_that_the_system_refuses_is_left_to_the_pool(starter_raises, error: Exception) -> None:
    starter_raises(error)
    begin_start([object] * 2, PoolOptions(backend="process"))


def test_a_defect_in_the_early_start_is_raised(starter_raises) -> None:
    starter_raises(AttributeError("no such option"))
    with pytest.raises(AttributeError):
        begin_start([object] * 2, PoolOptions(backend="process"))


@pytest.mark.parametrize("make", ["make_vec('CartPole-v1', 2", "VectorEnv([lambda: gymnasium.make('CartPole-v1')] * 2"])
def test_the_starter_starts_before_the_modules_of_a_pool_load(make: str) -> None:
    code = f"""
import sys, gymnasium, stepmill
from stepmill.pool import auto_backend
prepare = auto_backend.prepare_starter
def prepare_and_say(*arguments):
    print("stepmill.pool.start" in sys.modules)
    prepare(*arguments)
auto_backend.prepare_starter = prepare_and_say
stepmill.{make}, backend="process").close()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert done.stdout == "False\n", done.stderr
