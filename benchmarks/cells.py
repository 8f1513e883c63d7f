"""The cells that are measured in sections 1 to 4 and 7: each is an env, a number of envs and the engines that run it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.engines import ENGINES, GYMNASIUMS, PIPES, PUFFERS, EngineSpec

NUM_CORES = 2
# All classes of libraries that step all envs together, without PufferLib's.
LOCKSTEP = (*GYMNASIUMS, "sb3-dummy", *PIPES)


@dataclass(frozen=True)
class Cell:
    """One column of a table.

    Attributes:
        section: number of the table.
        key: names the cell on the command line and in raw results.
        could_run: how many envs could run at once, to compute the efficiency; None to measure env-steps per second.
    """

    section: int
    key: str
    title: str
    env: str
    num_envs: int
    engines: tuple[EngineSpec, ...]
    could_run: int | None = None


SECTIONS = {
    1: "Overhead: no-op Python env, 4 float32 (env-steps/s)",
    2: "Bandwidth: no-op env with images (env-steps/s)",
    3: "Stragglers: efficiency = env time / (wall x what could run at once)",
    4: "Real envs (env-steps/s; Atari: agent steps, frame skip 4, gray 84x84, stack 4)",
    5: "Start and memory (CartPole, constructor to first reset; PSS growth per env)",
    7: "Front-ends and the classes that they replace (2 workers; env-steps/s)",
}


def _pick(names: Iterable[str], num_envs: int) -> tuple[EngineSpec, ...]:
    """Return engines by name. The asynchronous ones get a batch size of half of the envs."""
    half = num_envs // 2
    return tuple(
        ENGINES[name].with_options(batch_size=half) if name.endswith("-async") and name not in PIPES else ENGINES[name]
        for name in names
    )


def _overhead() -> list[Cell]:
    names = (
        *("bare", *LOCKSTEP, *PUFFERS),
        *("stepmill-serial", "stepmill-thread", "stepmill-1w", "stepmill-2w", "stepmill-async"),
        *("stepmill-deadlines", "stepmill-replay", "stepmill-8w"),
    )
    return [Cell(1, f"noop-{n}", f"n={n}", "noop", n, _pick(names, n)) for n in (2, 8, 32, 128)]


def _bandwidth() -> list[Cell]:
    names = (*LOCKSTEP, *PUFFERS, "stepmill-serial", "stepmill-1w", "stepmill-2w")
    shapes = (("image84", "84x84x4 u8"), ("image210", "210x160x3 u8"))
    return [Cell(2, f"{env}-{n}", f"{title} n={n}", env, n, _pick(names, n)) for env, title in shapes for n in (8, 32)]


def _stragglers() -> list[Cell]:
    resetting = (*_computing_engines(16, 4), *_spared_engines(16, 4))
    return [
        Cell(3, "sleep-32", "sleep 1 ms cv 1, n=32", "sleep1ms", 32, _waiting_engines(32, 8), 32),
        Cell(3, "cpu-32", "CPU 200 µs cv 1, n=32", "cpu200us", 32, _computing_engines(32, 8), NUM_CORES),
        Cell(3, "slowreset-16", "20 µs steps, 10 ms resets, n=16", "slowreset", 16, resetting, NUM_CORES),
        Cell(3, "slowreset500-16", "the same, episodes of 500 steps", "slowreset500", 16, resetting, NUM_CORES),
    ]


def _async_peers(batch: int, puffer_workers: int) -> tuple[EngineSpec, ...]:
    puffer = ENGINES["puffer-2w-async"].with_options(
        f"PufferLib, {puffer_workers} workers, async", num_workers=puffer_workers, batch_size=batch, sync_traj=False
    )
    return (
        _renamed("tianshou-async", ENGINES["tianshou"].with_options("Tianshou ShmemVectorEnv, async", wait_num=batch)),
        _renamed("diengine-async", ENGINES["diengine"].with_options("DI-engine subprocess, async", wait_num=batch)),
        _renamed("puffer-async", puffer),
    )


def _waiting_engines(num_envs: int, batch: int) -> tuple[EngineSpec, ...]:
    """Return engines for envs that wait, with as many workers as envs if the engine has workers."""
    many = {"num_workers": num_envs, "batch_size": batch}
    sync = {"num_workers": num_envs}
    return (
        *(ENGINES[name] for name in LOCKSTEP),
        *_async_peers(batch, num_envs),
        ENGINES["stepmill-thread"].with_options(f"**stepmill** {num_envs} threads, sync", **sync),
        ENGINES["stepmill-2w"].with_options(f"**stepmill** {num_envs} workers, sync", **sync),
        ENGINES["stepmill-async-thread"].with_options(f"**stepmill** {num_envs} threads, async", **many),
        ENGINES["stepmill-async"].with_options(f"**stepmill** {num_envs} workers, async", **many),
    )


def _computing_engines(num_envs: int, batch: int) -> tuple[EngineSpec, ...]:
    """Return engines for envs that compute, with two workers if the engine lets the user choose."""
    return (
        ENGINES["ceiling"],
        *(ENGINES[name] for name in LOCKSTEP),
        ENGINES["puffer-2w-sync"],
        *_async_peers(batch, num_envs // batch),
        ENGINES["stepmill-2w"].with_options("**stepmill** 2 workers, sync"),
        ENGINES["stepmill-async"].with_options("**stepmill** 2 workers, async", batch_size=batch),
    )


def _spared_engines(num_envs: int, num_spares: int) -> tuple[EngineSpec, ...]:
    """Return stepmill with resets in advance: with two workers, and with a worker for each env, where a reset delays no other."""
    spared = {"resets": {"spare_envs": num_spares}}
    many = num_envs + num_spares
    ours, ours_async = ENGINES["stepmill-2w"], ENGINES["stepmill-async"]
    return (
        _renamed(
            "stepmill-overlap",
            ours.with_options("**stepmill** 2 workers, sync, overlapped", pool={"resets": {"overlap": True}}),
        ),
        _renamed(
            "stepmill-spares", ours.with_options(f"**stepmill** 2 workers, sync, {num_spares} spares", pool=spared)
        ),
        _renamed(
            "stepmill-spares-each",
            ours.with_options(f"**stepmill** {many} workers, sync, {num_spares} spares", num_workers=many, pool=spared),
        ),
        _renamed(
            "stepmill-spares-async",
            ours_async.with_options(f"**stepmill** 2 workers, async, {num_spares} spares", batch_size=4, pool=spared),
        ),
    )


def _real() -> list[Cell]:
    python = ("ceiling", *LOCKSTEP, *PUFFERS[:2])
    ours = ("stepmill-serial", "stepmill-2w", "stepmill-async")
    cpp = ("envpool-sync", "envpool-async")
    cartpole = (*python, "gym-numpy", *cpp, *ours)
    return [
        Cell(4, "cartpole-8", "CartPole n=8", "cartpole", 8, _pick(cartpole, 8)),
        Cell(4, "cartpole-64", "CartPole n=64", "cartpole", 64, _pick(cartpole, 64)),
        Cell(4, "halfcheetah-8", "HalfCheetah-v5 n=8", "halfcheetah", 8, _pick((*python, *cpp, *ours), 8)),
        Cell(
            4,
            "kernel-cartpole-64",
            "CartPole n=64, kernel",
            "cartpole",
            64,
            _pick(("gym-numpy", *cpp, "stepmill-kernel"), 64),
        ),
        Cell(
            4,
            "kernel-halfcheetah-8",
            "HalfCheetah-v5 n=8, kernel",
            "halfcheetah",
            8,
            _pick((*cpp, "stepmill-kernel"), 8),
        ),
        Cell(4, "pong-8", "Pong n=8", "pong", 8, _pick((*python, *cpp, "ale-sync", "ale-async", *ours), 8)),
    ]


def _frontends() -> list[Cell]:
    noop = (
        *("stepmill-2w", "multi-env-pipes", "multi-env", "alf-arrays", "alf-tensors", "torchrl", "torchrl-stepmill"),
        *("sb3", "sb3-stepmill", "tianshou", "tianshou-stepmill"),
    )
    threaded = ("torchrl-envpool", "torchrl-envpool-resets", "stepmill-envpool")
    slow = tuple(ENGINES["alf-arrays"].with_options(title, **more) for title, more in _SPARES.items())
    unity = _pick(("unity-queue", "unity-manager"), 4)
    return [
        Cell(7, "frontends-32", "no-op, n=32", "noop", 32, _pick(noop, 32)),
        Cell(7, "diengine-32", "DI-engine, no-op, n=32", "noop", 32, _diengine()),
        Cell(7, "envpool-cartpole-8", "TorchRL over EnvPool, CartPole n=8", "cartpole", 8, _pick(threaded, 8)),
        Cell(7, "envpool-cartpole-32", "TorchRL over EnvPool, CartPole n=32", "cartpole", 32, _pick(threaded, 32)),
        Cell(7, "envpool-pong-8", "TorchRL over EnvPool, Pong n=8", "pong", 8, _pick(threaded, 8)),
        Cell(7, "unity-4", "Unity env, one 84x84x3 image, n=4", "unity84", 4, unity),
        Cell(7, "unity-32", "Unity env, one 84x84x3 image, n=32", "unity84", 32, unity),
        Cell(
            7,
            "spares-4",
            "1 s resets, 50 steps of 20 ms, n=4",
            "reset1s",
            4,
            (slow[0], _renamed("alf-spares", slow[1])),
        ),
    ]


def _diengine() -> tuple[EngineSpec, ...]:
    """Return DI-engine's managers and stepmill's: synchronous, and asynchronous with half of the envs as wait_num."""
    theirs, ours = ENGINES["diengine"], ENGINES["stepmill-diengine"]
    return (
        theirs,
        _renamed("diengine-async", theirs.with_options("DI-engine subprocess, async", wait_num=16)),
        ours,
        _renamed(
            "stepmill-diengine-each", ours.with_options("**stepmill** DI-engine, a process per env", num_workers=None)
        ),
        _renamed("stepmill-diengine-async", ours.with_options("**stepmill** DI-engine, async", wait_num=16)),
    )


_SPARES: dict[str, dict[str, int | None]] = {
    "**stepmill** ALF, no spare envs": {"num_workers": None, "num_spares": 0},
    "**stepmill** ALF, 4 spare envs": {"num_workers": None, "num_spares": 4},
}


def _renamed(name: str, spec: EngineSpec) -> EngineSpec:
    return EngineSpec(name, spec.title, spec.adapter, spec.venv, spec.options, spec.packages)


def all_cells() -> list[Cell]:
    """Return the cells of sections 1 to 4 and 7, in the order of their tables."""
    return [*_overhead(), *_bandwidth(), *_stragglers(), *_real(), *_frontends()]
