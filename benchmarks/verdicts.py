"""Verdicts of an env of one step under `AsyncPool`, beside Pebble's ProcessPool and concurrent.futures' ProcessPoolExecutor.

    python -m benchmarks.setup --only verdicts                  # .venvs/verdicts, with stepmill and Pebble
    .venvs/verdicts/bin/python -m benchmarks.verdicts [--rounds 5] [--num-verdicts 4000] [--docs]

Each has two processes, and a program of one event loop that awaits verdicts of a regular expression:

- speed: verdicts per second of 64 tasks at once, and the processor time of all processes per verdict. Systems take turns; medians of rounds.
- killed: one verdict kills its process, beside four that take 0.1 s each.
- hung: two verdicts, one per process, never end, beside four that take 0.1 s each. The limit of a verdict is one second.

Of the last two: how many of the four were lost, after which time the program knew of the fault, and how many of four more verdicts came after
it within five seconds. Prints the table, and writes the raw results to benchmarks/results; with `--docs` also to docs/verdicts.json, and
the table to docs/guides/verifiers.md. `--check` fails if the table there is not that of docs/verdicts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import stepmill
from benchmarks import cpu
from benchmarks.machine import describe
from benchmarks.paths import RESULTS, ROOT
from benchmarks.readme import replace_block

NUM_WORKERS, NUM_TASKS, NUM_NEIGHBOURS = 2, 64, 4
LIMIT_S, LATER_S, SLOW_S = 1.0, 5.0, 0.1
PAGE, VALUES = ROOT / "docs" / "guides" / "verifiers.md", ROOT / "docs" / "verdicts.json"

Judge = Callable[[str], Awaitable[float]]


def judge(answer: str) -> float:
    """Return whether an answer is a number; `die`, `hang` and `slow` are answers that do so."""
    if answer == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while answer == "hang":
        pass
    if answer == "slow":
        time.sleep(SLOW_S)
    return float(re.fullmatch("[0-9]+", answer) is not None)


class Verifier:
    """The env of one step."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[None, dict[str, Any]]:
        """Return nothing."""
        return None, {}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        """Return the verdict as the reward."""
        return None, judge(action), True, False, {}


@asynccontextmanager
async def leased(num_envs: int, limit_s: float, **options: Any) -> AsyncIterator[Judge]:
    """Judge in envs of an AsyncPool."""
    limits = {"step_timeout_s": limit_s, "reset_timeout_s": 60.0, "num_workers": NUM_WORKERS}
    async with stepmill.AsyncPool(Verifier, num_envs=num_envs, **limits, **options) as pool:

        async def verdict(answer: str) -> float:
            async with pool.lease() as env:
                await env.reset()
                _, reward, _, truncated, info = await env.step(answer)
            if truncated:
                raise RuntimeError(f"the verifier {info['fault']['kind']}")
            return float(reward)

        yield verdict


@asynccontextmanager
async def in_pebble(limit_s: float) -> AsyncIterator[Judge]:
    """Judge in Pebble's processes."""
    import pebble

    pool = pebble.ProcessPool(max_workers=NUM_WORKERS)

    async def verdict(answer: str) -> float:
        return float(await asyncio.wrap_future(pool.schedule(judge, args=[answer], timeout=limit_s)))

    try:
        yield verdict
    finally:
        pool.stop()
        pool.join()


@asynccontextmanager
async def in_executor(limit_s: float) -> AsyncIterator[Judge]:
    """Judge in the processes of the standard library."""
    pool = ProcessPoolExecutor(NUM_WORKERS)

    async def verdict(answer: str) -> float:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, judge, answer), limit_s)

    try:
        yield verdict
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # a verdict that hangs would keep this program from ending
            process.kill()


SYSTEMS: dict[str, Callable[[float], AbstractAsyncContextManager[Judge]]] = {
    "`AsyncPool`, `num_envs=2`, `envs_per_worker=1`": partial(leased, NUM_WORKERS),
    '`AsyncPool`, `num_envs=64`, `on_fault="replay"`': partial(
        leased, NUM_TASKS, on_fault="replay", seeding="per_episode"
    ),
    "Pebble `ProcessPool`": in_pebble,
    "`ProcessPoolExecutor`": in_executor,
}


async def measure_speed(system: str, num_verdicts: int) -> dict[str, float]:
    """Return verdicts per second, and microseconds of processor time of all processes per verdict."""
    async with SYSTEMS[system](LATER_S) as verdict:

        async def ask(number: int) -> None:
            for _ in range(number):
                await verdict("42")

        await asyncio.gather(*(ask(2) for _ in range(NUM_TASKS)))  # the processes start
        before, began_s = cpu.read(os.getpid()), time.perf_counter()
        each = num_verdicts // NUM_TASKS
        await asyncio.gather(*(ask(each) for _ in range(NUM_TASKS)))
        took_s, after = time.perf_counter() - began_s, cpu.read(os.getpid())
    done = each * NUM_TASKS
    return {
        "per_s": done / took_s,
        "cpu_us": 1e6 * (after.tree_s - before.tree_s) / done,
        "others": cpu.foreign_share(before, after),
    }


async def see_fault(
    system: str, answer: str, number: int, *, limit_s: float = LIMIT_S, later_s: float = LATER_S
) -> dict[str, float]:
    """Return what becomes of the neighbours of verdicts that fail, when the program knows, and how many verdicts come later."""
    async with SYSTEMS[system](limit_s) as verdict:
        await asyncio.gather(*(verdict("slow") for _ in range(NUM_WORKERS)))  # all processes have started
        began_s, told_s = time.perf_counter(), list[float]()

        async def fail() -> None:
            try:
                await verdict(answer)
            except Exception:  # each library has errors of its own
                told_s.append(time.perf_counter() - began_s)

        bad = [asyncio.create_task(fail()) for _ in range(number)]
        neighbours = await asyncio.gather(*(verdict("slow") for _ in range(NUM_NEIGHBOURS)), return_exceptions=True)
        await asyncio.gather(*bad)
        later = [asyncio.wait_for(verdict("42"), later_s) for _ in range(NUM_NEIGHBOURS)]
        came = await asyncio.gather(*later, return_exceptions=True)
    return {
        "lost": sum(isinstance(each, BaseException) for each in neighbours),
        "told_s": max(told_s),
        "later": sum(each == 1.0 for each in came),
    }


def measure(rounds: int, num_verdicts: int) -> dict[str, dict[str, Any]]:
    """Return the results of each system."""
    speeds: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for number in range(rounds):
        for system in SYSTEMS if number % 2 else reversed(SYSTEMS):
            speeds[system].append(asyncio.run(measure_speed(system, num_verdicts)))
            print(
                system,
                {name: round(value, 2) for name, value in speeds[system][-1].items()},
                file=sys.stderr,
                flush=True,
            )
    found: dict[str, dict[str, Any]] = {}
    for system, each in speeds.items():
        found[system] = {name: statistics.median(one[name] for one in each) for name in each[0]}
        found[system]["killed"] = asyncio.run(see_fault(system, "die", 1))
        found[system]["hung"] = asyncio.run(see_fault(system, "hang", NUM_WORKERS))
    return found


def to_block(results: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        "| | verdicts per second | processor time of a verdict, µs | one process killed | both processes hang |",
        "|---|---:|---:|---|---|",
    ]
    for system, row in results["systems"].items():
        cells = [
            system,
            f"{float(format(row['per_s'], '.2g')):,.0f}",
            f"{row['cpu_us']:.0f}",
            *(_outcome(row[kind]) for kind in ("killed", "hung")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    facts, others = results["machine"], max(row["others"] for row in results["systems"].values())
    about = f"On {facts['cores']} cores ({facts['cpu']}), with {results['versions']}; other processes used {100 * others:.0f} % of the machine."
    return "\n".join([*lines, "", about]) + "\n"


def _outcome(found: dict[str, float]) -> str:
    told_s = found["told_s"]
    when = f"{told_s:.1f} s" if told_s >= 0.1 else f"{1e3 * told_s:.0f} ms"
    return f"known after {when}; {found['lost']} of {NUM_NEIGHBOURS} neighbours lost; {found['later']} of {NUM_NEIGHBOURS} later verdicts"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-verdicts", type=int, default=4000)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if given.check:
        if is_stale := page != replace_block(
            page, "verdicts", to_block(json.loads(VALUES.read_text(encoding="utf-8")))
        ):
            print(f"{PAGE.name} has another table than {VALUES.name}; run `python -m benchmarks.verdicts --docs`")
        return int(is_stale)
    versions = f"CPython {platform.python_version()} and Pebble {importlib.metadata.version('pebble')}"
    results = {"machine": describe(), "versions": versions, "systems": measure(given.rounds, given.num_verdicts)}
    text = json.dumps(results, indent=1) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"verdicts-{time.strftime('%Y%m%dT%H%M%S')}.json").write_text(text, encoding="utf-8")
    if given.docs:
        VALUES.write_text(text, encoding="utf-8")
        PAGE.write_text(replace_block(page, "verdicts", to_block(results)), encoding="utf-8")
    print(to_block(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
