"""MuJoCo's own batches beside stepmill's threads: `python -m benchmarks.mujoco_batch [--num-threads 2] [--seconds 2]`.

Two ways to step n simulations of a task in so many threads, in env-steps per second, the best of many short rounds in turns:

stepmill    `Pool.step` of the kernel: the queue, the kernel's step, the batch of results
mjb_apply   MuJoCo 4's pool of threads calls the same compiled step once per simulation; no results are gathered

Both begin in the same states and take the same actions. No episode ends, so both simulate the same motions. The CPU time of
a step depends less on other programs than its speed; it has the time of threads that spin in it.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import mujoco
import numba
import numpy as np

import stepmill
from benchmarks.kernels import RING
from stepmill.kernels.env import RESULT

TASKS: dict[str, dict[str, object]] = {
    "Swimmer-v5": {},
    "HalfCheetah-v5": {},
    "Ant-v5": {"terminate_when_unhealthy": False},
}
SIZES = (8, 64, 512)
ROUNDS = 20


class _Config(ctypes.Structure):
    _fields_ = [("nthread", ctypes.c_int), ("persistent", ctypes.c_bool)]


class Batch:
    """One of MuJoCo's batches: n simulations of a model, each with its own mjData, on a pool of threads.

    Raises:
        RuntimeError: MuJoCo cannot make it.
    """

    def __init__(self, kernel: Any, num_envs: int, num_threads: int) -> None:
        self._library = ctypes.CDLL(kernel._library._name)
        self._library.mjb_makeBatch.restype = ctypes.c_void_p
        self._num_envs = num_envs
        error = ctypes.create_string_buffer(1000)
        config = _Config(num_threads, True)
        model = ctypes.c_void_p(kernel._model._address)
        address = self._library.mjb_makeBatch(model, num_envs, ctypes.byref(config), error, len(error))
        if not address:
            raise RuntimeError(f"mjb_makeBatch failed: {error.value.decode()}")
        self._address = ctypes.c_void_p(address)

    def apply(self, function: ctypes.c_void_p) -> None:
        """Call a function once per simulation, and save nothing."""
        num_failed = self._library.mjb_apply(self._address, None, self._num_envs, function, None, 0)
        if num_failed:
            raise RuntimeError(f"{num_failed} simulations failed")

    def close(self) -> None:
        """Free the batch."""
        self._library.mjb_deleteBatch(self._address)


class KernelStep:
    """The compiled step of a kernel as a function that `mjb_apply` can call; every env has memory of its own."""

    def __init__(self, kernel: Any, num_envs: int) -> None:
        program = kernel.compile()
        self._states = np.zeros(num_envs, program.memory)
        addresses = self._states["state"] if program.infos is not None else self._states
        self._kept = [kernel.prepare(addresses[place]) for place in range(num_envs)]
        self._words = np.random.default_rng(0).integers(1, 2**60, (num_envs, 4), np.uint64)
        self._obs = np.zeros((num_envs, *program.observation.shape), program.observation.dtype)
        self.actions = np.zeros((num_envs, *program.action.shape), program.action.dtype)
        self._results = np.zeros(num_envs, RESULT)
        arrays = self._states, self.actions, self._words, self._obs, self._results
        bases, strides = [int(array.ctypes.data) for array in arrays], [array.strides[0] for array in arrays]
        self._reset(program, bases, strides, num_envs)
        self._compiled = _compile_call(program.step, bases, strides)
        self.address = ctypes.c_void_p(self._compiled.address)

    def _reset(self, program: Any, bases: list[int], strides: list[int], num_envs: int) -> None:
        reset = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 6)(program.reset)
        outcome = (ctypes.c_uint64 * 2)()
        for place in range(num_envs):
            state, _, words, obs, result = (base + stride * place for base, stride in zip(bases, strides, strict=True))
            reset(ctypes.addressof(outcome), ctypes.addressof(outcome) + 8, state, words, obs, result)


def _compile_call(step: int, bases: list[int], strides: list[int]) -> Any:
    """Return `void function(model, data, number, argument)`, which calls the kernel's step of the env of this number."""
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 7)(step)
    base, stride = tuple(bases), tuple(strides)
    pointer = numba.types.voidptr
    outcomes = np.zeros((max(SIZES), 2), np.uint64)  # by env: what Numba's functions return beside their status
    out = int(outcomes.ctypes.data)
    _KEPT.append((call, outcomes))

    @numba.cfunc(numba.types.void(pointer, pointer, numba.types.int32, pointer))
    def function(_model: Any, _data: Any, number: Any, _argument: Any) -> None:
        call(
            out + 16 * number,
            out + 16 * number + 8,
            base[0] + stride[0] * number,
            base[1] + stride[1] * number,
            base[2] + stride[2] * number,
            base[3] + stride[3] * number,
            base[4] + stride[4] * number,
        )

    return function


_KEPT: list[object] = []


def race(env_id: str, num_envs: int, num_threads: int, seconds: float) -> None:
    """Print a row of the table."""
    kernel: Any = stepmill.kernels.find(env_id, max_episode_steps=-1, **TASKS[env_id])
    pool = stepmill.Pool([kernel] * num_envs, backend="kernel", num_workers=num_threads)
    pool.reset(seed=0)
    low, high = kernel.action_space.low, kernel.action_space.high
    actions = np.random.default_rng(0).uniform(low, high, (RING, num_envs, *low.shape)).astype(np.float32)
    batch, compiled = Batch(kernel, num_envs, num_threads), KernelStep(kernel, num_envs)

    def apply(count: int) -> None:
        compiled.actions[:] = actions[count]
        batch.apply(compiled.address)

    steppers: dict[str, Callable[[int], object]] = {
        "stepmill": lambda count: pool.step(actions[count]),
        "mjb_apply": apply,
    }
    speeds, cpu_us = dict.fromkeys(steppers, 0.0), dict.fromkeys(steppers, np.inf)
    for _ in range(ROUNDS):
        for name, step in steppers.items():
            speed, cpu = _measure(step, num_envs, seconds / ROUNDS)
            speeds[name], cpu_us[name] = max(speeds[name], speed), min(cpu_us[name], cpu)
    pool.close()
    batch.close()
    columns = "".join(f"{name}: {speeds[name] / 1e3:6.1f} k {cpu_us[name]:6.1f} us CPU   " for name in steppers)
    ratio, cpu_ratio = speeds["stepmill"] / speeds["mjb_apply"], cpu_us["stepmill"] / cpu_us["mjb_apply"]
    print(f"{env_id:<16} n={num_envs:<4} {columns} speed {ratio:.2f}, CPU {cpu_ratio:.2f} of mjb_apply", flush=True)


def _measure(step: Callable[[int], object], num_envs: int, seconds: float) -> tuple[float, float]:
    """Return env-steps per second, and microseconds of CPU time per env-step, of all threads."""
    num_steps, began, cpu_began = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        step(num_steps % RING)
        num_steps += 1
    num_env_steps = num_envs * num_steps
    return num_env_steps / (time.perf_counter() - began), 1e6 * (time.process_time() - cpu_began) / num_env_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=2, help="threads that step, the caller's own included")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell of the table")
    arguments = parser.parse_args()
    print(f"mujoco {mujoco.__version__}")
    for env_id in TASKS:
        for num_envs in SIZES:
            race(env_id, num_envs, arguments.num_threads, arguments.seconds)


if __name__ == "__main__":
    main()
