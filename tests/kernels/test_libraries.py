"""Kernels of shared libraries, in C and in C++."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from tests.harness.pools import begun
from tests.kernels.library_builder import build, build_text

EXAMPLES = Path(__file__).parents[2] / "examples" / "kernels"


@pytest.fixture(scope="module")
def particle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return stepmill.kernels.load(
        build(EXAMPLES / "particle.c", tmp_path_factory.mktemp("particle"), "-std=c99", "-pedantic")
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
    with (
        begun(stepmill.Pool([particle] * 2, backend="kernel")) as pool,
        pytest.raises(
            stepmill.EnvError, match="env 1 raised KernelError in step: a force of 3 is not between -1 and 1"
        ),
    ):
        pool.step(np.array([[0.0], [3.0]], np.float32))


def test_a_kernel_in_cpp_draws_the_numbers_that_python_draws(tmp_path: Path) -> None:
    kernel = stepmill.kernels.load(build(EXAMPLES / "bandit.cpp", tmp_path, "-std=c++17"))
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


_MESSAGES = r"""
#include <string.h>
#include "stepmill_kernel.h"
static int32_t reset(void *state, stepmill_rng *rng, void *obs, stepmill_result *result) {
    (void)state, (void)rng, (void)result;
    *(float *)obs = 0.0f;
    return 0;
}
static int32_t step(void *state, const void *action, stepmill_rng *rng, void *obs, stepmill_result *result) {
    const int64_t kind = *(const int64_t *)action;
    (void)state, (void)rng;
    *(float *)obs = (float)kind;
    for (int i = 0; kind == 1 && i < STEPMILL_MESSAGE_BYTES; ++i) result->message[i] = i == 0 ? 'x' : i % 2 ? '\xc3' : '\xa9';
    if (kind == 2) strcpy(result->message, "5 \xb0" "C \xff is Latin-1");
    return kind > 0;
}
const stepmill_kernel *stepmill_kernel_describe(void) {
    static const stepmill_kernel kernel = {
        .abi_version = STEPMILL_KERNEL_ABI,
        .size_bytes = sizeof kernel,
        .observation = {.dtype = "f4", .num_dims = 1, .shape = {1}, .low = -9, .high = 9},
        .action = {.kind = STEPMILL_DISCRETE, .n = 3},
        .reset = reset,
        .step = step,
    };
    return &kernel;
}
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return stepmill.kernels.load(build_text(_MESSAGES, tmp_path_factory.mktemp("messages")))


@pytest.mark.parametrize("backend", ["kernel", "serial"])
@pytest.mark.parametrize(
    ("action", "text"), [(1, f"x{55 * 'é'}(\n|$)"), (2, "5 \ufffdC \ufffd is Latin-1")], ids=["cut", "Latin-1"]
)
def test_a_message_that_is_no_utf8_is_shown_as_far_as_it_is_text(
    messages: Any, backend: Any, action: int, text: str
) -> None:
    with begun(stepmill.Pool([messages] * 3, backend=backend)) as pool:
        for _ in range(2):
            pool.send(np.array([0, action, 0]))
            with pytest.raises(stepmill.EnvError, match=f"env 1 raised .*KernelError.*: {text}"):
                pool.recv(3)
            pool.recv(2)
            pool.reset(env_ids=[1])
        assert pool.step(np.zeros(3, np.int64)).obs.tolist() == [[0.0]] * 3


@pytest.mark.filterwarnings("ignore:env 1 is not replayable")
@pytest.mark.parametrize("policy", ["truncate", "replay"])
@pytest.mark.parametrize("action", [1, 2])
def test_a_pool_goes_on_after_a_message_that_is_no_utf8(messages: Any, policy: Any, action: int) -> None:
    with begun(stepmill.Pool([messages] * 3, backend="kernel", on_fault=policy, seeding="per_episode")) as pool:
        pool.step(np.zeros(3, np.int64))
        assert pool.step(np.array([0, action, 0])).truncated.tolist() == [False, True, False]
        for _ in range(3):
            assert pool.step(np.zeros(3, np.int64)).obs.tolist() == [[0.0]] * 3


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
    with pytest.raises(stepmill.UsageError, match=message):
        stepmill.kernels.load(build_text(text, tmp_path))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(stepmill.UsageError, match="cannot be loaded"):
        stepmill.kernels.load(tmp_path / "missing.so")


def load_twice(folder: Path) -> None:
    text = (EXAMPLES / "particle.c").read_text()

    def load_with(reward: str) -> Any:
        return stepmill.kernels.load(build_text(text.replace("-fabs(self->place);", f"{reward};"), folder))

    def reward_of(kernel: Any) -> float:
        with begun(stepmill.Pool([kernel], backend="kernel")) as pool:
            return float(pool.step(np.zeros((1, 1), np.float32)).reward[0])

    first, second = load_with("1.0"), load_with("2.0")
    assert [reward_of(kernel) for kernel in (first, second, load_with("1.0"))] == [1.0, 2.0, 1.0]
    assert reward_of(load_with("3.0")) == 3.0
    with pytest.raises(stepmill.UsageError, match="was compiled again after the pool's program loaded it"):
        pickle.loads(pickle.dumps(first))


def test_a_library_that_was_compiled_again_runs_its_new_code_and_workers_take_no_other(tmp_path: Path) -> None:
    # In a process of its own, since libraries stay until a process ends.
    program = "import pathlib, sys; from tests.kernels.test_libraries import load_twice; load_twice(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
