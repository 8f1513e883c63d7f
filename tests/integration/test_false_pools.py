"""`stepmill top` reads files of programs that it cannot trust: what they write ends no command and commands no terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from stepmill import _native
from stepmill.observe import attach
from stepmill.observe.attach import AttachedPool, find_pools, only_pool
from stepmill.observe.monitor import Watch, list_pools, render
from stepmill.spec.errors import UsageError
from tests.harness.commands import run_command
from tests.harness.effort import examples
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs, make_pool

HEADER = _native.counter_formats()["header"]
PLACES: dict[str, int] = dict(zip(HEADER["names"], HEADER["offsets"], strict=True))
COMMAND = [sys.executable, "-m", "stepmill", "top"]


@cache
def slab_of_a_pool() -> bytes:
    with begun(make_pool("thread", counting_envs(3))) as pool:
        pool.step([0, 0, 0])
        with pool._runtime.slab.view() as memory:
            return bytes(memory)


def described(slab: bytes, text: bytes, **header: int) -> bytearray:
    """Return a copy of a slab with another description behind its end, and other numbers in its header."""
    forged = bytearray(slab) + text
    header = {"description_offset": len(slab), "description_bytes": len(text), **header}
    for name, number in header.items():
        struct.pack_into("<Q", forged, PLACES[name], number)
    return forged


def description(slab: bytes) -> dict[str, Any]:
    offset, size_bytes = (
        struct.unpack_from("<Q", slab, PLACES[f"description_{name}"])[0] for name in ("offset", "bytes")
    )
    fields: dict[str, Any] = json.loads(slab[offset : offset + size_bytes])
    return fields


def changed(slab: bytes, **fields: object) -> bytearray:
    return described(slab, json.dumps({**description(slab), **fields}).encode())


@contextmanager
def held(*slabs: bytes, name: str = "stepmill-slab") -> Iterator[list[int]]:
    """Hold false slabs open in this process."""
    fds = [os.memfd_create(name) for _ in slabs]
    try:
        for fd, slab in zip(fds, slabs, strict=True):
            os.write(fd, slab)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "description of exabytes": lambda slab: described(slab, b"{}", description_bytes=1 << 62),
    "description of 2^64 bytes": lambda slab: described(slab, b"{}", description_bytes=(1 << 64) - 1),
    "description beyond the largest offset": lambda slab: described(slab, b"{}", description_offset=(1 << 64) - 1),
    "nested description": lambda slab: described(slab, b"[" * 200_000),
    "nested lists in a field": lambda slab: described(slab, b'{"servers":' + b"[" * 200_000),
    "description as a list": lambda slab: described(slab, b"[1, 2]"),
    "description of other bytes": lambda slab: described(slab, b"\xff\xfe\xfd"),
    "markup as backend": lambda slab: changed(slab, backend="[/]"),
    "escape sequence as backend": lambda slab: changed(slab, backend="\x1b]0;owned\x07\x1b[2J"),
    "number as backend": lambda slab: changed(slab, backend=7),
    "start at a float": lambda slab: changed(slab, began_ns=1e300),
    "start at infinity": lambda slab: changed(slab, began_ns=float("inf")),
    "start at a huge number": lambda slab: changed(slab, began_ns=10**400),
    "start as text": lambda slab: changed(slab, began_ns="now"),
    "more envs than servers": lambda slab: changed(slab, num_envs=1 << 60),
    "fewer than no envs": lambda slab: changed(slab, num_envs=-1),
    "half an env": lambda slab: changed(slab, num_envs=0.5),
    "servers twice": lambda slab: changed(slab, servers=[[0, 1], [1, 2]]),
    "servers far apart": lambda slab: changed(slab, servers=[[0, 1], [1 << 40]]),
    "servers as an object": lambda slab: changed(slab, servers={"0": [0, 1, 2]}),
    "servers as a number": lambda slab: changed(slab, servers=3),
    "servers as empty objects": lambda slab: changed(slab, servers=[[0, 1, 2], {}]),
    "too few words": lambda slab: changed(slab, worker_words=[0]),
    "words before the begin": lambda slab: changed(slab, learner_words=[-8, -8]),
    "words as text": lambda slab: changed(slab, worker_words="01"),
    "words at a bool": lambda slab: changed(slab, learner_words=[True, False]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_slab_that_contradicts_itself_is_left_out(forgery: str) -> None:
    slab = FORGERIES[forgery](slab_of_a_pool())
    with held(slab), make_pool("serial", counting_envs(2)):
        assert [found.description.num_envs for found in find_pools(os.getpid())] == [2]


@pytest.mark.parametrize(
    "fields", [{"worker_words": [1 << 61, 1 << 61]}, {"env_counters": 1 << 61}], ids=["words", "counters"]
)
def test_counters_beyond_the_end_are_refused(fields: dict[str, Any]) -> None:
    slab = changed(slab_of_a_pool(), **fields)
    with held(slab), AttachedPool(only_pool(os.getpid())) as pool, pytest.raises(UsageError, match="but is not"):
        pool.stats()


def test_a_fifo_with_the_name_of_a_slab_does_not_stop_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "memfd"
    os.mkfifo(fifo)
    monkeypatch.setattr(attach, "SLAB_LINK", str(fifo))
    held_fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # no writer: another open would wait for one
    try:
        assert find_pools(os.getpid()) == []
    finally:
        os.close(held_fd)


def test_the_list_of_pools_survives_all_false_slabs_and_shows_no_control_characters() -> None:
    slab = slab_of_a_pool()
    with held(*(forge(slab) for forge in FORGERIES.values())):
        done = run_command("top")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


SHRUNK = """
import os
from stepmill.observe.attach import AttachedPool, only_pool
with AttachedPool(only_pool(os.getppid())) as pool:
    pool.stats()
    print("attached", flush=True)
    input()
    pool.stats()
"""


def test_a_slab_that_shrinks_while_it_is_shown_is_an_error() -> None:
    with held(slab_of_a_pool()) as fds:
        command = [sys.executable, "-c", SHRUNK]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes, text=True) as running:
            assert running.stdout.readline() == "attached\n"
            os.ftruncate(fds[0], 64)
            _, told = running.communicate("\n", timeout=HANG_GUARD_S)
    assert running.returncode == 1
    assert "UsageError: process" in told
    assert "looks like a pool's memory" in told


PROGRAM = """
import stepmill
from stepmill.testing import CountingEnv
with stepmill.Pool([CountingEnv]):
    print(flush=True)
    input()
"""


def test_the_command_line_of_a_program_is_shown_as_it_is_without_control_characters() -> None:
    arguments = ["--net=[/]", "--hidden=[relu,64]", "\x1b]0;owned\x07\x1b[2J", "\u202e", "\x9b2J"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout.readline()
        found = only_pool(running.pid)
        picture = io.StringIO()
        console = Console(file=picture, width=400)
        list_pools([found], console)
        # Only the end of the command line is of interest, and top shows its begin.
        shown = found.command[-60:]
        with AttachedPool(found) as pool:
            console.print(render(Watch(shown, pool.stats).look(), console))
        running.communicate("\n")
    text = picture.getvalue()
    assert "--net=[/] --hidden=[relu,64] \ufffd]0;owned\ufffd\ufffd[2J \ufffd \ufffd2J" in text
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=8,
)


def counters_of_a_pool() -> list[int]:
    about = description(slab_of_a_pool())
    return [128, about["env_counters"], *about["worker_words"], *about["learner_words"]]


@st.composite
def false_slabs(draw: st.DrawFn) -> bytes:
    """A slab of a pool with other fields of its description, other bytes, and another end."""
    true = slab_of_a_pool()
    fields = draw(st.dictionaries(st.sampled_from([*description(true), "other"]), VALUES, max_size=3))
    slab = changed(true, **fields) if draw(st.booleans()) else bytearray(true)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    for start in draw(st.sampled_from([(), counters_of_a_pool()])):
        slab[start : start + 4096] = random.bytes(4096)
    return bytes(slab[: draw(st.integers(0, len(slab)) | st.just(len(slab)))])


@given(slab=false_slabs())
@settings(max_examples=examples(30))
def test_any_bytes_are_left_out_or_refused_or_shown(slab: bytes) -> None:
    picture = io.StringIO()
    with held(slab), contextlib.suppress(UsageError):
        found = find_pools(os.getpid())
        list_pools(found, Console(file=picture, width=100))
        with AttachedPool(only_pool(os.getpid())) as pool:
            console = Console(file=picture, width=100)
            console.print(render(Watch("a pool", pool.stats).look(), console))
            pool.stats().to_prometheus()
    assert all(each.isprintable() or each == "\n" for each in picture.getvalue())
