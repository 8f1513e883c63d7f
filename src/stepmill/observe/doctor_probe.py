"""The checks of envs. `stepmill doctor` runs all of them in child processes. `stepmill.testing.check_env` runs the first
two in the caller's process.

The child of doctor, `python -m stepmill.observe.doctor_probe FD`, reads two pickles from stdin, the settings and the
env function, and writes one JSON array per finding to the descriptor FD: check, what and where.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import itertools
import json
import os
import pickle
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np

from stepmill.backends.starter_client import STARTERS
from stepmill.observe.compared_runs import EnvFn, check_seeds, emit_few_steps, is_equal, until
from stepmill.observe.findings import Emit
from stepmill.observe.process_usage import children, num_fds, resident_bytes, thread_seconds, wait_for_end

NUM_CHECKED = 300  # steps whose results are checked; the other steps only look for leaks
NUM_STEPS_OF_POOLS = 50
HUGE_INFO_BYTES = 64 * 1024
SLOW_RESET_S = 0.02
SLOW_RESET_FACTOR = 20
LONG_STEP_S = 0.03
SILENT_TICKS = 2  # in a long step that holds the GIL; otherwise the ticker thread runs about thirty times
NUM_LONG_STEPS = 3
LEAK_BYTES = 2 << 20
LEAK_BYTES_PER_STEP = 200
LEAKED_FDS = 8
ROUNDING = 1e-6  # the tolerance of bounds, relative and absolute
FORK_LIMIT_S = 20.0


def check_steps(env_fn: EnvFn, emit: Emit, num_steps: int, budget_s: float) -> None:
    """Step one env many times, and check its results, spaces, durations, threads, leaks and child processes."""
    before = children()
    env = env_fn()
    try:
        _LongRun(env, emit, num_steps, budget_s).run()
    except BaseException:
        with suppress(Exception):  # the first error counts; close() may fail without a reset before
            _close(env)
        raise
    _close(env)
    left = wait_for_end(children() - before)
    if left:
        emit("children-left", f"{len(left)} child processes are still running after close()", "close()")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _close(env: Any) -> None:
    closing = env.close()
    if inspect.iscoroutine(closing):
        asyncio.run(closing)


class _Unusable(Exception):
    """The env cannot be checked further; a finding has said why."""


class _LongRun:
    """Steps one env with random actions: `num_steps` times, or until the time budget is used up."""

    def __init__(self, env: Any, emit: Emit, num_steps: int, budget_s: float) -> None:
        self._env = env
        self._report = emit
        self._num_steps = num_steps
        self._until_s = time.monotonic() + budget_s
        self._emitted: set[str] = set()
        self._step_s: list[float] = []
        self._reset_s: list[float] = []
        self._num_long = self._num_silent = 0  # steps of LONG_STEP_S or more; those in which no other thread ran
        self._last: tuple[Any, Any] | None = None  # the last observation, and a copy of it
        self._ticks = 0  # increased by a second thread every millisecond, when it gets the GIL
        self._is_ticking = True
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def _emit(self, check: str, what: str, where: str) -> None:
        name = check.partition("/")[0]
        if name not in self._emitted:
            self._emitted.add(name)
            self._report(check, what, where)

    def _tick(self) -> None:
        while self._is_ticking:
            self._ticks += 1
            time.sleep(0.001)

    def run(self) -> None:
        is_coroutine = inspect.iscoroutinefunction(self._env.step)
        if is_coroutine or not hasattr(getattr(self._env, "action_space", None), "sample"):
            what = "its step is a coroutine" if is_coroutine else "it declares no action_space to draw actions from"
            self._emit("not-checked", f"the env is not checked: {what}", "the env")
            raise _Unusable
        self._env.action_space.seed(0)
        self._ticker.start()
        try:
            self._step_all()
        finally:
            self._is_ticking = False
            self._ticker.join()

    def _step_all(self) -> None:
        self._reset(0)
        sizes: list[tuple[int, int]] = []
        threads_s = thread_seconds()
        interval = max(1, self._num_steps // 5)
        for step in range(1, self._num_steps + 1):
            self._step(step)
            if step == NUM_CHECKED:
                self._is_ticking = False
                self._ticker.join()
                self._check_threads(threads_s)
            if step % interval == 0:
                gc.collect()
                sizes.append((resident_bytes(), num_fds()))
            if time.monotonic() > self._until_s:
                break
        self._check_durations()
        self._check_leaks(sizes, interval)

    def _reset(self, step: int) -> None:
        began_s = time.monotonic()
        result = self._env.reset(seed=0) if step == 0 else self._env.reset()
        self._reset_s.append(time.monotonic() - began_s)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            self._emit("bad-output", f"reset returns {result!r:.80}, and not (observation, info)", "reset()")
            return
        self._check_observation(result[0], "reset()")
        self._last = None

    def _step(self, step: int) -> None:
        action = self._env.action_space.sample()
        given = copy.deepcopy(action) if step <= NUM_CHECKED else action
        ticks = self._ticks
        began_s = time.monotonic()
        result = self._env.step(action)
        took_s = time.monotonic() - began_s
        self._step_s.append(took_s)
        if self._is_ticking and took_s >= LONG_STEP_S:
            self._num_long += 1
            self._num_silent += self._ticks <= ticks + SILENT_TICKS
        if step <= NUM_CHECKED:
            if not is_equal(action, given):
                self._emit("changes-action", f"step has changed its action {given!r:.60}", f"step {step}")
            self._check_result(result, f"step {step}")
        if result[2] or result[3]:
            self._reset(step)

    def _check_result(self, result: Any, where: str) -> None:
        if not (isinstance(result, tuple) and len(result) == 5):
            wanted = "(observation, reward, terminated, truncated, info)"
            self._emit("bad-output", f"step returns {result!r:.80}, and not {wanted}", where)
            raise _Unusable
        observation, reward, terminated, truncated, info = result
        self._check_observation(observation, where)
        if not isinstance(reward, (int, float, np.number, np.ndarray)) or not np.all(np.isfinite(reward)):
            self._emit("bad-reward", f"the reward is {reward!r:.60}", where)
        if not all(isinstance(flag, (bool, np.bool_)) for flag in (terminated, truncated)):
            flags = f"terminated is {terminated!r:.40} and truncated is {truncated!r:.40}"
            self._emit("bad-output", f"{flags}, and not two bools", where)
        if not isinstance(info, dict):
            self._emit("bad-output", f"info is {info!r:.60}, and not a dict", where)
        else:
            self._check_info(info, where)

    def _check_observation(self, observation: Any, where: str) -> None:
        space = self._env.observation_space
        if not space.contains(observation):
            what = _space_problem(space, observation)
            if _is_rounded(space, observation):
                self._emit("observation-space/rounding", f"{what}: a rounding error", where)
            else:
                self._emit("observation-space", what, where)
        dtype = getattr(observation, "dtype", None)
        if isinstance(observation, np.ndarray) and space.dtype is not None and dtype != space.dtype:
            what = f"the observation has dtype {dtype}, and the space declares {space.dtype}"
            self._emit("observation-space/dtype", what, where)
        if self._last is not None:
            last, copied = self._last
            if not is_equal(last, copied):
                what = "an observation that was returned before has changed, because the env writes to it again"
                self._emit("observation-aliases", what, where)
        self._last = (observation, copy.deepcopy(observation))

    def _check_info(self, info: dict[Any, Any], where: str) -> None:
        try:
            size = len(cloudpickle.dumps(info))
        except Exception as error:  # the user's objects may raise anything
            self._emit("unpicklable-info", f"info cannot be pickled: {type(error).__name__}: {error}", where)
            return
        if size > HUGE_INFO_BYTES:
            self._emit("huge-info", f"info has {size / 1024:,.0f} KiB", where)

    def _check_threads(self, before_s: dict[int, float]) -> None:
        now_s = thread_seconds()
        own, ticker = threading.get_native_id(), self._ticker.native_id
        others = {tid: now_s[tid] - before_s.get(tid, 0.0) for tid in now_s if tid not in (own, ticker)}
        main_s = now_s[own] - before_s.get(own, 0.0)
        if sum(others.values()) > max(0.5 * main_s, 0.1):
            busy = sum(seconds > 0.01 for seconds in others.values())
            times = sum(others.values()) / max(main_s, 0.01)
            what = (
                f"{busy} other threads of this env use {times:.1f} times as much CPU time as the thread that steps it"
            )
            self._emit("threads", what, "step()")

    def _check_durations(self) -> None:
        step_s, reset_s = statistics.median(self._step_s), statistics.median(self._reset_s[1:] or self._reset_s)
        is_large_part = sum(self._reset_s) > 0.3 * sum(self._step_s)
        if reset_s > max(SLOW_RESET_S, SLOW_RESET_FACTOR * step_s) and is_large_part:
            self._emit("slow-reset", f"a reset takes {reset_s * 1e3:.3g} ms, a step {step_s * 1e3:.3g} ms", "reset()")
        if self._num_long >= NUM_LONG_STEPS and self._num_silent > 0.8 * self._num_long:
            what = f"no other thread of Python runs during {self._num_silent} of {self._num_long} long steps"
            self._emit("holds-gil", what, "step()")

    def _check_leaks(self, sizes: Sequence[tuple[int, int]], interval: int) -> None:
        if len(sizes) < 4:
            return  # too few measurements
        memory, fds = zip(*sizes, strict=True)
        num_steps = interval * (len(sizes) - 1)
        grows = all(later > earlier for earlier, later in itertools.pairwise(memory))
        grown = memory[-1] - memory[0]
        if grows and grown > max(LEAK_BYTES, LEAK_BYTES_PER_STEP * num_steps):
            self._emit(
                "memory-leak", f"memory grows by {grown / num_steps:,.0f} bytes per step", f"{num_steps:,} steps"
            )
        if fds[-1] - fds[0] >= LEAKED_FDS:
            what = f"{fds[-1] - fds[0]} descriptors were opened but not closed"
            self._emit("descriptor-leak", what, f"{num_steps:,} steps")


def check_backends(env_fn: EnvFn, emit: Emit, _num_steps: int, budget_s: float) -> None:
    """Run two envs on each backend, and compare what they return."""
    from stepmill.spec.errors import BadOutput, StepmillError

    runs: dict[str, list[Any]] = {}
    steps: Iterable[int] = until(range(NUM_STEPS_OF_POOLS), budget_s / 3)
    for backend in ("serial", "thread", "process"):
        try:
            runs[backend] = _play_in_pool(env_fn, backend, steps)
            steps = range(len(runs[backend]) - 1)  # the other backends run as many
            if backend == "serial":
                emit_few_steps(emit, len(steps), NUM_STEPS_OF_POOLS)
        except BadOutput as error:
            emit("bad-output", error.message, f"backend {backend!r}")
        except StepmillError as error:
            emit("raises", error.message, f"backend {backend!r}")
    for backend in ("thread", "process"):
        if "serial" in runs and backend in runs and not is_equal(runs["serial"], runs[backend]):
            what = f"the data on the {backend} backend differ from those on the serial backend"
            emit("backend-differs", what, f"two envs, {len(runs[backend]) - 1} steps")


def check_forks(env_fn: EnvFn, emit: Emit, _num_steps: int, _budget_s: float) -> None:
    """Make and step an env in a forked child of a process in which an env runs."""
    env = env_fn()
    env.reset(seed=0)
    env.step(env.action_space.sample())
    child = os.fork()
    if child == 0:
        _run_in_fork(env_fn)
    until_s = time.monotonic() + FORK_LIMIT_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until_s:
        time.sleep(0.01)
    status = ended[1]
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if ended[0] == 0 or status != 0:
        how = "hangs" if ended[0] == 0 else f"fails (status {status})"
        emit("fork-unsafe", f"an env in a forked process {how}", "context='fork'")


def _run_in_fork(env_fn: EnvFn) -> None:
    try:
        env = env_fn()
        env.reset(seed=0)
        for _ in range(20):
            if any(env.step(env.action_space.sample())[2:4]):
                env.reset()
        os._exit(0)
    except BaseException:  # the child must not return into the program
        os._exit(1)


def _play_in_pool(env_fn: EnvFn, backend: str, steps: Iterable[int]) -> list[Any]:
    from stepmill.observe.catalog import batch_actions
    from stepmill.pool.pool import Pool
    from stepmill.spec.options import BackendName

    with Pool([env_fn] * 2, backend=BackendName(backend), num_workers=None if backend == "serial" else 2) as pool:
        actions = batch_actions(pool.single_action_space, 2, 0)
        results = [copy.deepcopy(pool.reset(seed=0).obs)]
        for _ in steps:
            batch = pool.step(actions.sample())
            results.append(copy.deepcopy((batch.obs, batch.reward, batch.terminated, batch.truncated)))
    return results


# ---- spaces ---------------------------------------------------------------------------------------------------------


def _space_problem(space: Any, observation: Any) -> str:
    shape, found = getattr(space, "shape", None), np.shape(observation) if not isinstance(observation, dict) else None
    if shape is not None and found is not None and shape != found:
        return f"the observation has shape {found}, and the space declares {shape}"
    if hasattr(space, "low") and isinstance(observation, np.ndarray):
        if not np.can_cast(observation.dtype, space.dtype):
            return f"the observation has dtype {observation.dtype}, and the space declares {space.dtype}"
        outside = np.argwhere((observation < space.low) | (observation > space.high) | np.isnan(observation))
        if len(outside):
            at = tuple(outside[0].tolist())
            return f"element {at} is {observation[at]}, and the space allows {space.low[at]} to {space.high[at]}"
    return f"{observation!r:.80} is not in {space}"


def _is_rounded(space: Any, observation: Any) -> bool:
    """Whether an array of floats would be in the space without a rounding error."""
    if not hasattr(space, "low") or not isinstance(observation, np.ndarray) or observation.dtype.kind != "f":
        return False
    if observation.shape != space.shape:
        return False
    inside = np.clip(observation, space.low, space.high)
    return bool(space.contains(inside) and np.allclose(observation, inside, rtol=ROUNDING, atol=ROUNDING))


CHECKS = {"steps": check_steps, "seeds": check_seeds, "backends": check_backends, "forks": check_forks}


def main() -> None:
    """Run one group of checks."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    output = os.fdopen(descriptor, "w", buffering=1)

    def emit(*finding: str) -> None:
        output.write(json.dumps(finding) + "\n")

    settings = pickle.load(sys.stdin.buffer)
    sys.path[:] = settings["path"]
    warnings.simplefilter("ignore")
    try:
        env_fn = pickle.load(sys.stdin.buffer)
        CHECKS[settings["group"]](env_fn, emit, settings["num_steps"], settings["budget_s"])
    except _Unusable:
        pass
    except Exception as error:  # the env may raise anything
        emit("raises", f"{type(error).__name__}: {error}", f"group {settings['group']!r}")
    emit()  # the end, which is not written if the env ends this process
    output.close()
    STARTERS.close()
    os._exit(0)  # threads and children of the env must not keep this process alive


if __name__ == "__main__":
    main()
