"""Tasks lease envs of an `AsyncPool`; each result reaches the task that awaits it, whatever is cancelled, killed or late."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import stepmill
from stepmill.testing.envs import BatchedCountingEnv, CountingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from tests.chaos.envs import CLOCK, HANG, KILL, LENGTH, RAISE, TAG, ChaosEnv
from tests.harness.hangs import DEADLINE_S

CANCELLED = asyncio.CancelledError


def chaos_pool(num_envs: int = 4, **options: Any) -> stepmill.AsyncPool:
    """Worker 0 has the first half of the envs."""
    return stepmill.AsyncPool([partial(ChaosEnv, env_id) for env_id in range(num_envs)], num_workers=2, **options)


async def held_by_id(pool: stepmill.AsyncPool) -> dict[int, stepmill.EnvLease]:
    """Lease and reset four envs; return the leases by env_id."""
    envs = [pool.lease() for _ in range(4)]
    for env in envs:
        await env.__aenter__()
        await env.reset(seed=1)
    return {env.env_id: env for env in envs}


async def step(env: stepmill.EnvLease, action: int) -> tuple[Any, ...]:
    """Return all that came of a step, without the env's identity and the info."""
    obs, reward, terminated, truncated, _ = await env.step(action)
    return obs[1:].tolist(), reward, terminated, truncated


async def play(env: stepmill.EnvLease, seed: int, action: int = 1) -> list[Any]:
    """Play an episode, and return all that came of it."""
    obs, _ = await env.reset(seed=seed)
    rows: list[Any] = [obs[1:].tolist()]
    while not (len(rows) > 1 and any(rows[-1][2:])):
        rows.append(await step(env, action))
    return rows


def played_alone(seed: int, action: int = 1) -> list[Any]:
    env = ChaosEnv(0)
    rows: list[Any] = [env.reset(seed=seed)[0][1:].tolist()]
    for _ in range(LENGTH):
        obs, reward, terminated, truncated, _ = env.step(action)  # type: ignore[arg-type]
        rows.append((obs[1:].tolist(), reward, terminated, truncated))
    return rows


@pytest.mark.parametrize("backend", ["process", "thread"])
async def test_more_tasks_than_envs_play_the_episodes_that_envs_alone_would_play(backend: Any) -> None:
    async with chaos_pool(backend=backend) as pool:

        async def episode(seed: int) -> list[Any]:
            async with pool.lease() as env:
                return await play(env, seed)

        found = await asyncio.gather(*map(episode, range(20)))
        assert found == [played_alone(seed) for seed in range(20)]


async def test_idle_envs_are_leased_in_turns_of_the_workers_and_to_those_who_wait_in_their_order() -> None:
    async with chaos_pool() as pool:
        leases = [pool.lease() for _ in range(4)]
        for lease in leases:
            await lease.__aenter__()
        assert [lease.env_id for lease in leases] == [0, 2, 1, 3]
        order = []

        async def wait(name: str) -> None:
            async with pool.lease():
                order.append(name)

        tasks = []
        for name in ("first", "cancelled", "second"):
            tasks.append(asyncio.create_task(wait(name)))
            await asyncio.sleep(0)
        tasks[1].cancel()
        await leases[3].__aexit__(None, None, None)
        with suppress(CANCELLED):
            await tasks[1]
        await asyncio.gather(tasks[0], tasks[2])
        assert order == ["first", "second"]


async def test_an_env_that_is_given_to_a_task_as_it_is_cancelled_goes_to_the_next() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=1) as pool:
        lease = pool.lease()
        await lease.__aenter__()
        unlucky = asyncio.create_task(pool.lease().__aenter__())
        await asyncio.sleep(0)
        await lease.__aexit__(None, None, None)
        unlucky.cancel()
        with suppress(CANCELLED):
            await unlucky
        async with pool.lease() as env:
            await env.reset()


async def test_a_cancelled_step_is_finished_for_nobody_and_the_env_needs_a_reset(gate: Gate) -> None:
    async with stepmill.AsyncPool(partial(GateEnv, gate.path), num_envs=1) as pool, pool.lease() as env:
        await env.reset()
        step = asyncio.create_task(env.step(GATED_ACTION))
        await asyncio.to_thread(gate.wait_arrivals)
        with pytest.raises(stepmill.BusyEnvError, match="lease one env per task"):
            await env.step(1)
        step.cancel()
        with pytest.raises(CANCELLED):
            await step
        with pytest.raises(stepmill.UsageError, match="cancelled; call reset"):
            await env.step(1)
        reset = asyncio.create_task(env.reset(seed=3))  # waits for the step
        await asyncio.sleep(0)
        gate.open()
        obs, _ = await reset
        assert obs.tolist() == [0, 0, 0]
        assert (await env.step(7))[1] == 7.0


async def test_an_env_that_is_returned_while_it_steps_is_leased_once_the_step_has_ended(gate: Gate) -> None:
    async with stepmill.AsyncPool(partial(GateEnv, gate.path), num_envs=1) as pool:
        async with pool.lease() as env:
            await env.reset()
            step = asyncio.create_task(env.step(GATED_ACTION))
            await asyncio.to_thread(gate.wait_arrivals)
            step.cancel()
        with pytest.raises(stepmill.UsageError, match="this lease is not held"):
            await env.step(1)
        next_lease = asyncio.create_task(pool.lease().__aenter__())
        await asyncio.sleep(0)
        assert not next_lease.done()
        gate.open()
        later = await next_lease
        assert (await later.reset(seed=1))[0].tolist() == [0, 0, 0]


async def test_a_step_needs_a_reset_in_the_same_lease_and_after_the_end_of_an_episode() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=1) as pool:
        async with pool.lease() as env:
            await env.reset()
        async with pool.lease() as env:
            with pytest.raises(stepmill.UsageError, match="not reset in this lease"):
                await env.step(1)
            await env.reset()
            for _ in range(5):
                await env.step(1)
            with pytest.raises(stepmill.UsageError, match="episode has ended"):
                await env.step(1)


async def test_a_lease_that_is_used_again_needs_a_reset() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=1) as pool:
        lease = pool.lease()
        async with lease as env:
            await env.reset()
        async with lease as env:
            with pytest.raises(stepmill.UsageError, match="not reset in this lease"):
                await env.step(1)


async def test_a_lease_that_holds_or_awaits_an_env_takes_no_other() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=1) as pool:
        lease = pool.lease()
        async with lease:
            with pytest.raises(stepmill.UsageError, match="used already"):
                await lease.__aenter__()
        async with pool.lease():
            waiting = asyncio.create_task(lease.__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(stepmill.UsageError, match="used already"):
                await lease.__aenter__()
            waiting.cancel()
            with suppress(CANCELLED):
                await waiting
        async with lease:
            pass


async def test_a_wrong_action_sends_nothing() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=1) as pool, pool.lease() as env:
        await env.reset()
        with pytest.raises(stepmill.UsageError):
            await env.step("left")
        assert (await env.step(3))[1] == 3.0


async def test_seeds_and_options_reach_the_reset_and_infos_the_task() -> None:
    class TalkativeEnv(CountingEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed=seed)[0], {"seed": seed, "options": options}

    async with stepmill.AsyncPool(TalkativeEnv, num_envs=2) as pool, pool.lease() as env:
        assert (await env.reset(seed=5, options={"task": "a"}))[1] == {"seed": 5, "options": {"task": "a"}}
        assert (await env.reset())[1] == {"seed": None, "options": None}
        assert (await env.step(1))[4] == {"t": 1}


async def test_leases_are_refused_for_envs_with_several_rows() -> None:
    async with stepmill.AsyncPool(partial(BatchedCountingEnv, 2), num_envs=2) as pool:
        with pytest.raises(stepmill.UsageError, match="receive"):
            pool.lease()


async def test_leases_are_refused_with_spares() -> None:
    async with stepmill.AsyncPool(CountingEnv, num_envs=2, resets={"spare_envs": 1}) as pool:
        for _ in range(2):
            with pytest.raises(stepmill.UsageError, match="leave the option out"):
                pool.lease()
        pool.reset_async()
        received = await pool.receive()
        assert received.batch.num_rows == 1


# ---- faults ------------------------------------------------------------------------------------------------------------


async def test_an_error_of_an_env_reaches_its_task_alone() -> None:
    async with chaos_pool() as pool, pool.lease() as sick, pool.lease() as well:
        await sick.reset(seed=1)
        await well.reset(seed=1)
        with pytest.raises(ValueError, match="this env raises"):
            await sick.step(RAISE)
        with pytest.raises(ValueError, match="this env raises"):
            await sick.step(1)
        assert (await well.step(1))[1] == 1.0
        assert await play(sick, 2) == played_alone(2)


async def test_a_death_reaches_all_tasks_of_the_worker_and_a_reset_brings_their_envs_back() -> None:
    async with chaos_pool() as pool:
        by_id = await held_by_id(pool)
        with pytest.raises(stepmill.WorkerDied) as caught:
            await by_id[0].step(KILL)
        assert set(caught.value.env_ids) == {0, 1}
        with pytest.raises(stepmill.WorkerDied):
            await by_id[1].step(1)
        assert (await by_id[2].step(1))[1] == 1.0
        assert await asyncio.gather(play(by_id[0], 4), play(by_id[1], 5)) == [played_alone(4), played_alone(5)]


async def test_the_tasks_of_a_dead_worker_go_on_in_several_turns_of_the_loop() -> None:
    loop, turns = asyncio.get_running_loop(), Counter[str]()

    def turn() -> None:
        turns["now"] += 1
        loop.call_soon(turn)

    async def fail(env: stepmill.EnvLease) -> int:
        with pytest.raises(stepmill.WorkerDied):
            await env.step(HANG)
        return turns["now"]

    async with chaos_pool(128) as pool:
        envs = [pool.lease() for _ in range(128)]
        await asyncio.gather(*(env.__aenter__() for env in envs))
        await asyncio.gather(*(env.reset(seed=1) for env in envs))
        tasks = [asyncio.create_task(fail(env)) for env in envs if env.env_id < 64]
        turn()
        await asyncio.sleep(0)  # all have sent their actions
        kill_first_worker(pool)
        failed_in = Counter(await asyncio.gather(*tasks))
        assert max(failed_in.values()) <= 16


def kill_first_worker(pool: stepmill.AsyncPool) -> None:
    os.kill(pool.pool.stats().workers[0].pid, signal.SIGKILL)


async def test_a_deadline_ends_the_step_of_an_env_that_hangs() -> None:
    async with chaos_pool(step_timeout_s=DEADLINE_S) as pool, pool.lease() as env:
        await env.reset(seed=1)
        with pytest.raises(stepmill.EnvTimeout):
            await env.step(HANG)
        assert await play(env, 2) == played_alone(2)


async def test_a_cancelled_step_of_an_env_that_hangs_is_ended_by_its_deadline() -> None:
    async with chaos_pool(2, step_timeout_s=DEADLINE_S) as pool:
        async with pool.lease() as env:
            await env.reset(seed=1)
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(env.step(HANG), 0.01)
        async with pool.lease() as first, pool.lease() as second:
            assert await asyncio.gather(play(first, 2), play(second, 3)) == [played_alone(2), played_alone(3)]


async def test_under_replay_tasks_do_not_notice_deaths() -> None:
    async with chaos_pool(on_fault="replay", seeding="per_episode") as pool:

        async def episode(seed: int) -> list[Any]:
            async with pool.lease() as env:
                return await play(env, seed)

        held = await held_by_id(pool)
        for env_id in (1, 2, 3):
            await held[env_id].__aexit__(None, None, None)
        tasks = [asyncio.create_task(episode(seed)) for seed in range(40)]
        await tasks[0]
        await asyncio.to_thread(kill_first_worker, pool)
        _, *rest = played_alone(1)  # the death comes in this episode
        assert [await step(held[0], 1) for _ in range(LENGTH)] == rest
        assert await asyncio.gather(*tasks) == [played_alone(seed) for seed in range(40)]
        await held[0].__aexit__(None, None, None)
        assert [worker.restarts for worker in pool.pool.stats().workers] == [1, 0]


@pytest.mark.parametrize("idle_s", [None, DEADLINE_S])
async def test_under_replay_a_reset_or_close_of_an_idle_env_waits_for_the_replay_beside_other_tasks(
    idle_s: Any, gate: Gate
) -> None:
    env_fns = [partial(GateEnv, gate.path, env_id) for env_id in range(2)]
    options: Any = {"num_workers": 1, "on_fault": "replay", "seeding": "per_episode", "idle_s": idle_s}
    async with stepmill.AsyncPool(env_fns, **options) as pool, pool.lease() as busy:
        gate.open()
        await busy.reset(options={"gate": True})
        await asyncio.to_thread(gate.wait_arrivals)
        async with pool.lease() as idle:
            await idle.reset()
        await asyncio.to_thread(kill_first_worker, pool)
        step = asyncio.create_task(busy.step(1))  # finds the death
        await asyncio.to_thread(gate.wait_arrivals)  # the replay repeats the reset
        await asyncio.sleep(2 * (idle_s or 0.0))
        async with pool.lease() as idle:
            reset = asyncio.create_task(idle.reset())
            await asyncio.sleep(0)
            with pytest.raises(stepmill.BusyEnvError):
                await idle.step(1)
            gate.open()
            await reset
            assert [(await each)[0].tolist() for each in (step, idle.step(1))] == [[0, 0, 1], [1, 0, 1]]


async def test_results_arrive_although_an_env_reads_the_events_of_the_pool() -> None:
    class Thief(ChaosEnv):
        def step(self, action: Any) -> Any:
            steal_events()
            return super().step(action)

    async with stepmill.AsyncPool(Thief, num_envs=2, num_workers=1) as pool:

        async def episode(seed: int) -> list[Any]:
            async with pool.lease() as env:
                return await play(env, seed)

        assert await asyncio.gather(episode(1), episode(2)) == [played_alone(1), played_alone(2)]


def steal_events() -> None:
    """Read every event counter that this process has."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "eventfd" in os.readlink(f"/proc/self/fd/{name}"):
                os.eventfd_read(int(name))


async def test_every_reply_belongs_to_its_request_beside_cancellations_deaths_and_hangs() -> None:
    """The env answers with the numbers of its episode and step, so that a late or foreign reply would be seen."""

    async def episode(pool: stepmill.AsyncPool, seed: int) -> int:
        num_checked = 0
        async with pool.lease() as env:
            try:
                obs, _ = await env.reset(seed=seed)
                assert obs[TAG] == played_alone(seed)[0][0]
                for clock in range(1, LENGTH):
                    action = {(5, 0): KILL, (11, 3): HANG, (7, 1): RAISE}.get((seed % 13, clock % 4), clock % 9)
                    step = env.step(action)
                    obs, reward, *_ = await (asyncio.wait_for(step, 0.001) if (seed + clock) % 7 == 0 else step)
                    assert (obs[TAG], obs[CLOCK], reward) == (played_alone(seed)[0][0], clock, clock)
                    num_checked += 1
            except (stepmill.StepmillError, TimeoutError, asyncio.TimeoutError):
                pass
        return num_checked

    # The restarts of workers that are killed on purpose are not limited.
    async with chaos_pool(8, step_timeout_s=DEADLINE_S, restarts={"max_restarts": 1000}) as pool:
        counts = await asyncio.gather(*(episode(pool, seed) for seed in range(60)))
        assert sum(counts) > 60
        async with pool.lease() as env:
            assert await play(env, 1) == played_alone(1)
