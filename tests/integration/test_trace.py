"""Traces of pools: `stepmill.trace` and `stepmill trace`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

import stepmill
from stepmill.observe.trace import LEARNER, TraceKind, commands
from stepmill.pool.port import PoolPort
from stepmill.slab.counters import TraceReader
from stepmill.testing import SlowEnv
from tests.harness.commands import run_command
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs, kill_worker, make_pool

STEP_S = 0.002


def slow_pool(where="forkserver", num_envs=4, **options):
    return make_pool(where, [partial(SlowEnv, i, 3, step_s=STEP_S) for i in range(num_envs)], **options)


def read_trace(path):
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("where", ["serial", "thread", "forkserver"])
def test_every_step_and_reset_is_on_the_track_of_its_worker(where, tmp_path):
    with begun(slow_pool(where)) as pool:
        with stepmill.trace(pool, tmp_path / "t.json") as recorder:
            for _ in range(8):
                pool.step([0] * 4)
        worker_of = PoolPort(pool).worker_of
    slices = [event for event in read_trace(tmp_path / "t.json") if event["ph"] == "X"]
    ran = [event for event in slices if event["cat"] in ("step", "reset")]
    assert len(ran) == 8 * 4
    assert sum(event["cat"] == "reset" for event in ran) == 2 * 4  # episodes of three steps, and the reset after them
    assert all(event["tid"] == 1 + worker_of[event["args"]["env"]] for event in ran)
    assert all(event["dur"] >= STEP_S * 1e6 for event in ran if event["cat"] == "step")
    assert {event["cat"] for event in slices if event["tid"] == LEARNER} >= {"send", "wait", "gather"}
    assert recorder.events.num_lost == 0
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)


def test_arrows_lead_from_send_to_the_step_and_to_recv(tmp_path):
    with slow_pool(batch_size=2) as pool:
        pool.reset_async(seed=0)
        with stepmill.trace(pool, tmp_path / "t.json") as recorder:
            for _ in range(20):
                batch = pool.recv()
                pool.send([0, 0], batch.env_id)
            pool.recv(4)
    found = list(commands(recorder.events))
    assert len(found) >= 40  # the resets were sent before
    for command in found:
        assert command.sent_ns <= command.begin_ns <= command.end_ns <= command.received_ns
    events = read_trace(tmp_path / "t.json")
    slices = [event for event in events if event["ph"] == "X"]
    for phase, names in (("s", {"send"}), ("t", {"step", "reset"}), ("f", {"gather"})):
        arrows = [event for event in events if event["ph"] == phase]
        assert len(arrows) == len(found)
        for arrow in arrows:  # Perfetto draws an arrow only between slices
            around = [
                each["cat"]
                for each in slices
                if each["tid"] == arrow["tid"] and each["ts"] <= arrow["ts"] <= each["ts"] + each["dur"]
            ]
            assert names & set(around)


def test_deaths_restarts_and_faults_are_marked():
    with begun(slow_pool(on_fault="truncate")) as pool, stepmill.trace(pool) as recorder:
        kill_worker(pool, 1)
        while not pool.stats().workers[1].restarts:
            pool.step([0] * 4)
    texts = [text for _, _, text in recorder.events.moments]
    assert "worker 1 died" in texts
    assert "worker 1 was restarted" in texts


def test_a_trace_ends_after_its_seconds_while_the_pool_goes_on():
    with begun(slow_pool()) as pool:
        recorder = stepmill.trace(pool, seconds=0.05)
        while not recorder.is_done:
            pool.step([0] * 4)
        for _ in range(5):
            pool.step([0] * 4)
        events = recorder.wait()
    assert events.num_events > 0
    assert max(int(events.threads[1]["end_ns"].max()), 0) <= events.ended_ns


def test_the_memory_of_a_trace_is_limited():
    with begun(make_pool("serial", counting_envs(4))) as pool:
        recorder = stepmill.trace(pool, max_events=1000)
        while not recorder.is_done:
            pool.step([0] * 4)
        events = recorder.close()
    assert events.is_full
    # What the rings hold is added twice: when the limit is found to be reached, which may be late, and at the end.
    assert events.num_events < 1000 + 2 * (4096 + 16384)


def test_events_that_were_written_over_are_counted_as_lost():
    with begun(make_pool("serial", counting_envs(4))) as pool:
        slab = pool._runtime.slab
        reader = TraceReader(slab.description)
        with slab.view() as memory:
            reader.read_new(memory)
        slab.native.set_tracing(True)
        for _ in range(2000):
            pool.step([0] * 4)
        slab.native.set_tracing(False)
        with slab.view() as memory:
            taken = reader.read_new(memory)
    assert len(taken[1]) == 4095
    assert reader.num_lost > 2000 * 4 - 4096
    steps = taken[1][taken[1]["kind"] <= TraceKind.RESET]
    assert (steps["end_ns"][1:] >= steps["end_ns"][:-1]).all()


def test_nothing_is_recorded_without_a_trace():
    with begun(slow_pool()) as pool:
        with stepmill.trace(pool):
            pool.step([0] * 4)
        slab = pool._runtime.slab
        reader = TraceReader(slab.description)
        with slab.view() as memory:
            reader.read_new(memory)
        pool.step([0] * 4)
        with slab.view() as memory:
            assert [len(events) for events in reader.read_new(memory)] == [0, 0, 0]


def test_a_pool_that_is_closed_ends_its_trace(tmp_path):
    pool = begun(slow_pool())
    recorder = stepmill.trace(pool, tmp_path / "t.json")
    pool.step([0] * 4)
    pool.close()
    recorder.wait()
    assert (tmp_path / "t.json").exists()


def test_events_before_an_exception_of_the_thread_are_kept_and_the_exception_is_raised(tmp_path, monkeypatch):
    is_broken = threading.Event()
    read_new = TraceReader.read_new

    def read(reader, memory):
        if is_broken.is_set():
            raise ZeroDivisionError("no more")
        return read_new(reader, memory)

    monkeypatch.setattr(TraceReader, "read_new", read)
    with begun(make_pool("serial", counting_envs(2))) as pool:
        recorder = stepmill.trace(pool, tmp_path / "t.json", max_events=10**6)
        while not recorder._num_events:
            pool.step([0, 0])
        is_broken.set()
        with pytest.raises(stepmill.StepmillError, match=r"the trace ended after \d+ events: ZeroDivisionError"):
            recorder.wait()
        assert recorder.close().num_events
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"][5:]
        is_broken.clear()
        with stepmill.trace(pool) as again:
            pool.step([0, 0])
        assert again.events.num_events


def test_a_pool_has_one_trace_at_a_time():
    with begun(make_pool("serial", counting_envs(2))) as pool:
        with stepmill.trace(pool), pytest.raises(stepmill.UsageError, match="another trace"):
            stepmill.trace(pool)
        with stepmill.trace(pool) as recorder:
            pool.step([0, 0])
        assert recorder.events.num_events


@pytest.mark.parametrize("arguments", [{"seconds": 0}, {"seconds": -1}, {"max_events": 0}])
def test_a_trace_of_nothing_is_refused(arguments):
    with make_pool("serial", counting_envs(2)) as pool, pytest.raises(stepmill.UsageError):
        stepmill.trace(pool, **arguments)


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    with make_pool("serial", counting_envs(2)) as pool:
        recorder = stepmill.trace(pool, tmp_path / "no" / "t.json")
        with pytest.raises(stepmill.UsageError, match="cannot write the trace"):
            recorder.close()


def run_trace(*arguments, cwd):
    return run_command("trace", *arguments, cwd=cwd)


def test_the_command_records_an_env(tmp_path):
    done = run_trace("CartPole-v1", "--num-envs", "4", "--num-workers", "2", "--seconds", "0.1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ui.perfetto.dev" in done.stdout
    names = [event["args"]["name"] for event in read_trace(tmp_path / "trace.json") if event["name"] == "thread_name"]
    assert names == ["learner", "worker 0", "worker 1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["CartPole-v1", "--seconds", "0.01", "-o", "no/t.json"], "cannot write the trace to 'no/t.json'"),
        (["NoSuchEnv-v0"], "unknown env id"),
        (["CartPole-v1", "--batch-size", "9"], "--batch-size 9 is larger"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, text, tmp_path):
    done = run_trace(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr


def test_ctrl_c_ends_the_command_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "stepmill", "trace", "CartPole-v1", "--seconds", "600"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        from stepmill.observe.attach import find_pools

        while not find_pools(running.pid):
            os.sched_yield()
        running.send_signal(signal.SIGINT)
        assert running.wait(HANG_GUARD_S) == 130
    assert not (tmp_path / "trace.json").exists()
