"""PyTorch's idle threads, which spin after each operation, are ended while the program waits for envs."""

from __future__ import annotations

import os
import time
from functools import partial

import gymnasium
import numpy as np
import pytest

from stepmill import _native
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.parametrize("where", ["thread", "fork"], indirect=True)]


class AwaitsEndOfThread(gymnasium.Env):
    """A step takes as long as a process has as many threads as the action says, or, with 0, as long as two waits of the pool."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Box(0, np.inf, (), np.int64)

    def __init__(self, pid):
        self._tasks = f"/proc/{pid}/task"

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, num_threads):
        if num_threads == 0:
            time.sleep(0.25)
            return 0, 0.0, False, False, {}
        until_s = time.monotonic() + HANG_GUARD_S
        while (has_all := len(os.listdir(self._tasks)) >= num_threads) and time.monotonic() < until_s:
            time.sleep(0.001)
        return int(not has_all), 0.0, False, False, {}


@pytest.fixture(scope="module")  # a thread of another library, which `set_num_threads` starts, stays
def multiply():
    """A function that computes with two threads of PyTorch, and says how many threads the process then has."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    matrix = torch.arange(4e6).reshape(2000, 2000).sin()

    def run():
        product = (matrix @ matrix).tanh().numpy()
        return product, len(os.listdir("/proc/self/task"))

    yield run
    torch.set_num_threads(num_threads)


def pool_beside_threads(pool_of):
    """Envs in as many workers as there are cores: one thread more has none."""
    num_envs = _native.usable_cores()
    return begun(pool_of([partial(AwaitsEndOfThread, os.getpid())] * num_envs, num_workers=num_envs))


@pytest.fixture(autouse=True)
def _nothing_says_how_threads_wait(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


def test_a_long_wait_ends_the_idle_threads_of_pytorch_and_the_next_operation_computes_the_same(pool_of, multiply):
    pool = pool_beside_threads(pool_of)
    products = []
    for _ in range(3):
        product, num_threads = multiply()
        products.append(product)
        batch = pool.step(np.full(pool.num_envs, num_threads))
        assert batch.obs.all(), "the thread of the operation still exists"
    assert np.array_equal(products[1], products[0])
    assert np.array_equal(products[2], products[0])


@pytest.mark.parametrize(("variable", "value"), [("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "1000")])
def test_the_threads_stay_where_the_user_has_said_how_they_wait(pool_of, multiply, monkeypatch, variable, value):
    with monkeypatch.context() as environment:
        environment.setenv(variable, value)
        pool = pool_beside_threads(pool_of)
    _, num_threads = multiply()
    pool.step(np.zeros(pool.num_envs, np.int64))
    assert len(os.listdir("/proc/self/task")) == num_threads
    pool.close()
    other = pool_beside_threads(pool_of)
    assert other.step(np.full(other.num_envs, num_threads)).obs.all()
