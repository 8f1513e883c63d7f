"""An env's exception can be caught by its own class, as in programs that step their envs themselves."""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.spec.errors import EnvError
from tests.harness.pools import begun

BACKENDS = pytest.mark.parametrize("backend", ["serial", "thread", "process"])


class GoalError(ValueError):
    pass


class RaisingEnv(gymnasium.Env[Any, Any]):
    """Raises the exception of its action, or of its constructor's argument."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, error: int = 0) -> None:
        self._raise(error)

    def _raise(self, number: int) -> None:
        if number == 1:
            raise GoalError("no goal")
        if number == 2:
            raise FileNotFoundError(2, "no such file")
        if number == 3:
            raise KeyError("goal")
        if number == 4:
            raise SyntaxError("no syntax")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._raise(int(action))
        return np.zeros(1, np.float32), 0.0, False, False, {}


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
