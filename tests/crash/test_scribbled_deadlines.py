"""A worker that fills all it can write: every call returns by its deadline, and no other env's result changes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun
from tests.harness.slab_memory import slab_parts

NUM_ENVS = 4  # on two workers
CULPRIT = 2
STEP_S = 0.3
CALL_S = 600.0
ROUNDS = 6
FAULTS = (stepmill.EnvError, stepmill.WorkerDied, stepmill.EnvTimeout)


def fill(pattern: str, rng: random.Random) -> None:
    """Fill every byte of the slab that this process can write."""
    for part in slab_parts():
        size = part.stop - part.start
        if part.is_writable:
            data = {"zeros": bytes(size), "ones": b"\xff" * size}.get(pattern) or rng.randbytes(size)
            ctypes.memmove(part.start, data, size)


def fill_for_ever(pattern: str, rng: random.Random) -> None:
    while True:
        fill(pattern, rng)


class FillingEnv(CountingEnv):
    """Fills its worker's memory in its third step, and then ends as chosen."""

    def __init__(self, identity: int, pattern: str, then: str, marks: Path) -> None:
        super().__init__(identity, length=10_000)
        self._pattern, self._then, self._marks = pattern, then, marks

    def step(self, action: np.int64) -> Any:
        if self.identity == CULPRIT and self._t == 2 and not self._marks.exists():
            self._marks.touch()  # its successor does not do it again
            self._misbehave(random.Random(self._pattern))
        return super().step(action)

    def _misbehave(self, rng: random.Random) -> None:
        fill(self._pattern, rng)
        if self._then == "dies":
            os._exit(3)
        if self._then == "raises":
            raise ValueError("as chosen")
        if self._then == "hangs":
            time.sleep(600)
        if self._then == "fills without end":
            fill_for_ever(self._pattern, rng)
        if self._then == "fills in a thread":
            threading.Thread(target=fill_for_ever, args=(self._pattern, rng), daemon=True).start()


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < HANG_GUARD_S


ENDINGS = ["returns", "raises", "dies", "hangs", "fills without end", "fills in a thread"]
PATTERNS = ["zeros", "ones", "noise"]


def cases() -> list[object]:
    """Patterns, endings and policies: each ending, each pair of an ending and a policy in the slow tests, and the rest in the long ones."""
    found = []
    for (n, pattern), (m, then), (p, policy) in product(*map(enumerate, (PATTERNS, ENDINGS, ["raise", "truncate"]))):
        marks = pytest.mark.soak if n != (m + p) % 3 else pytest.mark.slow if p == m % 2 else ()
        found.append(pytest.param(pattern, then, policy, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("pattern", "then", "on_fault"), cases())
def test_others_are_served_in_time_beside_a_worker_that_fills_all_it_can_write(
    pattern: str, then: str, on_fault: str, tmp_path: Path
) -> None:
    options = stepmill.PoolOptions(
        context="fork",
        on_fault=on_fault,
        step_timeout_s=STEP_S,
        reset_timeout_s=STEP_S,
        workers={"call_timeout_s": STEP_S},
        restarts={"max_restarts": 1000},
    )
    env_fns = [partial(FillingEnv, env_id, pattern, then, tmp_path / "mark") for env_id in range(NUM_ENVS)]
    with begun(stepmill.Pool(env_fns, backend="process", num_workers=2, options=options)) as pool:
        for number in range(1, ROUNDS + 1):
            with in_time():
                step_all(pool, number)


def step_all(pool: stepmill.Pool, number: int) -> None:
    """Step envs 0 and 1, and what else can be stepped; receive all. Check envs 0 and 1."""
    ids = of_state(pool, "IDLE")
    with contextlib.suppress(*FAULTS):
        pool.send([number] * len(ids), ids)
    if 0 in of_state(pool, "IDLE"):  # a death was raised to it, and it sent nothing
        pool.send([number] * 2, [0, 1])
    seen: list[int] = []
    while of_state(pool, "BUSY", "READY"):
        with contextlib.suppress(*FAULTS):
            seen += check_batch(pool.recv(min_envs=1, max_envs=NUM_ENVS, timeout_s=HANG_GUARD_S), number)
    assert sorted(seen) == [0, 1]


def of_state(pool: stepmill.Pool, *names: str) -> list[int]:
    return [env_id for env_id, state in enumerate(pool.states) if state.name in names]


def check_batch(batch: stepmill.Batch, number: int) -> list[int]:
    """Return which of envs 0 and 1 are in it."""
    rows = {env_id: row for row, env_id in enumerate(batch.env_id.tolist()) if env_id < 2}
    for env_id, row in rows.items():
        assert batch.obs[row].tolist() == [env_id, 0, number]
        assert [batch.reward[row], batch.terminated[row], batch.truncated[row]] == [number, False, False]
    return list(rows)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("pattern", "then"),
    [("zeros", "returns"), ("ones", "hangs"), pytest.param("noise", "fills without end", marks=pytest.mark.slow)],
)
def test_a_call_that_was_answered_delays_no_deadline(pattern: str, then: str, tmp_path: Path) -> None:
    options = stepmill.PoolOptions(
        context="fork",
        on_fault="truncate",
        step_timeout_s=STEP_S,
        reset_timeout_s=STEP_S,
        workers={"call_timeout_s": CALL_S},
    )
    env_fns = [partial(FillingEnv, env_id, pattern, then, tmp_path / "mark") for env_id in range(NUM_ENVS)]
    with begun(stepmill.Pool(env_fns, backend="process", num_workers=2, options=options)) as pool:
        for number in range(1, ROUNDS + 1):
            with contextlib.suppress(*FAULTS):  # of the worker that was ended
                assert pool.get_attr("identity") == tuple(range(NUM_ENVS))
            with in_time():
                step_all(pool, number)
