"""Envs on demand: `AsyncPool(..., idle_s=...)` builds an env for its first task, and closes it when no task has had it for a while."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import BatchedCountingEnv, CountingEnv
from tests.aio.test_leases import kill_first_worker
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S

IDLE_S = 1000.0


class Diary:
    """Tells a test in which order envs, in any process, were built and closed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "diary"
        os.mkfifo(self.path)
        self.fd = os.open(self.path, os.O_RDWR)
        self._text = b""

    async def read(self, num_lines: int) -> list[str]:
        """Wait for the next lines, such as "3 built"."""
        return await asyncio.to_thread(self._read, num_lines)

    def _read(self, num_lines: int) -> list[str]:
        while self._text.count(b"\n") < num_lines:
            assert select.select([self.fd], [], [], HANG_GUARD_S)[0], f"{self._text!r} is all that happened"
            self._text += os.read(self.fd, 4096)
        *lines, self._text = self._text.split(b"\n", num_lines)
        return [line.decode() for line in lines]

    def read_now(self) -> list[str]:
        """Return the lines that are there."""
        while select.select([self.fd], [], [], 0.0)[0]:
            self._text += os.read(self.fd, 4096)
        return self._read(self._text.count(b"\n"))


class DiaryEnv(CountingEnv):
    def __init__(self, path: Path, identity: int, *, can_close: bool = True) -> None:
        super().__init__(identity)
        self.path, self.can_close = path, can_close
        if (path.parent / f"refuse {identity}").exists():
            raise ValueError("there is no place for this env")
        if (path.parent / f"hang {identity}").exists():
            time.sleep(600)
        self.note("built")

    def note(self, what: str) -> None:
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(f"{self.identity} {what}\n")

    def close(self) -> None:
        hangs = (self.path.parent / "hang when closed").exists()  # read first: after the note a test removes it
        self.note("closed")
        if hangs:
            time.sleep(600)
        if not self.can_close:
            raise ValueError("this env raises when it is closed")


class AsyncDiaryEnv(DiaryEnv):
    async def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().close()


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    found = Diary(tmp_path)
    yield found
    os.close(found.fd)


def diary_pool(
    diary: Diary,
    num_envs: int = 6,
    idle_s: float = IDLE_S,
    *,
    can_close: bool = True,
    make: type[DiaryEnv] = DiaryEnv,
    **options: Any,
) -> Any:
    """Worker 0 has the first half of the envs."""
    fns = [partial(make, diary.path, env_id, can_close=can_close) for env_id in range(num_envs)]
    return stepmill.AsyncPool(fns, idle_s=idle_s, **{"num_workers": 2, **options})


async def leases_of(pool: stepmill.AsyncPool, num_leases: int) -> list[stepmill.EnvLease]:
    """Return leases of envs that were reset."""
    leases = [pool.lease() for _ in range(num_leases)]
    for lease in leases:
        await lease.__aenter__()
        await lease.reset(seed=1)
    return leases


async def give_back(leases: list[stepmill.EnvLease]) -> None:
    for lease in leases:
        await lease.__aexit__(None, None, None)


def let_idle_time_pass() -> None:
    """Let the clock of the event loop jump, so that each env that is idle now has been idle for IDLE_S."""
    loop: Any = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + IDLE_S


async def play_on(lease: stepmill.EnvLease) -> None:
    while True:
        await lease.step(1)
        await lease.reset()


# ---- when envs are built and closed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [DiaryEnv, AsyncDiaryEnv])
async def test_an_env_is_built_for_its_first_task_and_closed_after_the_last_and_built_again(
    diary: Diary, make: Any
) -> None:
    async with diary_pool(diary, make=make) as pool:
        assert sorted(diary.read_now()) == ["0 built", "3 built"]
        leases = await leases_of(pool, 4)
        assert [lease.env_id for lease in leases] == [0, 3, 1, 4]
        assert await diary.read(2) == ["1 built", "4 built"]
        assert [(await lease.step(7))[0].tolist() for lease in leases] == [[i, 0, 1] for i in (0, 3, 1, 4)]
        await give_back(leases)
        let_idle_time_pass()
        assert sorted(await diary.read(4)) == ["0 closed", "1 closed", "3 closed", "4 closed"]
        (again,) = await leases_of(pool, 1)
        assert await diary.read(1) == [f"{again.env_id} built"]
        assert (await again.step(3))[1] == 3.0
    assert await diary.read(1) == [f"{again.env_id} closed"]


async def test_envs_that_are_built_are_leased_first_in_turns_over_workers(diary: Diary) -> None:
    async with diary_pool(diary, 12) as pool:
        leases = await leases_of(pool, 8)
        used = {lease.env_id for lease in leases}
        await give_back(leases)
        diary.read_now()
        again = [lease.env_id for lease in await leases_of(pool, 4)]
        assert len([env_id for env_id in again if env_id < 6]) == 2
        assert {*again} < used
        assert diary.read_now() == []
        assert len({lease.env_id for lease in await leases_of(pool, 8)}) == 8
        assert len(diary.read_now()) == 4


async def test_an_env_is_not_closed_while_a_task_has_it(diary: Diary) -> None:
    async with diary_pool(diary, 4) as pool:
        kept, *others = await leases_of(pool, 4)
        diary.read_now()
        for _ in range(3):
            await give_back(others)
            let_idle_time_pass()
            assert f"{kept.env_id} closed" not in await diary.read(3)
            others = await leases_of(pool, 3)
            await diary.read(3)
        assert (await kept.step(1))[0].tolist() == [kept.env_id, 0, 1]


async def test_a_task_that_waits_gets_an_env_that_is_being_closed(diary: Diary) -> None:
    async with diary_pool(diary, 1, num_workers=1) as pool:
        for _ in range(20):
            async with pool.lease() as env:
                assert (await env.reset(seed=3))[0].tolist() == [0, 0, 0]
                assert (await env.step(5))[1] == 5.0
            let_idle_time_pass()
            await diary.read(2)


async def test_each_thread_of_a_worker_builds_its_own_envs(diary: Diary) -> None:
    async with diary_pool(diary, 8, workers={"threads_per_worker": 2}) as pool:
        assert sorted(diary.read_now()) == ["0 built", "2 built", "4 built", "6 built"]
        leases = await leases_of(pool, 6)
        assert [lease.env_id for lease in leases] == [0, 4, 2, 6, 1, 5]
        await give_back(leases)
        let_idle_time_pass()
        assert len(await diary.read(8)) == 8


async def test_memory_of_a_closed_env_goes_back_to_the_system(diary: Diary) -> None:
    class LargeEnv(DiaryEnv):
        def __init__(self, path: Path, identity: int) -> None:
            super().__init__(path, identity)
            self.parts = [np.ones(4096, np.uint8) for _ in range(25_000)]  # too small for mappings of their own
            self.itself = self

    def memory_mb(pool: stepmill.AsyncPool) -> float:
        pid = pool.pool.stats().workers[0].pid
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    fns = [partial(LargeEnv, diary.path, env_id) for env_id in range(3)]
    async with stepmill.AsyncPool(fns, num_workers=1, idle_s=IDLE_S) as pool:
        await diary.read(1)
        leases = await leases_of(pool, 3)
        in_use_mb = memory_mb(pool)
        await give_back(leases)
        let_idle_time_pass()
        await diary.read(5)
        await leases_of(pool, 1)  # after the end of the last close
        assert memory_mb(pool) < in_use_mb - 150


async def test_no_env_is_closed_by_a_timer_after_the_end_of_the_pool(diary: Diary) -> None:
    async with diary_pool(diary, 2) as pool:
        leases = await leases_of(pool, 2)
    await give_back(leases)
    assert sorted(diary.read_now()) == ["0 built", "0 closed", "1 built", "1 closed"]
    loop: Any = asyncio.get_running_loop()
    assert [timer for timer in loop._scheduled if not timer.cancelled() and "_close" in repr(timer)] == []


# ---- faults ------------------------------------------------------------------------------------------------------------


async def test_an_error_of_the_builder_is_that_of_the_reset_which_may_be_repeated(diary: Diary) -> None:
    refusal = diary.path.parent / "refuse 1"
    refusal.touch()
    async with diary_pool(diary, 2, num_workers=1) as pool, pool.lease() as first, pool.lease() as env:
        await first.reset()
        for _ in range(2):
            with pytest.raises(ValueError, match="env 1 raised ValueError in reset: there is no place"):
                await env.reset()
        refusal.unlink()
        await env.reset(seed=1)
        assert (await env.step(2))[0].tolist() == [1, 0, 1]


async def test_an_env_that_is_unlike_the_first_is_an_error_that_says_in_what(diary: Diary) -> None:
    fns = [partial(DiaryEnv, diary.path, 0), partial(gymnasium.make, "CartPole-v1")]
    pool = stepmill.AsyncPool(fns, num_workers=1, idle_s=IDLE_S)
    async with pool, pool.lease(), pool.lease() as env:
        with pytest.raises(ValueError, match=r"env 1 raised.* has the observation .*float32.* and the first"):
            await env.reset()


async def test_building_counts_as_part_of_the_reset_for_deadlines(diary: Diary) -> None:
    (diary.path.parent / "hang 1").touch()
    pool = diary_pool(diary, 2, num_workers=1, reset_timeout_s=DEADLINE_S)
    async with pool, pool.lease() as first, pool.lease() as env:
        await first.reset()
        with pytest.raises(stepmill.EnvTimeout):
            await env.reset()


async def test_an_env_that_raises_when_it_is_closed_is_reported_and_built_again(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    async def lease_often() -> None:
        async with diary_pool(diary, 1, can_close=False, num_workers=1) as pool:
            for seed in range(3):
                async with pool.lease() as env:
                    assert (await env.reset(seed=seed))[0].tolist() == [0, 0, 0]
                let_idle_time_pass()
                await diary.read(2)
            (lease,) = await leases_of(pool, 1)
            await give_back([lease])

    with caplog.at_level(logging.WARNING, "stepmill"), pytest.warns(RuntimeWarning, match="when it is closed"):
        await lease_often()
    assert "closing the idle env 0 failed: env 0 raised ValueError in reset: this env raises when" in caplog.text


@pytest.mark.parametrize("on_fault", ["raise", "replay"])
async def test_a_deadline_ends_an_env_that_hangs_when_it_is_closed(diary: Diary, on_fault: Any) -> None:
    options: Any = {"on_fault": on_fault, "seeding": "per_episode", "reset_timeout_s": 10 * DEADLINE_S}
    hang = diary.path.parent / "hang when closed"
    hang.touch()
    async with diary_pool(diary, 3, num_workers=1, **options) as pool:
        (kept,) = await leases_of(pool, 1)
        await kept.step(1)
        await diary.read(1)
        async with pool.lease() as env:
            await env.reset()
        let_idle_time_pass()
        assert await diary.read(2) == ["1 built", "1 closed"]
        hang.unlink()
        if on_fault == "replay":
            assert [(await kept.step(1))[0][2] for _ in range(3)] == [2, 3, 4]
            return
        with pytest.raises(stepmill.EnvTimeout):
            await play_on(kept)
        await kept.reset(seed=1)
        assert (await kept.step(1))[0].tolist() == [0, 0, 1]


async def test_a_worker_that_is_replayed_builds_only_the_envs_that_are_in_an_episode(diary: Diary) -> None:
    options: Any = {"on_fault": "replay", "seeding": "per_episode"}
    async with diary_pool(diary, 8, num_workers=1, **options) as pool:
        first, second, third = await leases_of(pool, 3)
        for lease in (first, second, third):
            await lease.step(1)
        assert await diary.read(3) == ["0 built", "1 built", "2 built"]
        await give_back([first, third])
        let_idle_time_pass()
        assert sorted(await diary.read(2)) == ["0 closed", "2 closed"]
        await asyncio.to_thread(kill_first_worker, pool)
        assert (await second.step(1))[0].tolist() == [1, 0, 2]
        assert await diary.read(3) == ["0 built", "0 closed", "1 built"]
        assert diary.read_now() == []


async def test_after_a_death_the_first_env_of_the_new_worker_is_closed_too(diary: Diary) -> None:
    async with diary_pool(diary, 3, num_workers=1) as pool:
        first, second = await leases_of(pool, 2)
        await give_back([first])
        let_idle_time_pass()
        assert await diary.read(3) == ["0 built", "1 built", "0 closed"]
        await asyncio.to_thread(kill_first_worker, pool)
        with pytest.raises(stepmill.WorkerDied):
            await play_on(second)
        await second.reset()
        let_idle_time_pass()
        assert sorted(await diary.read(3)) == ["0 built", "0 closed", "1 built"]


# ---- what else -----------------------------------------------------------------------------------------------------------


async def test_an_env_that_is_not_built_has_nothing_to_call(diary: Diary) -> None:
    async with diary_pool(diary, 2, num_workers=1) as pool, pool.lease() as first, pool.lease() as env:
        assert await first.call("identity") == 0
        for name in ("identity", "render", lambda env: env.unwrapped):
            with pytest.raises(AttributeError, match=r"env 1 .*not built, .*; its reset builds it"):
                await env.call(name)
        await env.reset()
        assert await env.call("identity") == 1
        assert await env.call(lambda env: env.unwrapped.length) == 5


async def test_values_without_spaces_and_dicts_of_arrays_work_on_demand(diary: Diary) -> None:
    class TextEnv(DiaryEnv):
        def __init__(self, path: Path, identity: int) -> None:
            super().__init__(path, identity)
            spaces = gymnasium.spaces
            self.observation_space = spaces.Dict(  # type: ignore[assignment]
                text=spaces.Text(100), pair=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))])
            )

        def reset(self, **arguments: Any) -> Any:
            super().reset(**arguments)
            return {"text": "hello", "pair": (2, np.ones(2, np.float32))}, {}

    async with stepmill.AsyncPool(partial(TextEnv, diary.path, 0), num_envs=1, idle_s=IDLE_S) as pool:
        for _ in range(3):
            async with pool.lease() as env:
                obs = (await env.reset())[0]
                assert (obs["text"], obs["pair"][0], obs["pair"][1].tolist()) == ("hello", 2, [1.0, 1.0])
            let_idle_time_pass()
            assert await diary.read(2) == ["0 built", "0 closed"]


@pytest.mark.parametrize("idle_s", [0, -1.0, float("nan")])
def test_idle_s_is_a_positive_time(idle_s: float) -> None:
    with pytest.raises(stepmill.UsageError, match=r"idle_s=.* must be a positive number"):
        stepmill.AsyncPool(CountingEnv, num_envs=1, idle_s=idle_s)


async def test_only_single_envs_that_are_leased_are_built_on_demand() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=2, idle_s=IDLE_S) as pool:
        with pytest.raises(stepmill.UsageError, match="idle_s is for envs that are leased"):
            pool.reset_async()
    async with stepmill.AsyncPool(partial(BatchedCountingEnv, 2), num_envs=2, idle_s=IDLE_S) as pool:
        with pytest.raises(stepmill.UsageError, match="receive"):
            pool.lease()
