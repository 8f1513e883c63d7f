"""`stepmill.AsyncPool` beside a thread pool of the program itself, in interleaved pairs.

    python -m benchmarks.aio [overhead] [blocking] [lag] [--pairs 10] [--scale 1.0] [--json FILE]

overhead   64 envs that do nothing: time per `await env.step`, of the program and of all its cores, beside `asyncio.to_thread`
blocking   256 envs that sleep 3 s in each of 3 steps: 9 s would be ideal; the peer is a thread pool with 256 threads, as SkyRL-Gym has
lag        how late a task of the same event loop runs while envs sleep 0 to 100 ms in each step and 1 % of the steps kill their
           worker or hang; beside the same load with the event loop idle

`--scale` shortens sleeps and numbers of steps, for a first look.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import stepmill

KILL, HANG = 8, 9
LAG_EVERY_S = 0.005


class Waiting(gymnasium.Env[Any, Any]):
    """Sleeps in each step for as long as its maker says, and dies or hangs if the action says so."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(10)

    def __init__(self, sleep_s: float = 0.0, *, is_random: bool = False) -> None:
        self._sleep_s, self._is_random = sleep_s, is_random
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return zeros."""
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._sleep_s or action == HANG:
            time.sleep(600 if action == HANG else self._sleep_s * (random.random() if self._is_random else 1.0))
        return self._obs, 0.0, False, False, {}


async def play(lease: stepmill.EnvLease, num_steps: int) -> None:
    """Play some steps in a lease."""
    async with lease as env:
        await env.reset()
        for _ in range(num_steps):
            await env.step(1)


async def play_in_threads(env: Waiting, num_steps: int, executor: ThreadPoolExecutor | None) -> None:
    """Play them in the program itself, as `asyncio.to_thread` does."""
    loop = asyncio.get_running_loop()
    env.reset()
    for _ in range(num_steps):
        await loop.run_in_executor(executor, env.step, 1)


async def timed(*work: Awaitable[Any]) -> dict[str, float]:
    """Return the seconds that pass, and those of this process's cores."""
    began, began_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*work)
    return {"wall": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}


async def overhead(scale: float) -> dict[str, Any]:
    """Return microseconds per step of envs that do nothing."""
    num_envs, num_steps = 64, max(10, int(500 * scale))
    async with stepmill.AsyncPool(Waiting, num_envs=num_envs, num_workers=1) as pool:
        await asyncio.gather(*(play(pool.lease(), 10) for _ in range(num_envs)))
        ours = await timed(*(play(pool.lease(), num_steps) for _ in range(num_envs)))
    envs = [Waiting() for _ in range(num_envs)]
    peer = await timed(*(play_in_threads(env, num_steps, None) for env in envs))
    per_step = 1e6 / (num_envs * num_steps)
    return {
        f"{side} {name} us": value * per_step
        for side, each in (("ours", ours), ("to_thread", peer))
        for name, value in each.items()
    }


async def blocking(scale: float, options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds that 256 sleeping envs take for 3 steps."""
    num_envs, sleep_s = 256, 3 * scale
    make_env = partial(Waiting, sleep_s)
    async with stepmill.AsyncPool(make_env, num_envs=num_envs, **options) as pool:
        ours = await timed(*(play(pool.lease(), 3) for _ in range(num_envs)))
    with ThreadPoolExecutor(num_envs) as executor:
        peer = await timed(*(play_in_threads(make_env(), 3, executor) for _ in range(num_envs)))
    return {"ideal": 3 * sleep_s, "ours": ours["wall"], "threads": peer["wall"]}


async def late_by(is_over: asyncio.Event, lags: list[float]) -> None:
    """Note how late a task runs that wants to run every 5 ms."""
    while not is_over.is_set():
        due = time.perf_counter() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(time.perf_counter() - due)


async def lag(scale: float, num_envs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the 99th percentile of the lag in ms: in a thread with a loop of its own, which only waits, and in the busy loop."""
    rng = random.Random(0)

    async def step_once(env: stepmill.EnvLease, *, is_lost: bool) -> bool:
        try:
            if is_lost:
                await env.reset()
            await env.step({0: KILL, 1: HANG}.get(rng.randrange(200), 1))
        except stepmill.StepmillError:
            return True
        return False

    async def episode(lease: stepmill.EnvLease) -> None:
        async with lease as env:
            is_lost = True
            for _ in range(max(5, int(100 * scale))):
                is_lost = await step_once(env, is_lost=is_lost)

    busy: list[float] = []
    idle: list[float] = []
    is_over = threading.Event()

    def wait_beside() -> None:
        async def main() -> None:
            own = asyncio.Event()
            task = asyncio.create_task(late_by(own, idle))
            await asyncio.to_thread(is_over.wait)
            own.set()
            await task

        asyncio.run(main())

    settings = {"step_timeout_s": 1.0, "restarts": {"max_restarts": 10**6}, **options}
    async with stepmill.AsyncPool(partial(Waiting, 0.1, is_random=True), num_envs=num_envs, **settings) as pool:
        beside = threading.Thread(target=wait_beside)
        beside.start()
        own = asyncio.Event()
        task = asyncio.create_task(late_by(own, busy))
        began = time.perf_counter()
        await asyncio.gather(*(episode(pool.lease()) for _ in range(num_envs)))
        wall_s = time.perf_counter() - began
        own.set()
        await task
        is_over.set()
        beside.join()
        num_deaths = sum(worker.deaths for worker in pool.pool.stats().workers)
    percentile = {side: float(np.percentile(each, 99) * 1e3) for side, each in (("busy", busy), ("beside", idle))}
    return {"p99 ms": percentile["busy"], "p99 ms beside": percentile["beside"], "deaths": num_deaths, "wall_s": wall_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", choices=["overhead", "blocking", "lag", []], default=["overhead", "blocking", "lag"]
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--num-envs", type=int, default=64, help="of the section lag")
    parser.add_argument("--options", type=json.loads, default={}, help="of the pools of blocking and lag, as JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], Any]] = {
        "overhead": lambda: overhead(arguments.scale),
        "blocking": lambda: blocking(arguments.scale, arguments.options),
        "lag": lambda: lag(arguments.scale, arguments.num_envs, arguments.options),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.sections}
    for pair in range(arguments.pairs):
        for name in arguments.sections:
            found[name].append(asyncio.run(sections[name]()))
            print(pair, name, {key: value and round(value, 3) for key, value in found[name][-1].items()}, flush=True)
    for name, rows in found.items():
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if rows[0][key] is not None}
        print(f"median of {name}:", {key: round(value, 3) for key, value in medians.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
