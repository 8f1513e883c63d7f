"""A worker can write only what it owns: an env that writes elsewhere in the slab ends its worker, and changes no result."""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.slab.layout import PAGE_BYTES
from stepmill.testing.envs import CountingEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun
from tests.harness.slab_memory import fill_slab, writable_ranges

NUM_ENVS = 8  # on two workers: 0 to 3, and 4 to 7
CULPRIT = 4  # the first of its worker: none of the others has a result when it dies
ROUNDS = 12
PLAN = "ranges.json"
Range = tuple[int, int]


class StrayEnv(CountingEnv):
    """Fills bytes of the slab in its third step, where a file says so. The file is gone then: its successor does not."""

    def __init__(self, identity: int, memory: Path) -> None:
        super().__init__(identity, length=1000)
        self._memory = memory / PLAN

    def step(self, action: np.int64) -> Any:
        if self.identity == CULPRIT and self._t == 2 and self._memory.exists():
            ranges, byte = json.loads(self._memory.read_text())
            self._memory.unlink()
            faulthandler.disable()  # it would print a page to stderr
            for start, stop in ranges:
                fill_slab(start, stop, byte)
        return super().step(action)

    def writable(self) -> Sequence[Range]:
        return writable_ranges()

    def descriptors(self) -> list[str]:
        return [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]


class StrayImageEnv(StrayEnv):
    """Its observations are large enough to be lent."""

    def __init__(self, identity: int, memory: Path) -> None:
        super().__init__(identity, memory)
        self.observation_space = gymnasium.spaces.Box(-1, 2**40, (512, 3), np.int64)

    def _observe(self) -> Any:
        return np.tile(super()._observe(), (512, 1))


def make(memory: Path, on_fault: str = "raise", env: type[StrayEnv] = StrayEnv, **options: Any) -> stepmill.Pool:
    chosen = stepmill.PoolOptions(
        context="fork", on_fault=on_fault, seeding="per_episode", restarts={"max_restarts": 1000}, **options
    )
    env_fns: list[Callable[[], Any]] = [partial(env, env_id, memory) for env_id in range(NUM_ENVS)]
    return stepmill.Pool(env_fns, backend="process", num_workers=2, options=chosen)


def plan_write(memory: Path, pool: stepmill.Pool, target: Any, byte: int) -> None:
    (memory / PLAN).write_text(json.dumps([target(dict(pool._runtime.slab.plan)), byte]))


def whole(plan: dict[str, Any]) -> list[Range]:
    return [(0, plan["size_bytes"])]


def backwards(plan: dict[str, Any]) -> list[Range]:
    """The last page first, and so on: what is writable of other workers is reached before a page that is not."""
    return [(start, start + PAGE_BYTES) for start in range(plan["size_bytes"] - PAGE_BYTES, -1, -PAGE_BYTES)]


def neighbour(plan: dict[str, Any]) -> list[Range]:
    """All that the other worker writes, but for large observations."""
    return [plan["writable"].segments[0]]


def commands(plan: dict[str, Any]) -> list[Range]:
    """The learner's words of the culprit's own worker."""
    start = plan["learner_words"][1]
    return [(start, start + 64)]


def actions(plan: dict[str, Any]) -> list[Range]:
    offset, _, row_bytes, _ = plan["action"][0]
    return [(offset, offset + NUM_ENVS * row_bytes)]


def step_rounds(pool: stepmill.Pool, rounds: int) -> list[stepmill.WorkerDied]:
    """Step all envs that can be stepped; check the results of envs 0 to 3. Return the deaths that were raised."""
    deaths = []
    for number in range(1, rounds + 1):
        ids = of_state(pool, "IDLE")
        pool.send([(10 * number + env_id) % 100 for env_id in ids], ids)
        while waiting := of_state(pool, "BUSY", "READY"):
            try:
                check_batch(pool.recv(min_envs=1, max_envs=len(waiting), timeout_s=HANG_GUARD_S), number)
            except stepmill.WorkerDied as error:
                deaths.append(error)
    return deaths


def of_state(pool: stepmill.Pool, *names: str) -> list[int]:
    return [env_id for env_id, state in enumerate(pool.states) if state.name in names]


def check_batch(batch: stepmill.Batch, number: int) -> None:
    for row, env_id in enumerate(batch.env_id.tolist()):
        if env_id < 4:
            assert batch.reward[row] == (10 * number + env_id) % 100
            assert [batch.terminated[row], batch.truncated[row]] == [False, False]
            assert (batch.obs[row].reshape(-1, 3) == [env_id, 0, number]).all()


TARGETS = [whole, backwards, neighbour, commands, actions]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("byte", [0, 0xFF, 0x40])
@pytest.mark.parametrize("target", TARGETS)
def test_a_stray_write_ends_its_worker_and_changes_no_result(target: Any, byte: int, tmp_path: Path) -> None:
    with begun(make(tmp_path)) as pool:
        plan_write(tmp_path, pool, target, byte)

        deaths = step_rounds(pool, ROUNDS)

        assert [(death.signal_name, death.env_ids) for death in deaths] == [("SIGSEGV", (4, 5, 6, 7))]
        assert pool.get_attr("num_steps", env_ids=[0, 1, 2, 3]) == (ROUNDS,) * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("on_fault", ["truncate", "replay"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_stray_write_is_a_death_like_any_other(target: Any, on_fault: str, tmp_path: Path) -> None:
    with begun(make(tmp_path, on_fault)) as pool:
        plan_write(tmp_path, pool, target, 0x40)
        truncated = np.zeros(NUM_ENVS, int)
        for number in range(1, ROUNDS + 1):
            batch = pool.step([number + env_id for env_id in range(NUM_ENVS)])
            truncated += batch.truncated
            if batch.truncated[CULPRIT]:
                assert "SIGSEGV" in batch.info["fault"]["message"][CULPRIT]
            assert batch.obs[:4].tolist() == [[env_id, 0, number] for env_id in range(4)]
            assert batch.reward[:4].tolist() == [float(number + env_id) for env_id in range(4)]
            if on_fault == "replay":
                assert batch.obs[4:].tolist() == [[env_id, 0, number] for env_id in range(4, 8)]
        assert truncated.tolist() == [0] * 4 + [int(on_fault == "truncate")] * 4


@pytest.mark.parametrize("env", [StrayEnv, StrayImageEnv])
def test_two_workers_can_write_nothing_in_common_but_shared_words_and_a_page_where_large_rows_meet(
    env: type[StrayEnv], tmp_path: Path
) -> None:
    with make(tmp_path, env=env) as pool:
        plan: dict[str, Any] = dict(pool._runtime.slab.plan)
        pages = [
            {page for start, stop in ranges for page in range(start // PAGE_BYTES, stop // PAGE_BYTES)}
            for ranges in pool.call("writable", env_ids=[0, CULPRIT])
        ]
        seams = {
            (offset + slot * stride + 4 * row_bytes) // PAGE_BYTES
            for offset, stride, row_bytes, is_split in plan["observation"]
            for slot in range(plan["num_slots"])
            if not is_split and (offset + slot * stride + 4 * row_bytes) % PAGE_BYTES
        }
        assert pages[0] & pages[1] == {plan["shared_words"] // PAGE_BYTES} | seams
        assert 0 not in pages[0] | pages[1]  # the learner's


def test_a_worker_keeps_no_descriptor_of_the_slab(tmp_path: Path) -> None:
    with make(tmp_path) as pool:
        (links,) = pool.call("descriptors", env_ids=[CULPRIT])
        assert any("stepmill-results" in link for link in links)
        assert not any("stepmill-slab" in link for link in links)
