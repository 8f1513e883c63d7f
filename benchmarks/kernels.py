"""Kernels beside Gymnasium's NumPy batch and EnvPool: `python -m benchmarks.kernels [--num-threads 2] [--seconds 1]`.

CartPole at several sizes, in env-steps per second of wall time, the best of several rounds that take turns; the image game
against `memcpy` of the same bytes; MuJoCo tasks against bare threads that call nothing but MuJoCo. EnvPool's columns are
missing where it is not installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numba
import numpy as np

import stepmill

SIZES = (1, 8, 64, 1024, 16384)
IMAGE_SIZES = (32, 256)
MUJOCO_TASKS = ("HalfCheetah-v5", "Ant-v5")
MUJOCO_SIZES = (8, 64)
ROUNDS = 5
RING = 32


def measure(steppers: dict[str, Callable[[int], object]], num_envs: int, seconds: float) -> dict[str, float]:
    """Return env-steps per second of each, the best of some rounds in which all take turns."""
    best = dict.fromkeys(steppers, 0.0)
    for step in steppers.values():
        for count in range(RING):
            step(count)
    for _ in range(ROUNDS):
        for name, step in steppers.items():
            best[name] = max(best[name], num_envs * _steps_per_second(step, seconds / ROUNDS))
    return best


def _steps_per_second(step: Callable[[int], object], seconds: float) -> float:
    num_steps, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        for count in range(RING):
            step(count)
        num_steps += RING
    return num_steps / (time.perf_counter() - began)


def make_peers(num_envs: int, num_threads: int) -> dict[str, Any]:
    """Return vector envs of CartPole by name."""
    peers: dict[str, Any] = {
        "kernel": stepmill.make_vec("CartPole-v1", num_envs, backend="kernel", num_workers=num_threads),
        "kernel, 1 thread": stepmill.make_vec("CartPole-v1", num_envs, backend="kernel", num_workers=1),
        "gymnasium": gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point"),
    }
    try:
        import envpool
    except ModuleNotFoundError:
        return peers
    peers["envpool"] = envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=num_threads)
    return peers


def stepper(envs: Any, actions: Any) -> Callable[[int], object]:
    """Return what does step number `count`."""
    return lambda count: envs.step(actions[count])


def race_cartpole(num_envs: int, num_threads: int, seconds: float) -> None:
    """Print a row of CartPole's table."""
    peers = make_peers(num_envs, num_threads)
    actions = np.random.default_rng(0).integers(0, 2, (RING, num_envs))
    for envs in peers.values():
        envs.reset()
    speeds = measure({name: stepper(envs, actions) for name, envs in peers.items()}, num_envs, seconds)
    for envs in peers.values():
        envs.close()
    columns = "".join(f"{name}: {speed / 1e6:8.3f} M   " for name, speed in speeds.items())
    print(f"CartPole n={num_envs:<6} {columns} {1e9 / speeds['kernel']:6.1f} ns per env-step", flush=True)


def race_images(num_envs: int, num_threads: int, seconds: float) -> None:
    """Print what part of the speed of memcpy the image game reaches."""
    kernel = stepmill.kernels.find("stepmill/Catch84-v0")
    envs = stepmill.VectorEnv([kernel] * num_envs, backend="kernel", num_workers=num_threads)
    obs, _ = envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 3, (RING, num_envs))
    target = np.empty_like(obs)
    steppers = {"kernel": stepper(envs, actions), "memcpy": lambda count: np.copyto(target, obs)}
    speeds = measure(steppers, num_envs, seconds)
    envs.close()
    part = speeds["kernel"] / speeds["memcpy"]
    print(f"Catch84 n={num_envs:<4} {speeds['kernel'] / 1e6:.3f} M env-steps/s, {part:.0%} of memcpy", flush=True)


def bare_mujoco(env_id: str, num_envs: int, num_threads: int) -> Callable[[int], object]:
    """Return what steps so many simulations in bare threads, each its share: no resets, observations or rewards."""
    memory = import_module("stepmill.kernels.numba_memory")
    kernel: Any = stepmill.kernels.find(env_id)
    states = np.zeros(num_envs, kernel.state)
    kept = [kernel.prepare(states[place]) for place in range(num_envs)]
    frame_skip, call = kernel.task.frame_skip, memory.call

    @numba.njit(nogil=True)
    def run(states: Any, start: int, stop: int) -> None:
        for place in range(start, stop):
            state = states[place]
            for _ in range(frame_skip):
                call(state.mj_step, state.model, state.data)
            call(state.mj_rnePostConstraint, state.model, state.data)

    rng = np.random.default_rng(0)
    for simulation in kept:
        data = simulation.data
        data.ctrl[:] = rng.uniform(-1, 1, data.ctrl.shape)
    bounds = np.linspace(0, num_envs, num_threads + 1).astype(int)
    pool = ThreadPoolExecutor(num_threads)

    def step(_count: int, _kept: object = kept) -> None:
        list(pool.map(lambda share: run(states, bounds[share], bounds[share + 1]), range(num_threads)))

    return step


def race_mujoco(env_id: str, num_envs: int, num_threads: int, seconds: float) -> None:
    """Print what part of the speed of bare simulations a MuJoCo task reaches."""
    envs = stepmill.make_vec(env_id, num_envs, backend="kernel", num_workers=num_threads)
    envs.reset(seed=0)
    actions = [envs.action_space.sample() for _ in range(RING)]
    steppers = {"kernel": stepper(envs, actions), "bare": bare_mujoco(env_id, num_envs, num_threads)}
    if find_spec("envpool"):
        peer = import_module("envpool").make_gymnasium(env_id, num_envs=num_envs, num_threads=num_threads)
        peer.reset()
        steppers["envpool"] = stepper(peer, actions)
    speeds = measure(steppers, num_envs, seconds)
    envs.close()
    columns = "".join(f"{name}: {speed / 1e3:8.1f} k   " for name, speed in speeds.items())
    print(f"{env_id} n={num_envs:<4} {columns} {speeds['kernel'] / speeds['bare']:.0%} of bare mj_step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=2, help="threads that run envs, the caller's own included")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell of the table")
    arguments = parser.parse_args()
    for num_envs in SIZES:
        race_cartpole(num_envs, arguments.num_threads, arguments.seconds)
    for num_envs in IMAGE_SIZES:
        race_images(num_envs, arguments.num_threads, arguments.seconds)
    for env_id in MUJOCO_TASKS:
        for num_envs in MUJOCO_SIZES:
            race_mujoco(env_id, num_envs, arguments.num_threads, arguments.seconds)


if __name__ == "__main__":
    main()
