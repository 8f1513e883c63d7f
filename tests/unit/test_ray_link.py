"""The pool's connection to a node, without Ray and without a node: which thread may do what, and in which order."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from stepmill.backends.base import Future
from stepmill.backends.ray.node_link import NodeLink, NodeState
from stepmill.worker.messages import Request, RequestKind
from tests.harness.hangs import HANG_GUARD_S

PATIENT_S = 1e9


class Actor:
    """Accepts all calls, and answers none."""

    def __getattr__(self, name):
        return self

    def options(self, **_):
        return self

    def remote(self, *_):
        return self

    def future(self):
        return self

    def add_done_callback(self, _):
        pass


class Relay:
    """Has new commands, numbered, whenever it is asked."""

    def __init__(self):
        self.number = 0

    def collect_commands(self):
        self.number += 1
        return np.array([self.number, 0, 0], np.uint32).view(np.uint8)

    def has_outstanding(self):
        return False

    def is_published(self, *_):
        return False

    def mark_serving(self, _):
        pass


class Stream:
    """Keeps what is sent."""

    heard_at = 0.0

    def __init__(self):
        self.sent, self.num_breaks = [], 0

    def send(self, header, array):
        self.sent.append((int(array.view(np.uint32)[0]), header.call is not None))

    def shut_down(self):
        self.num_breaks += 1


@pytest.fixture
def link():
    posted = []
    killed = []
    ray = SimpleNamespace(kill=lambda actor, no_restart: killed.append(actor))
    made = NodeLink(ray, Actor(), 0, {0: [0]}, posted.append)
    made.posted, made.killed = posted, killed
    made.relay, made.stream, made.state = Relay(), Stream(), NodeState.SERVING
    return made


def call(link):
    request = Request(1, RequestKind.GET_ATTR, (0,), (0,), b"")
    future = Future(request, 0, None, lambda *_: None)
    link.call(1, {0: request}, {0: future})
    return future


def test_commands_that_a_call_collects_are_sent_before_later_ones(link):
    call(link)  # in the thread that gives the commands, or in one that restarts a worker
    link.advance(PATIENT_S, PATIENT_S)  # in the backend's thread, before it has heard of the call
    while link.posted:
        link.posted.pop(0)()
    link.advance(PATIENT_S, PATIENT_S)
    assert [number for number, _ in link.stream.sent] == sorted(number for number, _ in link.stream.sent)
    assert link.stream.sent[0] == (1, True)


def test_a_node_is_given_up_while_its_connection_is_closed_by_another_thread(link):
    """The connection is there when it is tested, and gone when it is used."""
    stream = link.stream

    class Closing(NodeLink):
        @property
        def stream(self):
            return self.streams.pop() if self.streams else None

    del link.stream
    link.streams = [stream]
    link.__class__ = Closing
    future = call(link)
    link.mark_lost("was given up")
    assert stream.num_breaks == 1
    assert len(link.killed) == 1
    assert future.has_failed


def test_a_node_is_pinged_from_the_first_moment_on_and_not_only_after_a_while(link):
    link.advance(0.0, PATIENT_S)
    assert link._has_ping


def test_a_signal_handler_that_gives_up_a_node_inside_of_a_call_does_not_wait(link):
    collect = link.relay.collect_commands

    def interrupted():
        link.mark_lost("was closed")  # as a handler of Ctrl-C that closes the pool
        return collect()

    link.relay.collect_commands = interrupted
    thread = threading.Thread(target=call, args=[link], daemon=True)
    thread.start()
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()
