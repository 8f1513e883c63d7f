"""Kernels in Python: what is compiled, what is refused, and that both ways to run one give the same bits."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.kernels.rng import Rng, seed_words

pytest.importorskip("numba")

import numba
from numba.core.bytecode import FunctionIdentity
from numba.core.errors import NumbaWarning

from tests.kernels.kernels import walk

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
STATE = np.dtype([("x", "f8")])


def _make(reset: Any, step: Any) -> Any:
    body = type("made", (), {"reset": reset, "step": step})
    return stepmill.kernel(observation_space=BOX, action_space=spaces.Discrete(2), state=STATE)(body)


def _reset(state: Any, rng: Any, obs: Any) -> None:
    obs[:] = 0.0


def _helper(x: float) -> float:
    return 2.0 * x


_LARGE = np.arange(400_000, dtype=np.float64)


def test_a_warning_of_numba_names_the_kernel_and_comes_once() -> None:
    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return _LARGE[action], False, False

    def run_three() -> list[float]:
        envs = [_make(_reset, step)() for _ in range(3)]
        for env in envs:
            env.reset()
        return [env.step(1)[1] for env in envs]

    with pytest.warns(NumbaWarning, match="the kernel made is compiled again in each process") as found:
        assert run_three() == [1.0] * 3
    assert [str(warning.filename) for warning in found] == [__file__]


@pytest.mark.skipif(find_spec("scipy") is not None, reason="Numba finds scipy, and compiles the function")
def test_a_function_for_which_numba_lacks_a_package_is_refused() -> None:
    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return np.dot(obs, obs), False, False

    with pytest.raises(stepmill.UsageError, match=r"cannot compile step of the kernel made(.|\n)*scipy"):
        _make(_reset, step)()


def test_functions_may_call_plain_functions() -> None:
    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        state.x = _helper(state.x + 1.0)
        return state.x, False, False

    env = _make(_reset, step)()
    env.reset()
    assert env.step(0)[1] == 2.0


def test_what_numba_refuses_is_named_with_its_line() -> None:
    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return state.x.no_such_thing(), False, False

    with pytest.raises(stepmill.UsageError, match=r"cannot compile step of the kernel made, test_python.py line \d+"):
        _make(_reset, step).compile()


@pytest.mark.parametrize("has_folder", [False, True])
def test_code_that_allocates_memory_is_refused_each_time(
    has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_folder:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # Numba itself reads it when it is imported

    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        fresh = np.zeros(action + 2)
        return fresh.sum(), False, False

    for _ in range(2):
        with pytest.raises(stepmill.UsageError, match="step of the kernel made allocates memory"):
            _make(_reset, step).compile()


def test_missing_functions_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(stepmill.UsageError, match="has no function step"):
        _make(_reset, None)
    with pytest.raises(stepmill.UsageError, match=r"step\(state\) of the kernel made must be"):
        _make(_reset, lambda state: None)
    with pytest.raises(stepmill.UsageError, match="not a structured dtype"):
        stepmill.kernel(observation_space=BOX, action_space=spaces.Discrete(2), state=np.float64)


def test_spaces_of_no_fixed_size_are_refused() -> None:
    kernel = stepmill.kernel(observation_space=spaces.Text(3), action_space=spaces.Discrete(2), state=STATE)
    with pytest.raises(stepmill.UsageError, match="observation_space is not a Box"):
        kernel(type("made", (), {"reset": _reset, "step": walk.step}))()


def test_a_kernel_travels_without_its_code() -> None:
    walk.compile()
    copy = pickle.loads(cloudpickle.dumps(walk))
    assert copy.state == walk.state
    assert repr(copy().reset(seed=1)) == repr(walk().reset(seed=1))


def test_generators_are_seeded_and_draw_within_their_bounds() -> None:
    words = np.zeros(4, np.uint64)
    rng = Rng(words)
    seed_words(words, 0)
    first = [rng.random() for _ in range(1000)]
    seed_words(words, 0)
    assert [rng.random() for _ in range(1000)] == first
    assert min(first) >= 0.0
    assert max(first) < 1.0
    assert {rng.integers(-1, 3) for _ in range(200)} == {-1, 0, 1, 2}
    normals = [rng.normal() for _ in range(4000)]
    assert abs(np.mean(normals)) < 0.1
    assert abs(np.std(normals) - 1.0) < 0.1


_COMPILE = """
import sys
import stepmill
stepmill.kernels.find("Pendulum-v1").compile()
print(sys.argv[1])
"""


@pytest.mark.slow
def test_two_processes_may_compile_a_kernel_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", _COMPILE, str(n)], env=environment, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    assert [run.communicate(timeout=100)[0].strip() for run in runs] == ["0", "1"]
    assert [run.returncode for run in runs] == [0, 0]
    last = subprocess.run(
        [sys.executable, "-c", _COMPILE, "2"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (last.stdout.strip(), last.returncode) == ("2", 0)
    assert len(list(tmp_path.glob("*/entry.py"))) == 1
    assert list(tmp_path.rglob("*.nbc"))


_TWO_KERNELS = """
import math, sys
from tests.kernels.test_python import _make, _reset

def make(number):
    def pay(place):  # too long to become a part of what calls it
        total = 0.0
        for a in range(place):
            for b in range(a, place):
                total += math.sin(a) * math.cos(b) + math.exp(-a * b) + math.atan2(a, b) + math.tanh(a - b)
                for c in range(b):
                    total += math.log(1.0 + a + c) + math.sqrt(a * c) + math.erf(b * c) + math.hypot(a + b, c + 1.0)
                    total += math.sin(b) * math.cos(c) + math.exp(-b * c) + math.atan2(b, c) + math.tanh(b - c)
        return number + 0.0 * total

    def step(state, action, rng, obs):
        return pay(action) + pay(action + 1) - pay(action + 2), False, False

    return _make(_reset, step)

print([make(float(number))().step(0)[1] for number in sys.argv[1:]])
"""


@pytest.mark.slow
def test_kernels_that_other_processes_have_compiled_are_not_mixed_up(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def rewards_of(*numbers: str) -> str:
        command = [sys.executable, "-c", _TWO_KERNELS, *numbers]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100).stdout

    assert [rewards_of("1"), rewards_of("2")] == ["[1.0]\n", "[2.0]\n"]
    assert rewards_of("1", "2") == "[1.0, 2.0]\n"
    assert rewards_of("3", "2", "1") == "[3.0, 2.0, 1.0]\n"


@pytest.mark.slow
def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "kernels" / "pursuit.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "million steps per second" in done.stdout


def test_a_kernel_that_numba_may_not_compile_is_refused_by_the_setting_that_forbids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(
        stepmill.UsageError, match=r"NUMBA_DISABLE_JIT is set; unset it, or run walk as Python with .*compiled=False"
    ):
        walk.with_limit(7).compile()


def test_numba_numbers_functions_of_others_as_if_no_kernel_was_compiled() -> None:
    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return 1.0, False, False

    numbers = FunctionIdentity._unique_ids
    _make(_reset, step).compile()
    assert FunctionIdentity._unique_ids is numbers
