"""`stepmill.AsyncPool` beside its peers, in interleaved pairs.

    python -m benchmarks.aio [overhead] [calls] [blocking] [coroutines] [lag] [memory] [--pairs 10] [--scale 1.0] [--json FILE]

overhead   64 envs that do nothing: time per `await env.step`, of the program and of all its cores, beside `asyncio.to_thread`
calls      calls per second of 64 envs in 2 workers that return None: of a method, of a function of the program, and of one that reads a
           global variable of the program, by 1, 8 and 64 leases at once, and by `Pool.call` and `get_attr` of one env and of all; beside
           Pebble's ProcessPool, if it is installed
blocking   256 envs of SkyRL-Gym that sleep 3 s in each of 3 steps: 9 s would be ideal; beside SkyRL's threads
coroutines 1,024 coroutine envs that sleep 0 to 100 ms in each of 100 steps: 5 s would be ideal; beside verifiers' env workers, which are
           as many, and beside asyncio in the program itself, which isolates nothing
lag        how late a task of the same event loop runs while envs sleep 0 to 100 ms in each step and 1 % of the steps kill their
           worker or hang; beside it, at the same time, how late a task runs in a process whose event loop is idle
memory     500 envs of 20 MB, of which 20 at a time are used for a while, built on demand: MB of all processes (proportional set size),
           beside the same use of 500 envs that are all built, and of 20 that are

The peers of blocking and coroutines are in an environment of their own: `python -m benchmarks.setup --only text` makes it, and
`.venvs/text-bench/bin/python -m benchmarks.aio` runs in it. A section whose peer is not installed says so.

`--scale` shortens sleeps and numbers of steps, for a first look; 4 makes the episodes of coroutines longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from gymnasium import spaces

import stepmill

KILL, HANG = 8, 9
MAX_PAUSE_S = 0.1
ENV_MB, IDLE_S = 20, 2.0
LAG_EVERY_S = 0.005
SECTIONS = ["overhead", "calls", "blocking", "coroutines", "lag", "memory"]


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

    def nothing(self) -> None:
        """Return None."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._sleep_s or action == HANG:
            time.sleep(600 if action == HANG else self._sleep_s * (random.random() if self._is_random else 1.0))
        return self._obs, 0.0, False, False, {}


class Large(Waiting):
    """Holds memory, in parts that are too small for mappings of their own, and in a reference cycle."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = [np.ones(2**14, np.uint8) for _ in range(ENV_MB * 2**6)]
        self._self = self


class Pausing:
    """A coroutine env, whose steps sleep 0 to 100 ms: of each `num_steps` that begin with a reset, exactly 50 ms on average."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Return a text."""
        num_steps = options["num_steps"]
        pauses = [MAX_PAUSE_S * (index + 0.5) / num_steps for index in range(num_steps)]
        random.Random(seed).shuffle(pauses)
        self._pauses = iter(pauses)
        return "begin", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        await asyncio.sleep(next(self._pauses))
        return "go on", 0.0, False, False, {}

    async def close(self) -> None:
        """Do nothing."""


async def play(env: Any, num_steps: int, action: Any = 1, **task: Any) -> None:
    """Play some steps in a lease, or in a coroutine env of the program itself."""
    await env.reset(**task)
    for _ in range(num_steps):
        await env.step(action)


async def play_leased(pool: stepmill.AsyncPool, *arguments: Any, **task: Any) -> None:
    """Play some steps in an env of a pool."""
    async with pool.lease() as env:
        await play(env, *arguments, **task)


async def play_in_threads(env: Waiting, num_steps: int) -> None:
    """Play them in the program itself, as `asyncio.to_thread` does."""
    env.reset()
    for _ in range(num_steps):
        await asyncio.to_thread(env.step, 1)


def is_installed(library: str) -> bool:
    """Return whether it is; say it if not."""
    if importlib.util.find_spec(library) is not None:
        return True
    print(
        f"{library} is not installed, and not measured; `python -m benchmarks.setup --only text` makes an environment that has it"
    )
    return False


async def timed(*work: Awaitable[Any]) -> dict[str, float]:
    """Return the seconds that pass, and those of this process's cores."""
    began, began_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*work)
    return {"wall": time.perf_counter() - began, "cpu": time.process_time() - began_cpu}


async def overhead(scale: float) -> dict[str, Any]:
    """Return microseconds per step of envs that do nothing."""
    num_envs, num_steps = 64, max(10, int(500 * scale))
    async with stepmill.AsyncPool(Waiting, num_envs=num_envs, num_workers=1) as pool:
        await asyncio.gather(*(play_leased(pool, 10) for _ in range(num_envs)))
        ours = await timed(*(play_leased(pool, num_steps) for _ in range(num_envs)))
    envs = [Waiting() for _ in range(num_envs)]
    peer = await timed(*(play_in_threads(env, num_steps) for env in envs))
    per_step = 1e6 / (num_envs * num_steps)
    return {
        f"{side} {name} us": value * per_step
        for side, each in (("ours", ours), ("to_thread", peer))
        for name, value in each.items()
    }


def nothing(env: object) -> None:
    """Return None."""


def nothing_global(env: object) -> None:
    """Return None, and refer to a module."""
    return None if env is not None else time.sleep(0)


async def calls(scale: float) -> dict[str, Any]:
    """Return calls per second."""
    num_envs, num_calls = 64, max(100, int(20_000 * scale))
    found: dict[str, float] = {}

    async def call_leased(pool: stepmill.AsyncPool, name: Any, number: int) -> None:
        async with pool.lease() as env:
            for _ in range(number):
                await env.call(name)

    async with stepmill.AsyncPool(Waiting, num_envs=num_envs, num_workers=2) as pool:
        await asyncio.gather(*(call_leased(pool, "nothing", 10) for _ in range(num_envs)))
        for name in ("nothing", nothing, nothing_global):
            for num_leases in (1, 8, 64):
                took = await timed(*(call_leased(pool, name, num_calls // num_leases) for _ in range(num_leases)))
                text = getattr(name, "__name__", "method")
                found[f"{text}, {num_leases} leases"] = num_calls // num_leases * num_leases / took["wall"]
    with contextlib.closing(stepmill.Pool([Waiting] * num_envs, num_workers=2)) as plain:
        asked = (("call", nothing), ("get_attr", nothing), ("get_attr", "_sleep_s"))
        for (kind, of), ids in itertools.product(asked, ([0], None)):
            began = time.perf_counter()
            for _ in range(num_calls // 10):
                getattr(plain, kind)(of, env_ids=ids)
            text = f"{kind}({getattr(of, '__name__', of)}) of {'all' if ids is None else 'one'}"
            found[text] = num_calls // 10 / (time.perf_counter() - began)
    if importlib.util.find_spec("pebble") is not None:
        import pebble

        with pebble.ProcessPool(max_workers=2) as peer:
            peer.schedule(nothing, args=[None]).result()
            began = time.perf_counter()
            for future in [peer.schedule(nothing, args=[None]) for _ in range(num_calls)]:
                future.result()
            found["Pebble"] = num_calls / (time.perf_counter() - began)
    return found


async def blocking(scale: float, options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds that 256 envs of SkyRL-Gym take for 3 steps that sleep."""
    if not is_installed("skyrl_gym"):
        return {}
    from benchmarks import skyrl_peer

    num_envs, num_steps, sleep_s = 256, 3, 3 * scale
    task = skyrl_peer.task(sleep_s, num_steps)
    options = {"num_workers": 8, "workers": {"threads_per_worker": 32}, **options}
    seconds = {"ideal": num_steps * sleep_s}
    async with stepmill.AsyncPool(skyrl_peer.AsGymnasium, num_envs=num_envs, **options) as pool:
        ours = await timed(*(play_leased(pool, num_steps, "a", options=task) for _ in range(num_envs)))
    seconds["ours"] = ours["wall"]
    for max_env_workers in (num_envs, skyrl_peer.DEFAULT_ENV_WORKERS):
        generator = skyrl_peer.Generator(max_env_workers)
        peer = await timed(*(generator.agent_loop(task) for _ in range(num_envs)))
        seconds[f"SkyRL, max_env_workers={max_env_workers}"] = peer["wall"]
    return seconds


async def coroutines(scale: float, options: dict[str, Any]) -> dict[str, Any]:
    """Return which share of the ideal 1,024 coroutine envs reach."""
    num_envs, num_steps = 1024, max(10, int(100 * scale))
    tasks = [{"seed": seed, "options": {"num_steps": num_steps}} for seed in range(num_envs)]
    options = {"num_workers": 2, **options}
    seconds: dict[str, dict[str, float]] = {}
    async with stepmill.AsyncPool(Pausing, num_envs=num_envs, **options) as pool:
        seconds["ours"] = await timed(*(play_leased(pool, num_steps, "a", **of) for of in tasks))
    seconds["plain asyncio"] = await timed(*(play(Pausing(), num_steps, "a", **of) for of in tasks))
    if is_installed("verifiers"):
        from benchmarks import verifiers_peer

        async with verifiers_peer.workers(options["num_workers"]) as peer:
            seconds["verifiers"] = await timed(*(peer.play(**of) for of in tasks))
    ideal_s = num_steps * MAX_PAUSE_S / 2
    return {f"{name} %": 100 * ideal_s / each["wall"] for name, each in seconds.items()}


async def late_by(is_over: asyncio.Event, lags: list[float]) -> None:
    """Note how late a task runs that wants to run every 5 ms."""
    while not is_over.is_set():
        due = time.perf_counter() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(time.perf_counter() - due)


async def late_until_told(told: Connection) -> list[float]:
    """Return how late a task was in this event loop, in which nothing else runs, until a message came."""
    is_over, lags = asyncio.Event(), list[float]()
    asyncio.get_running_loop().add_reader(told.fileno(), is_over.set)
    told.send(None)
    await late_by(is_over, lags)
    return lags


def wait_beside(told: Connection) -> None:
    """Run an idle event loop in a process of its own."""
    told.send(asyncio.run(late_until_told(told)))


async def lag(scale: float, num_envs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the 99th percentile of the lag in ms: in the busy loop, and at the same time in the idle one of another process."""
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
    context = multiprocessing.get_context("spawn")
    told, other_end = context.Pipe()
    beside = context.Process(target=wait_beside, args=(other_end,), daemon=True)
    settings = {"step_timeout_s": 1.0, "restarts": {"max_restarts": 10**6}, **options}
    async with stepmill.AsyncPool(partial(Waiting, 0.1, is_random=True), num_envs=num_envs, **settings) as pool:
        beside.start()
        await asyncio.to_thread(told.recv)  # it has started
        own = asyncio.Event()
        task = asyncio.create_task(late_by(own, busy))
        began = time.perf_counter()
        await asyncio.gather(*(episode(pool.lease()) for _ in range(num_envs)))
        wall_s = time.perf_counter() - began
        own.set()
        await task
        told.send(None)
        idle = await asyncio.to_thread(told.recv)
        beside.join()
        num_deaths = sum(worker.deaths for worker in pool.pool.stats().workers)
    percentile = {side: float(np.percentile(each, 99) * 1e3) for side, each in (("busy", busy), ("beside", idle))}
    return {"p99 ms": percentile["busy"], "p99 ms beside": percentile["beside"], "deaths": num_deaths, "wall_s": wall_s}


def total_mb() -> float:
    """Return the proportional set size of this process and all that it has started."""
    sizes = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes.append(int(text.split("Pss:")[1].split()[0]) / 1024)
    return sum(sizes)


async def memory(scale: float) -> dict[str, Any]:
    """Return MB while 20 envs are used, with pools of 500 envs on demand, of 500 envs and of 20."""
    num_used, num_envs = 20, max(20, int(500 * scale))
    cases: dict[str, tuple[int, float | None]] = {
        "on demand": (num_envs, IDLE_S),
        "all built": (num_envs, None),
        "20 envs": (num_used, None),
    }
    found = {}
    for name, (num_declared, idle_s) in cases.items():
        async with stepmill.AsyncPool(Large, num_envs=num_declared, num_workers=8, idle_s=idle_s) as pool:
            began = time.perf_counter()
            await asyncio.gather(*(play_leased(pool, 5) for _ in range(min(5 * num_used, num_declared))))  # a burst
            while time.perf_counter() - began < 4 * IDLE_S:
                await asyncio.gather(*(play_leased(pool, 5) for _ in range(num_used)))
                await asyncio.sleep(0.1)
            found[name] = total_mb()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=SECTIONS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--num-envs", type=int, default=64, help="of the section lag")
    parser.add_argument("--options", type=json.loads, default={}, help="of all pools but those of overhead, as JSON")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], Any]] = {
        "overhead": lambda: overhead(arguments.scale),
        "calls": lambda: calls(arguments.scale),
        "blocking": lambda: blocking(arguments.scale, arguments.options),
        "coroutines": lambda: coroutines(arguments.scale, arguments.options),
        "lag": lambda: lag(arguments.scale, arguments.num_envs, arguments.options),
        "memory": lambda: memory(arguments.scale),
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
