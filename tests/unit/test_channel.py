"""Channel: frames, descriptors, backlog, deaths. Two ends in one process; real sockets."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from stepmill import _native
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.process_setup import fork
from tests.harness.hangs import HANG_GUARD_S

BIG = 30_000_000  # bytes, far beyond what a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, sock = Channel.pair()
    theirs = Channel(sock)
    yield ours, theirs
    ours.close()
    theirs.close()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def receive(channel: Channel) -> bytes:
    frame = channel.receive(soon())
    return bytes(frame.data)


def test_frames_keep_their_order_and_their_borders(ends: tuple[Channel, Channel]) -> None:
    frames = [os.urandom(size) for size in (3, 0, 100_000, 1, 1_000_000, 11, 0, 12, 13, 4096, 7)]
    for frame in frames:
        ends[0].send(frame)
    assert frames == [receive(ends[1]) for _ in frames]


def test_both_ends_send_much_at_once_and_neither_waits(ends: tuple[Channel, Channel]) -> None:
    first, second = bytes(BIG), b"\1" * BIG
    began = time.monotonic()
    ends[0].send(first)
    ends[1].send(second)
    assert time.monotonic() - began < HANG_GUARD_S
    assert receive(ends[1]) == first
    assert receive(ends[0]) == second


def test_a_frame_behind_a_large_one_follows_it(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(bytes(BIG))
    ends[0].send(b"small")
    assert len(receive(ends[1])) == BIG
    assert receive(ends[1]) == b"small"


def test_the_thread_of_a_backlog_ends_with_it(ends: tuple[Channel, Channel]) -> None:
    num_threads = threading.active_count()
    ends[0].send(bytes(BIG))
    assert ends[0].has_backlog
    receive(ends[1])
    assert ends[0].flush(HANG_GUARD_S)
    for thread in threading.enumerate():
        if thread.name == "stepmill-channel":
            thread.join(HANG_GUARD_S)
    assert threading.active_count() == num_threads


def test_without_a_thread_the_owner_pushes() -> None:
    sender, sock = Channel.pair()
    quiet = Channel(sock, use_thread=False)
    num_threads = threading.active_count()
    quiet.send(bytes(BIG))
    assert threading.active_count() == num_threads
    frame = None
    while frame is None:
        quiet.push()
        frame = sender.poll_frame()
    assert len(frame.data) == BIG
    sender.close()
    quiet.close()


def test_descriptors_arrive_with_their_frame_and_are_private(ends: tuple[Channel, Channel]) -> None:
    read_end, write_end = os.pipe()
    ends[0].send(b"none")
    ends[0].send(b"one", [write_end])
    os.close(write_end)
    assert receive(ends[1]) == b"none"
    frame = ends[1].receive(soon())
    assert len(frame.fds) == 1
    assert not os.get_inheritable(frame.fds[0].fileno())
    os.write(frame.fds[0].fileno(), b"!")
    assert os.read(read_end, 1) == b"!"
    os.close(read_end)


def test_more_descriptors_than_one_system_call_takes(ends: tuple[Channel, Channel]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    ends[0].send(b"many", [null] * 300)
    frame = ends[1].receive(soon())
    assert len(frame.fds) == 300
    os.close(null)


def test_no_duplicate_is_left_when_one_descriptor_of_a_message_cannot_be_duplicated(
    ends: tuple[Channel, Channel],
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        ends[0].send(b"never sent", [ends[0].fd, ends[0].fd, 1_000_000])
    assert len(os.listdir("/proc/self/fd")) == before
    ends[0].send(b"next")
    assert receive(ends[1]) == b"next"


def test_a_message_whose_descriptors_find_no_room_arrives_without_any(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(b"two", [ends[0].fd] * 2)
    ends[0].send(b"next")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        frame = ends[1].poll_frame()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (bytes(frame.data), frame.fds) == (b"two", ())
    assert len(os.listdir("/proc/self/fd")) == before
    assert receive(ends[1]) == b"next"


def test_descriptors_behind_a_backlog_may_be_closed_at_once(ends: tuple[Channel, Channel]) -> None:
    read_end, write_end = os.pipe()
    ends[0].send(bytes(BIG))
    ends[0].send(b"late", [write_end])
    os.close(write_end)
    receive(ends[1])
    frame = ends[1].receive(soon())
    os.write(frame.fds[0].fileno(), b"!")
    assert os.read(read_end, 1) == b"!"
    os.close(read_end)


def test_waiting_ends_at_the_deadline_and_loses_nothing(ends: tuple[Channel, Channel]) -> None:
    assert ends[1].receive(soon(0.05)) is None
    assert ends[1].poll_frame() is None
    ends[0].send(b"after all")
    assert receive(ends[1]) == b"after all"


def test_what_was_sent_before_the_end_is_received_before_the_end(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(b"last words")
    ends[0].close()
    assert receive(ends[1]) == b"last words"
    with pytest.raises(ChannelClosed):
        ends[1].receive(soon())


def test_sending_to_an_end_that_is_closed_raises(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosed):
        ends[0].send(b"anyone?")


def test_half_a_frame_is_no_frame(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(bytes(BIG))
    assert ends[1].poll_frame() is None
    ends[0].close()
    with pytest.raises(ChannelClosed):
        ends[1].receive(soon())


def test_shutting_wakes_who_waits_elsewhere(ends: tuple[Channel, Channel]) -> None:
    outcome: list[str] = []

    def wait() -> None:
        try:
            ends[0].receive(None)
        except ChannelClosed:
            outcome.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    ends[0].shut()
    thread.join(HANG_GUARD_S)
    assert outcome == ["closed"]


def test_the_death_of_the_peer_is_seen_though_another_process_holds_its_end() -> None:
    ours, theirs = Channel.pair()
    gate_read, gate_write = os.pipe()

    def hold() -> None:  # a copy of the peer's end, for as long as the gate is shut
        os.close(gate_write)
        os.read(gate_read, 1)

    holder, peer = fork(hold), fork(signal.pause)
    peer_fd = _native.OwnedFd.pidfd(peer)
    theirs.close()
    os.kill(peer, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        ours.receive(soon(), peer_fd=peer_fd.fileno())
    os.close(gate_read)
    os.close(gate_write)
    ours.close()
    for pid in (holder, peer):
        os.waitpid(pid, 0)


def test_closing_frees_descriptors_that_nobody_took(ends: tuple[Channel, Channel]) -> None:
    read_end, write_end = os.pipe()
    ends[0].send(bytes(BIG))
    ends[0].send(b"never received", [write_end])
    os.close(write_end)
    ends[0].close()
    ends[1].close()
    assert os.read(read_end, 1) == b""  # nobody holds the other end any more
    os.close(read_end)


def test_closing_twice_is_closing_once(ends: tuple[Channel, Channel]) -> None:
    ends[0].close()
    ends[0].close()
    with pytest.raises(ChannelClosed):
        ends[0].send(b"")
    with pytest.raises(ChannelClosed):
        ends[0].poll_frame()
