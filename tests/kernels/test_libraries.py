"""Kernels of shared libraries, in C and in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill

EXAMPLES = Path(__file__).parents[2] / "examples" / "kernels"


def _build(source: Path, folder: Path, *flags: str) -> Path:
    compiler = shutil.which("c++" if source.suffix == ".cpp" else "cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = folder / f"lib{source.stem}.so"
    flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{stepmill.get_include()}", *flags)
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library


@pytest.fixture(scope="module")
def particle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return stepmill.kernels.load(
        _build(EXAMPLES / "particle.c", tmp_path_factory.mktemp("particle"), "-std=c99", "-pedantic")
    )


def test_the_header_is_shipped() -> None:
    assert os.path.isfile(os.path.join(stepmill.get_include(), "stepmill_kernel.h"))


def test_a_kernel_in_c_runs(particle: Any) -> None:
    assert (particle.name, particle.observation_space.shape) == ("particle", (2,))
    with stepmill.Pool([particle] * 4, backend="kernel", num_workers=2) as pool:
        batch = pool.reset(seed=3)
        for _ in range(199):
            batch = pool.step(np.clip(-batch.obs.sum(axis=1, keepdims=True), -1.0, 1.0))
        assert not (batch.terminated | batch.truncated).any()
        np.testing.assert_allclose(batch.obs, 0.0, atol=0.05)
        assert pool.step(np.zeros((4, 1), np.float32)).truncated.all()


def test_a_kernel_in_c_is_an_env_of_other_backends_too(particle: Any) -> None:
    actions = np.linspace(-1.0, 1.0, 30, dtype=np.float32).reshape(30, 1, 1).repeat(2, axis=1)
    with (
        stepmill.Pool([particle] * 2, backend="kernel") as ours,
        stepmill.Pool([particle] * 2, backend="serial") as theirs,
    ):
        np.testing.assert_array_equal(ours.reset(seed=1).obs, theirs.reset(seed=1).obs)
        for action in actions:
            mine, yours = ours.step(action), theirs.step(action)
            np.testing.assert_array_equal(mine.obs, yours.obs)
            np.testing.assert_array_equal(mine.reward, yours.reward)


def test_a_status_is_an_error_of_its_env_with_its_message(particle: Any) -> None:
    with stepmill.Pool([particle] * 2, backend="kernel") as pool:
        pool.reset(seed=0)
        with pytest.raises(
            stepmill.EnvError, match="env 1 raised KernelError in step: a force of 3 is not between -1 and 1"
        ):
            pool.step(np.array([[0.0], [3.0]], np.float32))


def test_a_kernel_in_cpp_draws_the_numbers_that_python_draws(tmp_path: Path) -> None:
    kernel = stepmill.kernels.load(_build(EXAMPLES / "bandit.cpp", tmp_path, "-std=c++17"))
    words = np.zeros(4, np.uint64)
    stepmill.kernels.seed_words(words, 5)
    rng = stepmill.kernels.Rng(words)
    means = [rng.normal() for _ in range(10)]
    with stepmill.Pool([kernel], backend="kernel") as pool:
        assert pool.reset(seed=5).obs.tolist() == [rng.integers(0, 10)]
        for arm in range(10):
            assert pool.step(np.array([arm])).reward.tolist() == [means[arm] + rng.normal()]
        for arm in (10, -1, 2**40):
            with pytest.raises(stepmill.EnvError, match=f"there is no arm {arm}"):
                pool.step(np.array([arm]))
            pool.reset()


_WRONG = """
#include "stepmill_kernel.h"
const stepmill_kernel *stepmill_kernel_describe(void) {{
    static stepmill_kernel kernel = {{ {} }};
    return &kernel;
}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int nothing;", "defines no stepmill_kernel_describe"),
        (_WRONG.format(".abi_version = 99"), "was compiled for version 99"),
        (_WRONG.format(".abi_version = STEPMILL_KERNEL_ABI, .size_bytes = sizeof kernel"), "has no reset function"),
    ],
)
def test_libraries_that_are_no_kernel_are_refused(text: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "wrong.c"
    source.write_text(text)
    with pytest.raises(stepmill.UsageError, match=message):
        stepmill.kernels.load(_build(source, tmp_path))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stepmill.UsageError, match="cannot be loaded"):
        stepmill.kernels.load(tmp_path / "missing.so")
