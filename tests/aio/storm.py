"""Many tasks lease envs that die, hang and raise at random, and are cancelled at random; every reply is checked by its content.

    python -m tests.aio.storm [--seconds 60] [--on-fault raise|truncate|replay] [--coroutines] [--full-loop] [--seed 0]

Ctrl-C ends a storm; it prints what happened until then, and fails if anything is left behind.

An observation names its env, its episode, its step and the action before it, so that a reply that is late, doubled or of another task
is seen. A fault must be an exception, or be marked in the info; under "replay" there is none, but for what replays cannot repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from typing import Any

import stepmill
from tests.chaos.envs import ACTION, CLOCK, IDENTITY, LENGTH, TAG, ChaosEnv
from tests.harness.leaks import Footprint, find_leaks

NUM_ENVS, NUM_TASKS = 32, 48
KILL_CHANCE, HANG_CHANCE, RAISE_CHANCE, CANCEL_CHANCE = 0.004, 0.002, 0.004, 0.01
STEP_TIMEOUT_S, MAX_WAIT_S = 1.0, 0.02
MAX_BUSY_S, MAX_FREE_S = 0.05, 0.1


class StormEnv(ChaosEnv):
    """Fails by chance, with a generator that no seed reaches: a replay of the same steps goes on."""

    def __init__(self, identity: int, can_raise: bool) -> None:
        super().__init__(identity)
        self._chance = random.Random(f"{os.getpid()} {identity} {time.monotonic_ns()}")
        self._can_raise = can_raise

    def step(self, action: Any) -> Any:
        """Fail, or step."""
        drawn = self._chance.random()
        if drawn < KILL_CHANCE:
            os.kill(os.getpid(), signal.SIGKILL)
        elif drawn < KILL_CHANCE + HANG_CHANCE:
            time.sleep(600)
        elif self._can_raise and drawn < KILL_CHANCE + HANG_CHANCE + RAISE_CHANCE:
            raise ValueError("by chance")
        return super().step(action)


class AsyncStormEnv:
    """The same with coroutines, which talk to an env over a connection: a reply that nobody took is the next one that is read.

    A hang is a wait without end, or blocks the event loop; the reply to it is late.
    """

    observation_space, action_space = ChaosEnv.observation_space, ChaosEnv.action_space

    def __init__(self, identity: int, can_raise: bool) -> None:
        self._env = ChaosEnv(identity)
        self._chance = random.Random(f"{os.getpid()} {identity} {time.monotonic_ns()}")
        self._can_raise = can_raise
        self._replies: asyncio.Queue[Any] = asyncio.Queue()

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset the env."""
        self._replies.put_nowait(self._env.reset(seed=seed))
        return await self._read()

    async def step(self, action: Any) -> Any:
        """Fail, or step."""
        drawn = self._chance.random()
        if drawn < KILL_CHANCE / 4:
            os.kill(os.getpid(), signal.SIGKILL)
        self._replies.put_nowait(self._env.step(action))
        if drawn < KILL_CHANCE:
            await asyncio.Event().wait()
        if drawn < KILL_CHANCE + HANG_CHANCE / 4:
            signal.pause()
        if self._can_raise and drawn < KILL_CHANCE + RAISE_CHANCE:
            self._replies.get_nowait()
            raise ValueError("by chance")
        return await self._read()

    async def close(self) -> None:
        """Do nothing."""

    async def _read(self) -> Any:
        await asyncio.sleep(self._chance.random() * MAX_WAIT_S)
        return await self._replies.get()


def tag_of(seed: int) -> int:
    """Return what the observations of an episode with this seed have in common."""
    return int(ChaosEnv(0).reset(seed=seed)[0][TAG])


async def play(env: stepmill.EnvLease, seed: int, rng: random.Random, counts: Counter[str]) -> None:
    """Play one episode, and check each of its replies."""
    tag, action = tag_of(seed), -1
    obs, _ = await env.reset(seed=seed)
    for clock in range(LENGTH + 1):
        wanted = [env.env_id, tag, clock, action]
        assert [int(obs[column]) for column in (IDENTITY, TAG, CLOCK, ACTION)] == wanted, (obs, wanted)
        if clock == LENGTH:
            break
        action = rng.randrange(9)
        step = env.step(action)
        limit_s = rng.random() * 0.002 if rng.random() < CANCEL_CHANCE else None
        obs, reward, terminated, truncated, info = await asyncio.wait_for(step, limit_s)
        counts["steps"] += 1
        if "fault" in info:
            assert (terminated, truncated, reward) == (False, True, 0.0)
            counts["marked"] += 1
            if "not_replayable" in info["fault"]:
                counts[f"not replayed: {info['fault']['not_replayable']}"] += 1
            return
        assert (reward, terminated, truncated) == (clock + 1, False, clock + 1 == LENGTH)
    counts["episodes"] += 1


async def play_until(deadline: float, pool: stepmill.AsyncPool, rng: random.Random, counts: Counter[str]) -> None:
    """Lease one env after the other."""
    while time.monotonic() < deadline:
        try:
            async with pool.lease() as env:
                await play(env, rng.randrange(2**31), rng, counts)
        except (TimeoutError, asyncio.TimeoutError):
            counts["cancelled"] += 1
        except stepmill.UsageError:
            raise
        except stepmill.StepmillError as error:
            counts[type(error).__name__.partition("_")[0]] += 1


async def fill_loop(rng: random.Random) -> None:
    """Hold the event loop up, at random."""
    while True:
        time.sleep(rng.random() * MAX_BUSY_S)  # noqa: ASYNC251
        await asyncio.sleep(rng.random() * MAX_FREE_S)


async def storm(
    seconds: float,
    on_fault: Any,
    seed: int,
    counts: Counter[str],
    *,
    has_coroutines: bool = False,
    is_full: bool = False,
) -> None:
    """Count what happens; `is_full`: while other tasks hold the event loop up."""
    make_env = AsyncStormEnv if has_coroutines else StormEnv
    fns = [partial(make_env, env_id, on_fault != "replay") for env_id in range(NUM_ENVS)]
    options: Any = {"on_fault": on_fault, "restarts": {"max_restarts": 10**6, "max_env_errors": 10**6}}
    if on_fault == "replay":
        options["seeding"] = "per_episode"
    async with stepmill.AsyncPool(fns, num_workers=8, step_timeout_s=STEP_TIMEOUT_S, **options) as pool:
        deadline = time.monotonic() + seconds
        players = [play_until(deadline, pool, random.Random(f"{seed} {place}"), counts) for place in range(NUM_TASKS)]
        filler = asyncio.create_task(fill_loop(random.Random(seed))) if is_full else None
        try:
            await asyncio.gather(*players)
        finally:
            if filler is not None:
                filler.cancel()
            counts["deaths"] += sum(worker.deaths for worker in pool.pool.stats().workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--on-fault", choices=["raise", "truncate", "replay"], default="raise")
    parser.add_argument("--coroutines", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full-loop", action="store_true")
    given = parser.parse_args()
    before, counts = Footprint.take(), Counter[str]()
    run = storm(
        given.seconds, given.on_fault, given.seed, counts, has_coroutines=given.coroutines, is_full=given.full_loop
    )
    try:
        asyncio.run(run)
    except KeyboardInterrupt:
        counts["interrupted"] += 1
    print(json.dumps(counts), flush=True)
    if leaks := find_leaks(before):
        raise SystemExit("\n".join(["left behind:", *leaks]))


if __name__ == "__main__":
    main()
