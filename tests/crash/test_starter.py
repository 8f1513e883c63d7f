"""The starter: one process per program, which starts the launchers of all pools. What it must not keep, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stepmill
from stepmill.backends.process import ProcessBackend
from stepmill.backends.starter_client import STARTERS, ProgramInputs
from stepmill.testing.envs import CountingEnv
from stepmill.worker.channel import Channel
from stepmill.worker.launcher import Starter
from stepmill.worker.process_setup import run_and_exit
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.kills import kill_process, stop_process
from tests.harness.pools import keep_closed

PoolOf = Callable[..., stepmill.Pool]


class ProbeEnv(CountingEnv):
    """Says what its process has inherited."""

    def read(self, what: str) -> object:
        found: object = PROBES[what]()
        return found

    def print_line(self, line: str) -> None:
        print(line, flush=True)


def read_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


PROBES: dict[str, Callable[[], object]] = {
    "variable": lambda: os.environ.get("STEPMILL_TEST"),
    "test": lambda: os.environ.get("PYTEST_CURRENT_TEST"),
    "directory": os.getcwd,
    "path": lambda: list(sys.path),
    "arguments": lambda: list(sys.argv),
    "umask": read_umask,
    "cores": lambda: os.sched_getaffinity(0),
    "limit": lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    "priority": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "ignored": lambda: signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN,
}


@pytest.fixture
def pool_of() -> Iterator[PoolOf]:
    yield from keep_closed(
        lambda context="forkserver", num_envs=1, **options: stepmill.Pool(
            [ProbeEnv] * num_envs, backend="process", context=context, **options
        )
    )


def starter_pid() -> int:
    pid = leaks.starter_pid()
    assert pid is not None
    return pid


def launcher_pid(pool: stepmill.Pool) -> int:
    backend = pool._runtime.backend
    assert isinstance(backend, ProcessBackend)
    return backend._launcher.pid


# ---- one per program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_all_pools_of_a_program_have_one_starter_and_a_launcher_each(context: str, pool_of: PoolOf) -> None:
    first = pool_of(context)
    pid = starter_pid()
    second = pool_of(context)
    first.close()
    third = pool_of(context)
    assert starter_pid() == pid
    assert launcher_pid(second) != launcher_pid(third)
    assert {launcher_pid(second), launcher_pid(third)} <= set(leaks.descendants(pid))
    assert third.call("add", 1) == (1,)


def change_limit(patch: pytest.MonkeyPatch, path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    "variable": lambda patch, _: patch.setenv("STEPMILL_TEST", "changed"),
    "directory": lambda patch, path: patch.chdir(path),
    "path": lambda patch, path: patch.syspath_prepend(path),
    "arguments": lambda patch, _: patch.setattr(sys, "argv", ["another", "program"]),
    "umask": lambda *_: os.umask(read_umask() ^ 0o040),
    "cores": lambda *_: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "limit": change_limit,
    "priority": lambda *_: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1),
    "ignored": lambda *_: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_starter_serves_no_pool_of_a_program_that_has_changed(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_a_program_of_its_own() -> None:
        before, found = ProgramInputs.read(os.environ), PROBES[what]()
        CHANGES[what](monkeypatch, tmp_path)
        assert PROBES[what]() != found
        assert ProgramInputs.read(os.environ) != before

    run_forked(in_a_program_of_its_own)


def test_workers_have_the_state_of_the_program_when_their_pool_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_a_program_of_its_own() -> None:
        def read(pool: stepmill.Pool) -> dict[str, object]:
            return {what: pool.call("read", what)[0] for what in CHANGES}

        with stepmill.Pool([ProbeEnv], backend="process", context="forkserver") as pool:
            before = read(pool)
            for change in CHANGES.values():
                change(monkeypatch, tmp_path)
            with stepmill.Pool([ProbeEnv], backend="process", context="forkserver") as changed:
                assert read(changed) == {what: PROBES[what]() for what in CHANGES}
            assert read(pool) == before

    run_forked(in_a_program_of_its_own)


def run_forked(function: Callable[[], None]) -> None:
    """Run a function in a forked child, which may change what it likes."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            STARTERS.close()
            code = 0
        except BaseException as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_variable_of_pytest_reaches_workers_without_a_new_starter(
    pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool_of()
    pid = starter_pid()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert pool_of().call("read", "test") == ("another",)
    assert starter_pid() == pid


def test_a_replaced_starter_ends_with_its_last_launcher(pool_of: PoolOf, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pool_of(), pool_of()
    old = starter_pid()
    monkeypatch.setenv("STEPMILL_TEST", "changed")
    third = pool_of()
    assert starter_pid() != old
    first.close()
    assert leaks.is_running(old)
    assert second.call("add", 1) == (1,)
    second.close()
    assert not leaks.is_running(old)
    assert third.call("read", "variable") == ("changed",)


def test_envs_print_to_the_files_of_the_program_when_their_pool_is_made(pool_of: PoolOf) -> None:
    pool_of()  # so that there is a starter
    read_end, write_end = os.pipe()
    saved = os.dup(1)
    os.dup2(write_end, 1)
    os.close(write_end)
    try:
        pool = pool_of()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    pool.call("print_line", "from an env")
    pool.close()
    with open(read_end) as pipe:
        assert pipe.read() == "from an env\n"  # to its end: the starter does not hold the pipe open


def test_pools_may_be_made_by_several_threads(pool_of: PoolOf) -> None:
    with ThreadPoolExecutor(4) as threads:
        pools = list(threads.map(lambda number: pool_of(workers={"env": {"STEPMILL_TEST": str(number % 2)}}), range(4)))
    assert [pool.call("read", "variable") for pool in pools] == [("0",), ("1",), ("0",), ("1",)]


# ---- its end -------------------------------------------------------------------------------------------------------------


@pytest.mark.orphans
def test_pools_outlive_a_killed_starter_and_the_next_pool_has_a_new_one(pool_of: PoolOf) -> None:
    pool = pool_of(num_envs=2, on_fault="truncate")
    old = starter_pid()
    kill_process(old)
    kill_process(pool.call("locate")[0][0])
    pool.reset(seed=0)
    pool.step([0, 0])  # a launcher needs no starter to restart a worker
    assert pool_of().call("add", 1) == (1,)
    assert starter_pid() != old
    pool.close()


@pytest.mark.orphans
def test_a_new_launcher_needs_no_old_starter(pool_of: PoolOf) -> None:
    pool = pool_of(on_fault="truncate")
    kill_process(starter_pid())
    kill_process(launcher_pid(pool))
    pool._runtime.backend.revive(0)
    assert pool.call("add", 1) == (1,)


@pytest.mark.orphans
def test_a_starter_that_does_not_answer_is_a_timeout_and_is_replaced(pool_of: PoolOf) -> None:
    pool_of()
    old = starter_pid()
    stop_process(old)
    with pytest.raises(
        stepmill.EnvTimeout, match=r"worker 0 was still constructing the first of envs \[0\] after 0\.1 s"
    ):
        pool_of(start={"timeout_s": 0.1})
    assert pool_of().call("add", 1) == (1,)
    assert starter_pid() != old


def test_a_starter_that_cannot_run_is_an_error(pool_of: PoolOf) -> None:
    with pytest.raises(stepmill.LauncherDied, match="process that starts launchers ended with exit code"):
        pool_of(workers={"env": {"PYTHONHOME": "/nowhere"}})
    assert pool_of().call("add", 1) == (1,)


def test_ctrl_c_in_the_terminal_leaves_the_starter_alive(pool_of: PoolOf) -> None:
    pool_of()
    pid = starter_pid()
    os.kill(pid, signal.SIGINT)
    pool_of()
    assert starter_pid() == pid


def test_a_forked_child_has_a_starter_of_its_own(pool_of: PoolOf) -> None:
    pool = pool_of()
    pid = starter_pid()

    def make_one() -> None:
        assert STARTERS.current is None
        with stepmill.Pool([CountingEnv], backend="process", context="forkserver") as own:
            assert own.call("add", 1) == (1,)
            assert starter_pid() != pid

    run_forked(make_one)
    assert starter_pid() == pid
    assert leaks.is_running(pid)
    assert pool.call("add", 1) == (1,)
    assert pool_of().call("add", 1) == (1,)


def make_and_close_a_pool() -> None:
    with stepmill.Pool([CountingEnv], backend="process", context="forkserver") as pool:
        pool.call("add", 1)


def test_a_child_of_multiprocessing_ends_its_starter() -> None:
    child = multiprocessing.get_context("fork").Process(target=make_and_close_a_pool)
    child.start()
    child.join()
    assert child.exitcode == 0
    child.close()
    assert leaks.descendants() == []  # not even a zombie


SCRIPT = """
import os, sys
import stepmill
from stepmill.backends.starter_client import STARTERS
from stepmill.testing.envs import CountingEnv

pool = stepmill.Pool([CountingEnv], backend="process", context="forkserver")
if {closes}:
    pool.close()
print(STARTERS.current.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.orphans
@pytest.mark.parametrize(
    ("ending", "closes"),
    [
        ("return", True),
        pytest.param("return", False, marks=pytest.mark.slow),
        ("SIGKILL", False),
        ("SIGINT", True),
        pytest.param("SIGKILL", True, marks=pytest.mark.slow),
        pytest.param("SIGINT", False, marks=pytest.mark.slow),
    ],
)
def test_the_starter_ends_with_its_program(ending: str, closes: bool) -> None:
    command = [sys.executable, "-c", SCRIPT.format(closes=closes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        pid = int(program.stdout.readline())
        if ending == "return":
            program.stdin.close()
        else:
            program.send_signal(getattr(signal, ending))
        program.wait(HANG_GUARD_S)
        if ending == "return":
            assert leaks.wait_until_gone([pid], timeout_s=0) == []
            assert program.stderr.read() == b""
        else:
            assert leaks.wait_until_gone([pid], timeout_s=HANG_GUARD_S) == []


def test_a_starter_without_launchers_ends_after_a_while() -> None:
    channel, peer = Channel.pair()
    child = os.fork()
    if child == 0:
        channel.close_local_copy()
        learner = os.pidfd_open(os.getppid())
        run_and_exit(Starter(Channel(peer, use_thread=False), learner, idle_s=0.01).serve)
    peer.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    channel.close()
