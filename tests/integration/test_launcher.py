"""The process backend: the launcher, how workers start, fail to start and end, and what they inherit."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import stepmill
from stepmill.backends.launcher_client import LauncherClient
from stepmill.backends.process import ProcessBackend
from stepmill.spec.options import Context
from stepmill.testing.envs import CountingEnv, SlowEnv
from stepmill.testing.faulty import DyingEnv, RaisingEnv
from stepmill.worker.messages import WorkerPlan, WorkerSettings
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.interrupts import interrupted_after
from tests.harness.scripts import run_file as run
from tests.harness.strangers import Unloadable

CONTEXTS = [Context.FORK, Context.FORKSERVER, Context.SPAWN]
in_contexts = pytest.mark.parametrize("where", ["fork", "forkserver", "spawn"], indirect=True)
EnvFn = Callable[[], object]


def plans_of(*workers: list[EnvFn]) -> list[WorkerPlan]:
    plans, first = [], 0
    for worker, env_fns in enumerate(workers):
        plans.append(WorkerPlan(worker, tuple(range(first, first + len(env_fns))), tuple(env_fns)))
        first += len(env_fns)
    return plans


@pytest.fixture(params=CONTEXTS, ids=[context.value for context in CONTEXTS])
def context(request: pytest.FixtureRequest) -> Context:
    chosen: Context = request.param
    return chosen


@pytest.fixture
def backend_of() -> Iterator[Callable[..., ProcessBackend]]:
    made: list[ProcessBackend] = []

    def make(context: Context = Context.FORK, **settings: object) -> ProcessBackend:
        made.append(ProcessBackend(WorkerSettings(context=context, **settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for backend in made:
        backend.close(1.5)


# ---- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.covers("X-7/several")
def test_every_worker_builds_its_envs_in_a_process_of_its_own(
    context: Context, backend_of: Callable[..., ProcessBackend]
) -> None:
    backend = backend_of(context)
    reports = backend.start(plans_of([CountingEnv] * 2, [CountingEnv]))
    assert [report.worker for report in reports] == [0, 1]
    assert [len(report.specs) for report in reports] == [2, 1]
    assert len({os.getpid(), *(report.pid for report in reports)}) == 3
    assert all(leaks.is_running(report.pid) for report in reports)
    assert reports[0].specs[0] is reports[1].specs[0]  # equal specs are one object
    backend.close(1.5)
    assert leaks.wait_until_gone([report.pid for report in reports], timeout_s=0) == []


def test_a_worker_is_not_ready_before_its_pidfd_is_here(
    backend_of: Callable[..., ProcessBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle_messages = LauncherClient.handle_messages

    def handle_messages_late(self: LauncherClient) -> None:
        if all(link.setup_result is not None for link in self._children.values()):
            handle_messages(self)

    monkeypatch.setattr(LauncherClient, "handle_messages", handle_messages_late)
    backend = backend_of()
    backend.start(plans_of([CountingEnv], [CountingEnv]))
    assert all(pidfd >= 0 for pidfd in backend.pidfds.values())


def test_constructors_that_raise_are_all_told_with_their_tracebacks(
    context: Context, backend_of: Callable[..., ProcessBackend]
) -> None:
    bad = functools.partial(RaisingEnv, "init")
    with pytest.raises(stepmill.EnvError, match="env 1 raised ValueError in construct: a deliberate failure") as caught:
        backend_of(context).start(plans_of([CountingEnv, bad], [bad, CountingEnv]))
    assert caught.value.env_id == 1
    assert "faulty.py" in caught.value.remote_traceback
    assert [getattr(other, "env_id", None) for other in caught.value.others] == [2]


def test_envs_that_were_built_are_closed_when_another_fails(
    backend_of: Callable[..., ProcessBackend], tmp_path: Path
) -> None:
    leaves = functools.partial(ClosingEnv, str(tmp_path / "closed"))
    with pytest.raises(stepmill.EnvError):
        backend_of().start(plans_of([leaves], [leaves, functools.partial(RaisingEnv, "init", error="keyboard")]))
    assert (tmp_path / "closed").read_text() == "closed\n" * 2


@pytest.mark.parametrize(("how", "told"), [("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV"), ("exit", "exit code 17")])
def test_a_worker_that_dies_while_it_builds_is_told_with_the_env_it_was_at(
    context: Context, how: str, told: str, backend_of: Callable[..., ProcessBackend]
) -> None:
    with pytest.raises(stepmill.WorkerDied, match=rf"worker 1 .*{told}.*constructing env 2") as caught:
        backend_of(context).start(plans_of([CountingEnv], [CountingEnv, functools.partial(DyingEnv, "init", how=how)]))
    assert caught.value.env_ids == (1, 2)
    assert caught.value.signal_name == (how if how.startswith("SIG") else None)
    assert caught.value.exit_code == (17 if how == "exit" else None)


def test_a_constructor_that_hangs_is_named_at_the_timeout(backend_of: Callable[..., ProcessBackend]) -> None:
    slow = functools.partial(SlowEnv, construct_s=600.0)
    backend = backend_of(start_timeout_s=10.0)
    began = time.monotonic()
    with pytest.raises(stepmill.EnvTimeout, match=r"constructing env 2 after 10 s") as caught:
        backend.start(plans_of([CountingEnv], [CountingEnv, slow]))
    assert caught.value.env_id == 2
    assert time.monotonic() - began < HANG_GUARD_S


def test_an_env_fn_that_cannot_be_loaded_is_told(backend_of: Callable[..., ProcessBackend]) -> None:
    with pytest.raises(stepmill.EnvError, match=r"env_fn of env 0 cannot be rebuilt from its pickle: .*no such luck"):
        backend_of(Context.FORKSERVER).start(plans_of([Unloadable()]))  # type: ignore[list-item]


def test_an_exception_that_cannot_be_rebuilt_is_told_as_text(
    context: Context, backend_of: Callable[..., ProcessBackend]
) -> None:
    with pytest.raises(stepmill.EnvError, match="env 1 raised RuntimeError in construct: outside") as caught:
        backend_of(context).start(plans_of([CountingEnv], [raise_two_arguments]))
    assert "TwoArgumentError: 1 and 2" in caught.value.remote_traceback


@pytest.mark.parametrize(("kind", "why"), [("exception", "missing 1 required"), ("lock", "cannot pickle")])
def test_an_env_whose_metadata_cannot_travel_is_named(
    context: Context, kind: str, why: str, backend_of: Callable[..., ProcessBackend]
) -> None:
    with pytest.raises(stepmill.EnvError, match=f"env 2 .*spaces or metadata cannot be sent.*{why}") as caught:
        backend_of(context).start(plans_of([CountingEnv], [CountingEnv, functools.partial(make_holding, kind)]))
    assert caught.value.env_id == 2


def test_a_start_that_is_interrupted_leaves_nothing(backend_of: Callable[..., ProcessBackend]) -> None:
    with interrupted_after(0.5), pytest.raises(KeyboardInterrupt):
        backend_of().start(plans_of([functools.partial(SlowEnv, construct_s=600.0)]))


# ---- what workers inherit, and what not ----------------------------------------------------------------------------------


@pytest.mark.covers("X-7/threads")
@in_contexts
def test_environment_directory_and_path_are_the_learners_at_pool(
    pool_of: Callable[..., stepmill.Pool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEPMILL_TEST", "from the learner")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    pool = pool_of([ProbeEnv], workers={"env": {"STEPMILL_MORE": "from the options"}})
    environ, directory, path = pool.call("look_around")[0]
    assert environ["STEPMILL_TEST"] == "from the learner"
    assert environ["STEPMILL_MORE"] == "from the options"
    assert environ["OMP_NUM_THREADS"] == "1"
    assert directory == str(tmp_path)
    assert path == sys.path
    assert "STEPMILL_MORE" not in os.environ


@in_contexts
def test_workers_draw_different_numbers_and_no_pool_disturbs_the_learners(
    pool_of: Callable[..., stepmill.Pool],
) -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    pool = pool_of([ProbeEnv] * 2, num_workers=2)
    draws = pool.call("draw")
    assert len({number for pair in draws for number in pair}) == 4
    assert random.random() == expected


@in_contexts
def test_workers_have_an_empty_stdin_and_ignore_ctrl_c(pool_of: Callable[..., stepmill.Pool]) -> None:
    pool = pool_of([ProbeEnv])
    assert pool.call("read_stdin") == ("",)
    os.kill(pool.call("locate")[0][0], signal.SIGINT)
    assert pool.call("is_deaf_child") == (False,)  # but programs that an env starts are not deaf to it
    pool.reset(seed=0)


def test_exit_functions_of_the_learner_stay_with_the_learner(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXIT_SCRIPT)
    done = run(script)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == ["buffered", "end-of-learner", "end-of-worker", "finalized"]


@in_contexts
def test_an_env_may_have_processes_of_its_own(pool_of: Callable[..., stepmill.Pool]) -> None:
    pool = pool_of([ProbeEnv])
    assert pool.call("ask_children") == ([1, 2],)


# ---- envs and scripts used above ----------------------------------------------------------------------------------------


class ClosingEnv(CountingEnv):
    """Writes a line when it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        with open(self._path, "a") as file:
            file.write("closed\n")


class ProbeEnv(CountingEnv):
    """Says what it finds in its process."""

    def look_around(self) -> tuple[dict[str, str], str, list[str]]:
        return dict(os.environ), os.getcwd(), sys.path

    def draw(self) -> tuple[float, float]:
        return random.random(), float(np.random.random())  # noqa: NPY002

    def read_stdin(self) -> str:
        return sys.stdin.read()

    def ask_children(self) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as children:
            return children.map(abs, [-1, -2])

    def is_deaf_child(self) -> bool:
        """Whether a program that this env starts ignores SIGINT."""
        code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
        return (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
        )


class TwoArgumentError(Exception):
    """An exception that pickles, and cannot be rebuilt from its pickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class HoldingEnv(CountingEnv):
    """Has a value in its metadata."""

    def __init__(self, value: object = None) -> None:
        super().__init__()
        self.metadata = {**self.metadata, "value": value}


def make_holding(kind: str) -> HoldingEnv:
    return HoldingEnv(TwoArgumentError(1, 2) if kind == "exception" else threading.Lock())


def raise_two_arguments() -> HoldingEnv:
    raise RuntimeError("outside") from TwoArgumentError(1, 2)


EXIT_SCRIPT = """
import atexit, os, sys, weakref
import stepmill
from stepmill.testing import CountingEnv

class Thing:
    pass

class LeavingEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        atexit.register(print, "end-of-worker")

thing = Thing()
weakref.finalize(thing, print, "finalized")
atexit.register(print, "end-of-learner")
sys.stdout.write("buffered ")
pool = stepmill.Pool([LeavingEnv], backend="process", num_workers=1, options=stepmill.PoolOptions(context="fork"))
pool.reset(seed=0)
pool.close()
"""
