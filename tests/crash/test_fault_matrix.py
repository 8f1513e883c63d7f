"""Every kind of fault in every phase under every start method: it is raised at once, the pool goes on, and the other env loses nothing."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import ERRORS, EXIT_CODE
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.pools import begun, make_pool

LIMIT_S = DEADLINE_S
TIMEOUT_S = {"step": LIMIT_S, "reset": LIMIT_S + 0.1}
PROCESSES = ["fork", "forkserver", "spawn"]
# How a worker was started has no part in what it reports: that is tried in a short time on forks of the learner.
WORKERS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow), "spawn"]
PHASES = ["step", "reset", "call", "render"]
TEXTS = {"mute": "", "chained": "the effect", "exit": "3"}  # of errors that do not say "a deliberate failure"
DEATHS = ["exit", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"]


def _hang_in_python() -> None:
    time.sleep(600)


def _hang_in_c(library: Callable[[None], Any]) -> None:
    library(None).sleep(600)


def _use_up_memory() -> None:
    """Ask for more than there is, in a process that may have little more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, hard))
    try:
        held = [bytearray(2**22) for _ in range(1000)]
        raise AssertionError(f"{len(held)} pieces of 4 MiB do not fit into 64 MiB")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _raise(name: str) -> None:
    error = ERRORS[name]()
    raise error


def _die(how: str) -> None:
    if how == "exit":
        os._exit(EXIT_CODE)
    number = signal.Signals[how]
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # faulthandler would print a page to stderr first
    os.kill(os.getpid(), number)


HANGS: dict[str, Callable[[], object]] = {
    "in python": _hang_in_python,
    "in C": partial(_hang_in_c, ctypes.CDLL),
    "in C with the GIL": partial(_hang_in_c, ctypes.PyDLL),
    "stopped": partial(os.kill, 0, signal.SIGSTOP),
}
INVALID: dict[str, object] = {
    "nothing": None,
    "too few": (np.zeros(3, np.int64), {}),
    "a shape": (np.zeros(4, np.int64), 0.0, False, False, {}),
    "a dtype": (np.zeros(3, np.float64), 0.0, False, False, {}),
    "text": ("text", 0.0, False, False, {}),
    "a reward": (np.zeros(3, np.int64), "much", False, False, {}),
    "a flag": (np.zeros(3, np.int64), 0.0, np.zeros(2), False, {}),
    "an info": (np.zeros(3, np.int64), 0.0, False, False, [1]),
}


class BrokenEnv(CountingEnv):
    """Fails once, in the planned way and phase: `plan("step", "raise", "value")`. Then it works again."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity, length=100)
        self._plan = ("", "", "")

    def plan(self, phase: str, kind: str, name: str) -> None:
        self._plan = (phase, kind, name)

    def _meet(self, phase: str) -> object:
        planned, kind, name = self._plan
        if planned != phase:
            return None
        self._plan = ("", "", "")
        if kind == "raise":
            _raise(name)
        if kind == "die":
            _die(name)
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP) if name == "stopped" else HANGS[name]()
        if kind == "memory":
            _use_up_memory()
        return INVALID[name] if kind == "invalid" else None

    def reset(self, **arguments: Any) -> Any:
        result = super().reset(**arguments)
        return self._meet("reset") or result

    def step(self, action: np.int64) -> Any:
        result = super().step(action)
        is_invalid = self._plan[1] == "invalid"
        found = self._meet("step")
        return found if is_invalid else result

    def render(self) -> Any:
        return self._meet("render")

    def poke(self) -> None:
        self._meet("call")


@pytest.fixture
def limits() -> dict[str, float]:
    """Deadlines, only where a test is about them: a busy machine misses them."""
    return {}


@pytest.fixture
def couple(where: str, limits: dict[str, float]) -> Iterator[stepmill.Pool]:
    """A bystander, env 0, and the one that breaks, env 1, each in a worker of its own where there are workers."""
    pool = begun(make_pool(where, [partial(BrokenEnv, 0), partial(BrokenEnv, 1)], **limits))
    yield pool
    pool.close()


def inflict(pool: stepmill.Pool, phase: str, kind: str, name: str) -> stepmill.StepmillError:
    """Let env 1 break, and return what the pool tells; then bring it back, and see that both are as they should be."""
    before = pool.get_attr("num_steps", env_ids=[0])[0]
    pool.call("plan", phase, kind, name, env_ids=[1])
    begin = time.monotonic()
    doom: dict[str, Callable[[], object]] = {
        "step": partial(pool.step, [1, 1]),
        "reset": partial(pool.reset, env_ids=[1]),
        "call": partial(pool.call, "poke", env_ids=[1]),
        "render": partial(pool.render, [1]),
    }
    with pytest.raises(stepmill.StepmillError) as caught:
        doom[phase]()
    assert time.monotonic() - begin < HANG_GUARD_S
    if phase == "step":
        assert pool.recv(1).reward.tolist() == [1.0]  # of the bystander
    pool.reset(env_ids=[1])
    assert pool.step([2, 3]).reward.tolist() == [2.0, 3.0]
    assert pool.get_attr("num_steps", env_ids=[0])[0] == before + (2 if phase == "step" else 1)
    return caught.value


@pytest.mark.covers("G-4", "D-B5", "A-B2")
@pytest.mark.parametrize("where", ["serial", "thread", *WORKERS])
def test_whatever_an_env_raises_is_reported_with_its_traceback(couple: stepmill.Pool, where: str) -> None:
    for phase in PHASES:
        for name in ERRORS if phase == "step" else ("value", "odd", "unpicklable", "exit", "keyboard"):
            if where == "serial" and name == "keyboard":
                continue  # there it is the user's, and passes through
            error = inflict(couple, phase, "raise", name)
            assert isinstance(error, stepmill.EnvError), (phase, name)
            assert (error.env_id, error.phase) == (1, phase)
            assert error.error_type.endswith(type(ERRORS[name]()).__name__)
            assert "env 1" in str(error)
            assert TEXTS.get(name, "a deliberate failure") in str(error)
            assert "_raise" in error.remote_traceback
            assert name != "chained" or "the cause" in error.remote_traceback


@pytest.mark.covers("A-B1", "D-B5", "U-B4", "X-9", "G-1/cause", "G-1/step", "G-1/reset", "G-1/call", "X-4/faults")
@pytest.mark.parametrize("where", WORKERS)
def test_every_end_of_a_process_in_every_phase_is_reported_with_the_cause(couple: stepmill.Pool) -> None:
    for phase, how in [("step", how) for how in DEATHS] + [(phase, "SIGKILL") for phase in PHASES[1:]]:
        error = inflict(couple, phase, "die", how)
        assert isinstance(error, stepmill.WorkerDied), (phase, how)
        assert error.env_ids == (1,)
        assert "envs [1] are lost" in str(error)
        cause = (EXIT_CODE, None) if how == "exit" else (None, how)
        assert (error.exit_code, error.signal_name) == cause


@pytest.mark.covers("G-2", "D-B7", "A-B1")
@pytest.mark.parametrize("limits", [{f"{phase}_timeout_s": limit_s for phase, limit_s in TIMEOUT_S.items()}])
@pytest.mark.parametrize("where", WORKERS)
def test_whatever_an_env_hangs_in_its_deadline_ends_it(couple: stepmill.Pool) -> None:
    for phase, name in [("step", name) for name in HANGS] + [("reset", "in C with the GIL"), ("reset", "stopped")]:
        error = inflict(couple, phase, "hang", name)
        assert isinstance(error, stepmill.EnvTimeout), (phase, name)
        assert (error.env_id, error.phase, error.timeout_s) == (1, phase, TIMEOUT_S[phase])
        assert f"its deadline of {TIMEOUT_S[phase]:g} s for a {phase}" in error.message


@pytest.mark.covers("G-4")
@pytest.mark.parametrize("where", WORKERS)
def test_an_env_that_uses_up_its_memory_is_reported_and_goes_on(couple: stepmill.Pool) -> None:
    for phase in PHASES:
        error = inflict(couple, phase, "memory", "")
        assert isinstance(error, stepmill.EnvError), phase
        assert (error.env_id, error.error_type) == (1, "MemoryError")


@pytest.mark.parametrize("where", ["serial", "thread", *WORKERS])
def test_an_invalid_output_is_refused_by_name(couple: stepmill.Pool) -> None:
    for name in INVALID:
        error = inflict(couple, "step", "invalid", name)
        assert isinstance(error, stepmill.BadOutput), name
        assert error.env_id == 1


# ---- the start -----------------------------------------------------------------------------------------------------------


def _fail_to_build(kind: str, name: str) -> CountingEnv:
    if kind == "raise":
        _raise(name)
    _die(name)
    return CountingEnv()


# Constructors that fail under every start method: test_launcher.py.
@pytest.mark.covers("G-4", "G-14", "A-B8", "G-1/construct")
@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_a_constructor_that_ends_its_process_is_named(how: str) -> None:
    with pytest.raises(stepmill.WorkerDied, match="constructing env 1") as caught:
        make_pool("fork", [CountingEnv, partial(_fail_to_build, "die", how), CountingEnv], num_workers=3)
    assert caught.value.env_ids == (1,)


# ---- deaths between two steps of the protocol ----------------------------------------------------------------------------


@pytest.mark.covers("G-1/step")
@pytest.mark.parametrize("where", PROCESSES)
def test_a_result_that_was_published_but_not_announced_outlives_its_worker(where: str) -> None:
    # A worker counts its results, and rings, after a group of them: env 0's is done, and its death comes before that.
    with begun(make_pool(where, [partial(BrokenEnv, 0), partial(BrokenEnv, 1)], num_workers=1)) as pool:
        pool.call("plan", "step", "die", "SIGKILL", env_ids=[1])
        pool.send([7, 8])
        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv(2)
        assert caught.value.env_ids == (0, 1)

        batch = pool.recv(1)

        assert (batch.env_id.tolist(), batch.reward.tolist()) == ([0], [7.0])


@pytest.mark.covers("G-4", "D-B6")
@pytest.mark.parametrize("where", PROCESSES)
def test_faults_of_several_kinds_at_once_are_all_reported(where: str) -> None:
    with begun(make_pool(where, [partial(BrokenEnv, env_id) for env_id in range(4)], num_workers=4)) as pool:
        for env_id, kind, name in ((0, "raise", "odd"), (1, "die", "SIGKILL"), (3, "invalid", "text")):
            pool.call("plan", "step", kind, name, env_ids=[env_id])
        pool.send([1, 1, 1, 1])
        told: dict[int, str] = {}
        while len(told) < 3:
            with pytest.raises(stepmill.StepmillError) as caught:
                pool.recv(4 - len(told))
            for error in (caught.value, *caught.value.others):
                env_id = error.env_ids[0] if isinstance(error, stepmill.WorkerDied) else error.env_id  # type: ignore[attr-defined]
                told[env_id] = type(error).__name__

        assert told == {0: "EnvError", 1: "WorkerDied", 3: "BadOutput"}
        assert pool.recv(1).env_id.tolist() == [2]


# ---- restarts that fail, too ---------------------------------------------------------------------------------------------


def _build_unless(flag: Path, kind: str, env_id: int) -> BrokenEnv:
    if flag.exists() and env_id == 1:
        _fail_to_build(kind, "odd" if kind == "raise" else "SIGKILL")
    return BrokenEnv(env_id)


def _step_on(pool: stepmill.Pool) -> None:
    for _ in range(3):
        pool.step([1, 1])


@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
@pytest.mark.parametrize("kind", ["raise", "die"])
def test_a_restart_that_fails_is_reported_and_the_next_may_succeed(kind: str, on_fault: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    seeding = "continue" if on_fault == "raise" else "per_episode"
    options: dict[str, Any] = {
        "on_fault": on_fault,
        "seeding": seeding,
        "restarts": {"max_restarts": 2, "restart_window_s": 600},
    }
    with make_pool("fork", [partial(_build_unless, flag, kind, env_id) for env_id in range(2)], **options) as pool:
        pool.reset(seed=0)
        flag.touch()
        pool.call("plan", "step", "die", "SIGKILL", env_ids=[1])

        with pytest.raises(stepmill.StepmillError) as caught:
            _step_on(pool)
        if on_fault == "raise":
            pool.recv(1)
            with pytest.raises(stepmill.StepmillError) as caught:
                pool.reset(env_ids=[1])
        error = caught.value
        assert isinstance(error, stepmill.EnvError if kind == "raise" else stepmill.WorkerDied)
        assert "env 1" in str(error) or error.env_ids == (1,)  # type: ignore[attr-defined]
        if pool.states[0].name == "READY":
            pool.recv(1)
        flag.unlink()

        assert pool.reset(seed=1).env_id.tolist() == [0, 1]
        assert pool.step([1, 1]).reward.tolist() == [1.0, 1.0]
