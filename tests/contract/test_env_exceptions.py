"""An env's exception can be caught by its own class, as in programs that step their envs themselves."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.spec.errors import EnvError
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun

BACKENDS = pytest.mark.parametrize("backend", ["serial", "thread", "process"])


class GoalError(ValueError):
    pass


ERRORS: list[Callable[[], Exception]] = [
    partial(GoalError, "no goal"),
    partial(FileNotFoundError, 2, "no such file"),
    partial(KeyError, "goal"),
    partial(SyntaxError, "no syntax"),
]


class RaisingEnv(CountingEnv):
    """Raises the exception of its action, or of its constructor's argument."""

    def __init__(self, error: int = 0) -> None:
        super().__init__()
        self._raise(error)

    def _raise(self, number: int) -> None:
        if number:
            error = ERRORS[number - 1]()
            raise error

    def step(self, action: Any) -> Any:
        self._raise(int(action))
        return super().step(action)


@BACKENDS
@pytest.mark.parametrize(("number", "cls"), [(1, GoalError), (2, FileNotFoundError), (3, KeyError)])
def test_a_step_raises_what_its_env_raised(backend, number, cls):
    with begun(stepmill.VectorEnv([RaisingEnv] * 2, backend=backend)) as envs:
        with pytest.raises(cls, match=r"env 1 raised .* in step") as caught:
            envs.step([0, number])
        assert isinstance(caught.value, EnvError)
        envs.reset(options={"reset_mask": np.array([False, True])})
        envs.step([0, 0])


@BACKENDS
def test_what_python_prints_of_a_syntax_error_of_an_env_has_the_message(backend):
    with pytest.raises(EnvError) as caught:
        stepmill.VectorEnv([RaisingEnv, lambda: RaisingEnv(4)], backend=backend)
    printed = "".join(traceback.format_exception(caught.value))
    assert "env 1 raised SyntaxError in construct: no syntax" in printed


@BACKENDS
def test_a_constructor_that_raises_an_os_error_is_not_taken_for_a_lack_of_processes(backend):
    with pytest.raises(FileNotFoundError, match=r"env 1 raised FileNotFoundError in construct: .*no such file"):
        stepmill.VectorEnv([RaisingEnv, lambda: RaisingEnv(2)], backend=backend)


def test_a_restart_whose_constructor_raises_is_that_exception(tmp_path):
    marker = tmp_path / "built"

    def make() -> RaisingEnv:
        env = RaisingEnv(2 if marker.exists() else 0)
        marker.touch()
        return env

    with stepmill.Pool([make], backend="process") as pool:
        pool.reset(seed=0)
        with pytest.raises(FileNotFoundError, match="in construct"):
            pool.revive([0], restart_living=True)
