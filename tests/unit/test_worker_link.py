"""The learner's end of a worker process, used by several threads."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from stepmill.backends import process_link
from stepmill.backends.base import Future
from stepmill.backends.worker_link import WorkerLink
from stepmill.worker.messages import Request, RequestKind, WorkerPlan
from tests.harness.hangs import HANG_GUARD_S


def test_a_request_is_posted_while_another_thread_waits_for_replies(monkeypatch):
    waits, posted = threading.Event(), threading.Event()

    def wait_until_posted(wanted, deadline):
        waits.set()
        posted.wait(HANG_GUARD_S)
        return set()

    monkeypatch.setattr(process_link, "wait_ready", wait_until_posted)
    link = WorkerLink(WorkerPlan(0, (0,), ()), SimpleNamespace(begin=lambda *_: None))
    request = Request(1, RequestKind.GET_ATTR, (0,), (0,), "name")
    rung = []
    with ThreadPoolExecutor(2) as threads, contextlib.closing(link):
        waiting = threads.submit(link.wait, None)
        assert waits.wait(HANG_GUARD_S)
        posting = threads.submit(link.post, request, Future(request, 0, None, lambda *_: None), rung.append)
        try:
            assert posting.result(HANG_GUARD_S / 6)
            assert not waiting.done()
        finally:
            posted.set()
        waiting.result(HANG_GUARD_S)
    assert rung == [0]
