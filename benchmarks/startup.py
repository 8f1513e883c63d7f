"""Section 5: seconds from the constructor to the first reset, memory per env, and memory growth over ten million steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import cpu
from benchmarks.engines import ENGINES, EngineSpec
from benchmarks.harness import FOREIGN_LIMIT, START_LIMIT_S, DriverError, DriverProcess, Plan

GROWTH_STEPS = 10_000_000
GROWTH_WARM_STEPS = 500_000
GROWTH_ENVS = 64
GROWTH_LIMIT_S = 1800.0


@dataclass(frozen=True)
class StartCase:
    """One row: an engine and the number of its envs. Slow engines are started with fewer envs, and once."""

    spec: EngineSpec
    num_envs: int
    is_slow: bool = False


def _case(name: str, base: str, title: str, num_envs: int, **options: Any) -> StartCase:
    spec = ENGINES[base]
    renamed = EngineSpec(
        name, f"{title}, n={num_envs}", spec.adapter, spec.venv, {**spec.options, **options}, spec.packages
    )
    return StartCase(renamed, num_envs, is_slow=num_envs < 256)


def start_cases(*, is_quick: bool) -> list[StartCase]:
    """Return the rows of section 5. The row names the start method, which is each library's default."""
    many, some, few = (16, 8, 4) if is_quick else (256, 64, 32)
    ours = [
        _case(f"stepmill-{way}", "stepmill-2w", f"**stepmill** 2 workers, {way}", many, pool={"context": way})
        for way in ("fork", "forkserver", "spawn")
    ]
    return [
        _case("gym-async", "gym-async", "Gymnasium Async, fork", many),
        _case("sb3", "sb3", "SB3 SubprocVecEnv, forkserver", some, start_method="forkserver"),
        _case("torchrl", "torchrl", "TorchRL ParallelEnv, spawn", few, start_method="spawn"),
        _case("tianshou", "tianshou", "Tianshou ShmemVectorEnv, fork", many),
        _case("diengine", "diengine", "DI-engine subprocess, fork", many),
        _case("puffer-2w-sync", "puffer-2w-sync", "PufferLib, 2 workers, fork", many),
        *ours,
    ]


def measure_start(case: StartCase, plan: Plan, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Start an engine a few times, each time in a new driver, and return results for the cells `start` and `memory`."""
    say(f"start: {case.spec.name}, {case.num_envs} envs")
    wanted = 1 if case.is_slow else plan.rounds
    rounds: list[dict[str, float]] = []
    failure = None
    for _ in range(plan.max_rounds):
        try:
            rounds.append(_start_once(case))
        except DriverError as exc:
            failure = str(exc)
            break
        if sum(one["foreign"] <= FOREIGN_LIMIT for one in rounds) >= wanted or (
            case.is_slow and len(rounds) == wanted + 1
        ):
            break
    counted = sorted(rounds, key=lambda one: one["foreign"] > FOREIGN_LIMIT)[:wanted]
    quiet = [one for one in counted if one["foreign"] <= FOREIGN_LIMIT]
    shared = {
        "name": case.spec.name,
        "title": case.spec.title,
        "rounds": rounds,
        "failure": failure,
        "is_noisy": len(quiet) < wanted,
    }
    # The memory of a noisy round counts, too: it does not depend on other processes.
    return {
        key: {**shared, "value": statistics.median(one[field] for one in counted) if counted else None}
        for key, field in (("start-256", "start_s"), ("memory-256", "mb_per_env"))
    }


def measure_growth(say: Callable[[str], None], steps: int = GROWTH_STEPS) -> dict[str, Any]:
    """Step CartPole `steps` times, and return the growth in megabytes (`value`) and in descriptors (`files`)."""
    spec = ENGINES["stepmill-2w"]
    result: dict[str, Any] = {"name": spec.name, "title": spec.title, "value": None, "failure": None, "is_noisy": False}
    say(f"growth: {spec.name}, {steps} steps")
    driver = None
    try:
        driver = DriverProcess(spec, "growth")
        _start(driver, spec, GROWTH_ENVS)
        driver.ask("steps", GROWTH_LIMIT_S, count=min(GROWTH_WARM_STEPS, steps))
        before_mb, before_files = cpu.pss_mb(driver.pid)[0], cpu.open_files(driver.pid)
        driver.ask("steps", GROWTH_LIMIT_S, count=steps)
        after_mb, after_files = cpu.pss_mb(driver.pid)[0], cpu.open_files(driver.pid)
    except DriverError as exc:
        return {**result, "failure": str(exc)}
    finally:
        if driver is not None:
            driver.end()
    return {**result, "value": max(0.0, after_mb - before_mb), "files": after_files - before_files, "steps": steps}


def _start_once(case: StartCase) -> dict[str, float]:
    driver = DriverProcess(case.spec, f"start-{case.spec.name}")
    try:
        driver.ask("prepare", START_LIMIT_S, adapter=case.spec.adapter, env="cartpole")
        idle_mb, _ = cpu.pss_mb(driver.pid)
        before = cpu.read(driver.pid)
        answer = _start(driver, case.spec, case.num_envs)
        after = cpu.read(driver.pid)
        full_mb, slab_mb = cpu.pss_mb(driver.pid)
    finally:
        driver.end()
    per_env = (full_mb - idle_mb - slab_mb) / case.num_envs
    return {
        "start_s": answer["start_s"],
        "mb_per_env": per_env,
        "slab_mb": slab_mb,
        "foreign": cpu.foreign_share(before, after),
    }


def _start(driver: DriverProcess, spec: EngineSpec, num_envs: int) -> dict[str, Any]:
    return driver.ask(
        "start", START_LIMIT_S, adapter=spec.adapter, env="cartpole", num_envs=num_envs, options=spec.options
    )
