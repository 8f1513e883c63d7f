"""`stepmill top`, from another process, and `stepmill.monitor`."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import time
from functools import partial

import pytest

import stepmill
from stepmill.observe.attach import AttachedPool, PoolFile, find_pools, only_pool
from stepmill.observe.monitor import Watch, render
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import UsageError
from stepmill.testing import Gate, GateEnv
from stepmill.testing.gates import GATED_ACTION
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.kills import stop_process
from tests.harness.pools import begun, counting_envs, make_pool
from tests.harness.terminals import Terminal


def run_top(*arguments):
    command = [sys.executable, "-m", "stepmill", "top", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "120", "LINES": "50"}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, env=environment, check=False)


def drawn(pool, looks=2):
    from rich.console import Console

    watch = Watch("a pool", pool.stats)
    console = Console(file=io.StringIO(), width=120, height=50)
    for _ in range(looks - 1):
        watch.look()
    console.print(render(watch.look(), console))
    return console.file.getvalue()


def test_top_lists_the_pools_of_programs_and_leaves_workers_out():
    with make_pool("forkserver", counting_envs(3)) as pool:
        done = run_top()
        pids = [worker.pid for worker in pool.stats().workers]
    lines = [line.split() for line in done.stdout.splitlines()]
    own = [line for line in lines if line[0] == str(os.getpid())]
    assert own[0][1:4] == ["3", "2", "process"]
    assert not [line for line in lines if line[0] in map(str, pids)]


def test_top_shows_a_pool_of_another_process():
    with begun(make_pool("forkserver", counting_envs(3))) as pool:
        for _ in range(10):
            pool.step([0, 0, 0])
        done = run_top(os.getpid(), "--count", 1, "--interval", 0.05)
        pids = [worker.pid for worker in pool.stats().workers]
    assert done.returncode == 0, done.stderr
    assert "3 envs, 2 workers" in done.stdout
    assert all(str(pid) in done.stdout for pid in pids)
    assert "longest steps" in done.stdout


def test_top_prints_the_counters_of_another_process_for_prometheus():
    with begun(make_pool("thread", counting_envs(2))) as pool:
        pool.step([0, 0])
        done = run_top(os.getpid(), "--prometheus")
        assert done.returncode == 0
    assert "stepmill_resets_total" in done.stdout


def test_the_counters_without_a_pid_are_those_of_the_only_program():
    with begun(make_pool("thread", counting_envs(2))):
        done = run_top("--prometheus")
    if done.returncode == 0:
        assert "stepmill_resets_total" in done.stdout
    else:  # there are other programs on this machine
        assert done.returncode == 2
        assert "give its PID" in done.stderr
        assert str(os.getpid()) in done.stderr


@pytest.mark.parametrize(("pid", "text"), [(1 << 22, "there is no process"), (os.getppid(), "has no pool")])
def test_top_says_why_there_is_nothing_to_show(pid, text):
    done = run_top(pid)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_slab_of_another_layout_is_listed_and_refused(tmp_path):
    with make_pool("serial", counting_envs(2)) as pool:
        slab: SharedSlab = pool._runtime.slab
        fd = slab.fds[0]
        (version,) = struct.unpack("<I", os.pread(fd, 4, 8))
        os.pwrite(fd, struct.pack("<I", version + 1), 8)
        try:
            found = only_pool(os.getpid())
            assert found.description is None
            with pytest.raises(UsageError, match=rf"layout {version + 1}, but this stepmill reads layout {version}"):
                AttachedPool(found)
            assert "another version" in run_top().stdout
        finally:
            os.pwrite(fd, struct.pack("<I", version), 8)


def test_an_attached_pool_reads_what_the_program_reads_and_cannot_write():
    with make_pool("forkserver", counting_envs(3)) as pool, AttachedPool(only_pool(os.getpid())) as attached:
        pool.reset(seed=0)
        pool.step([0, 0, 0])
        assert attached.stats().steps == pool.stats().steps == 3
        assert attached.is_open
        assert not attached._slab.writable()


def test_an_attached_pool_knows_that_the_program_has_closed_it():
    pool = make_pool("serial", counting_envs(2))
    with AttachedPool(only_pool(os.getpid())) as attached:
        pool.close()
        assert not attached.is_open
        assert attached.stats().num_envs == 2
    with pytest.raises(UsageError, match="has no pool"):
        only_pool(os.getpid())


def test_a_pool_that_was_closed_after_it_was_found_is_refused():
    with make_pool("serial", counting_envs(2)):
        found = only_pool(os.getpid())
    gone = PoolFile(found.pid, found.path.with_name("99999"), found.inode, found.layout_version, found.description)
    with pytest.raises(UsageError, match="was closed"):
        AttachedPool(gone)


def test_a_stopped_worker_and_a_dead_worker_are_named():
    with begun(make_pool("forkserver", counting_envs(6), num_workers=3)) as pool:
        stopped, killed = pool.stats().workers[0].pid, pool.stats().workers[2].pid
        stop_process(stopped)
        try:
            os.kill(killed, signal.SIGKILL)
            while not pool.stats().workers[2].is_dead:
                os.sched_yield()
            text = drawn(pool)
        finally:
            os.kill(stopped, signal.SIGCONT)
    lines = {line.split()[1]: line for line in text.splitlines() if len(line.split()) > 2}
    assert "stopped" in lines["0"]
    assert "dead" in lines["2"]
    assert "dead" not in lines["1"]


def test_an_env_that_does_not_return_is_named_with_its_time(monkeypatch):
    with Gate() as gate, begun(make_pool("forkserver", [partial(GateEnv, gate.path, i) for i in range(4)])) as pool:
        pool.send([0, 0, 0, GATED_ACTION])
        gate.wait_arrivals(1)
        pool.recv(3)
        while pool.stats().workers[0].current is not None:
            os.sched_yield()
        watch = Watch("a pool", pool.stats)
        began_s = time.monotonic()
        monkeypatch.setattr("stepmill.observe.monitor.time.monotonic", lambda: began_s + 60)
        view = watch.look()
        monkeypatch.undo()
        assert view.total.workers[1].current == 3
        assert view.busy_for_s[1] > 50
        assert view.busy_for_s[0] == 0
        gate.open()
        pool.recv(1)


def test_many_workers_are_cut_to_the_height_and_those_with_remarks_stay():
    with begun(make_pool("thread", counting_envs(40), num_workers=40)) as pool:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, height=20)
        console.print(render(Watch("a pool", pool.stats).look(), console))
    assert "more workers" in console.file.getvalue()
    assert len(console.file.getvalue().splitlines()) < 20


def test_the_monitor_draws_while_the_pool_steps_and_ends_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with begun(make_pool("forkserver", counting_envs(3))) as pool:
        with stepmill.monitor(pool, 0.01, file=file):
            until = time.monotonic() + HANG_GUARD_S
            while "steps/s" not in file.getvalue():
                pool.step([0, 0, 0])
                assert time.monotonic() < until, "the monitor drew nothing"
        monitor = stepmill.monitor(pool, 0.01, file=file)
    monitor.close()
    monitor.close()
    assert "3 envs, 2 workers" in file.getvalue()


def test_a_monitor_without_an_interval_is_refused():
    with make_pool("serial", counting_envs(2)) as pool, pytest.raises(stepmill.UsageError, match="interval_s"):
        stepmill.monitor(pool, 0)


def test_a_program_of_several_lines_is_listed_on_one():
    program = (
        "import stepmill\nfrom stepmill.testing import CountingEnv\nwith stepmill.Pool([CountingEnv]):\n    input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True) as process:
        until_s = time.monotonic() + HANG_GUARD_S
        while not (found := find_pools(process.pid)):
            assert time.monotonic() < until_s
        assert "import stepmill from" in found[0].command
        process.communicate("\n")
