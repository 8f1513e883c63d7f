"""The learner's end of a process that starts others, and of a worker, which several threads use."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from stepmill._native import OwnedFd
from stepmill.backends import process_link
from stepmill.backends.base import Future
from stepmill.backends.process_link import ProcessLink, ServerLink, WorkerLink
from stepmill.worker.channel import NO_FD, Channel
from stepmill.worker.messages import Exited, Launched, Request, RequestKind, WorkerPlan, dump
from tests.harness.hangs import HANG_GUARD_S


def test_a_launcher_that_does_not_answer_is_waited_for_once_and_not_for_each_dead_worker(monkeypatch):
    now_s, num_waits = 0.0, 0

    def wait_until(deadline):
        nonlocal now_s, num_waits
        num_waits += 1
        now_s = deadline

    monkeypatch.setattr(process_link, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(process_link, "wait_ready", lambda wanted, deadline: wait_until(deadline))
    with contextlib.closing(ServerLink()) as launcher, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(ProcessLink())) for _ in range(4)]
        launcher_end = stack.enter_context(contextlib.closing(Channel(launcher.peer)))
        for worker in workers:
            launcher.request(worker)

        assert [launcher.wait_exit(worker, 0.2) for worker in workers] == [None] * 4
        assert num_waits == 1

        workers[1].mark_launch_failed("there is no process, and no report")
        launcher_end.send(dump(Exited(0, -signal.SIGKILL)))
        codes = [launcher.wait_exit(worker, 0.2) for worker in workers]
        assert codes == [-signal.SIGKILL, None, None, None]  # workers[2] is waited for
        assert num_waits == 2


def test_no_other_thread_takes_the_report_for_which_one_waits(monkeypatch):
    can_others_read = []

    def try_to_read():
        is_free = launcher._lock.acquire(blocking=False)
        if is_free:
            launcher._lock.release()
        return is_free

    def wait_until_reported(wanted, deadline):
        can_others_read.append(other.submit(try_to_read).result())
        launcher_end.send(dump(Exited(0, 3)))

    monkeypatch.setattr(process_link, "wait_ready", wait_until_reported)
    with (
        contextlib.closing(ServerLink()) as launcher,
        contextlib.closing(ProcessLink()) as worker,
        contextlib.closing(Channel(launcher.peer)) as launcher_end,
        ThreadPoolExecutor(1) as other,
    ):
        launcher.request(worker)
        assert launcher.wait_exit(worker, 60.0) == 3
    assert can_others_read == [False]


def test_a_late_report_of_a_worker_that_could_not_be_restarted_is_not_that_of_its_successor():
    with (
        contextlib.closing(ServerLink()) as launcher,
        contextlib.closing(ProcessLink()) as first,
        contextlib.closing(ProcessLink()) as second,
        contextlib.closing(Channel(launcher.peer)) as launcher_end,
        contextlib.closing(OwnedFd.pidfd(os.getpid())) as process,
    ):
        numbers = [launcher.request(link, worker=1) for link in (first, second)]
        first.close()
        launcher_end.send(dump(Launched(numbers[0], 1)), [process.fileno()])
        launcher_end.send(dump(Exited(numbers[0], 3)))
        launcher.handle_messages()
        assert (second.pid, second.pidfd, second.exit_code) == (0, NO_FD, None)
        assert first.pidfd == NO_FD

        launcher_end.send(dump(Launched(numbers[1], 2)), [process.fileno()])
        launcher.handle_messages()
        assert second.pid == 2


def test_a_request_is_posted_while_another_thread_waits_for_replies(monkeypatch):
    waits, posted = threading.Event(), threading.Event()

    def wait_until_posted(wanted, deadline):
        waits.set()
        posted.wait(HANG_GUARD_S)
        return set()

    monkeypatch.setattr(process_link, "wait_ready", wait_until_posted)
    link = WorkerLink(WorkerPlan(0, (0,), ()), SimpleNamespace(fd=NO_FD, begin=lambda *_: None))
    request = Request(1, RequestKind.GET_ATTR, (0,), (0,), "name")
    rung = []
    with ThreadPoolExecutor(2) as threads, contextlib.closing(link):
        waiting = threads.submit(link.wait_until, posted.is_set, math.inf)
        assert waits.wait(HANG_GUARD_S)
        posting = threads.submit(link.post, request, Future(request, 0, None, lambda *_: None), rung.append)
        try:
            assert posting.result(HANG_GUARD_S / 6)
            assert not waiting.done()
        finally:
            posted.set()
        waiting.result(HANG_GUARD_S)
    assert rung == [0]
