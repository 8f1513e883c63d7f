"""How many envs are built is shown on a terminal while the start of a pool takes long, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

import stepmill
from stepmill.backends import start_progress
from stepmill.backends.start_progress import ERASE_LINE, StartProgress, progress_text
from stepmill.testing import Gate
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import counting_envs
from tests.harness.terminals import Terminal, read_terminal

BACKENDS = ["serial", "thread", "process"]
SLOW_START = """
import sys
import stepmill
from stepmill.testing import CountingEnv
from stepmill.testing.gates import wait_at

def slow():
    wait_at(sys.argv[1])
    return CountingEnv()

with stepmill.Pool([CountingEnv, slow], backend="process", num_workers=2):
    pass
"""


def replace_stderr(monkeypatch: pytest.MonkeyPatch, file: object, original: object) -> None:
    """Give the module this stderr, and this original one. pytest replaces both of the real ones."""
    monkeypatch.setattr(start_progress, "sys", SimpleNamespace(stderr=file, __stderr__=original))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr, on which every start takes long."""
    file = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    replace_stderr(monkeypatch, file, file)
    monkeypatch.setattr(start_progress, "DELAY_S", 0.0)
    monkeypatch.setattr(start_progress, "INTERVAL_S", 0.0)
    return file


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_start_is_shown_and_erased(backend, terminal):
    with stepmill.Pool(counting_envs(3), backend=backend):
        assert "of 3 envs are built" in terminal.getvalue()
        assert terminal.getvalue().endswith(ERASE_LINE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_show_progress_false_shows_nothing(backend, terminal):
    with stepmill.Pool(counting_envs(3), backend=backend, start={"show_progress": False}):
        assert terminal.getvalue() == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_line_is_erased_when_an_env_raises(backend, terminal):
    def broken():
        raise ValueError("no engine")

    with pytest.raises(stepmill.EnvError, match="no engine"):
        stepmill.Pool([*counting_envs(3), broken], backend=backend)
    assert terminal.getvalue().endswith(ERASE_LINE)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_rewrite_a_line_shows_nothing(term, terminal, monkeypatch):
    monkeypatch.setenv("TERM", term)
    with stepmill.Pool(counting_envs(3), backend="serial"):
        assert terminal.getvalue() == ""


def test_what_is_no_terminal_shows_nothing(terminal, monkeypatch):
    file = io.StringIO()
    replace_stderr(monkeypatch, file, file)
    with stepmill.Pool(counting_envs(3), backend="serial"):
        assert file.getvalue() == ""


def test_a_program_that_draws_on_the_terminal_itself_is_not_disturbed(terminal, monkeypatch):
    own = Terminal()
    replace_stderr(monkeypatch, own, terminal)
    with stepmill.Pool(counting_envs(3), backend="serial"):
        assert own.getvalue() == terminal.getvalue() == ""


def test_a_program_without_stderr_starts(terminal, monkeypatch):
    with monkeypatch.context() as patched:
        replace_stderr(patched, None, None)
        progress = StartProgress(3, is_wanted=True)
        progress.show(lambda: 1)
        progress.close()


def test_a_terminal_that_was_closed_does_not_end_the_start(terminal):
    progress = StartProgress(3, is_wanted=True)
    progress.show(lambda: 1)
    terminal.close()
    progress.show(lambda: 2)
    progress.close()


def test_a_fast_start_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(start_progress, "DELAY_S", HANG_GUARD_S)
    with stepmill.Pool(counting_envs(3), backend="process"):
        assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("num_built", "text"),
    [
        (0, "stepmill: 0 of 40 envs are built after 5 s"),
        (10, "stepmill: 10 of 40 envs are built after 5 s, 2 per second, 15 s left"),
        (40, "stepmill: 40 of 40 envs are built after 5 s"),
    ],
)
def test_the_line_has_the_rate_and_the_time_left(num_built, text):
    assert progress_text(num_built, 40, 5.0) == text


def test_a_program_on_a_terminal_shows_the_env_that_is_built_and_waits_for_the_other():
    ours, theirs = pty.openpty()
    try:
        with Gate() as gate:
            environment = {**os.environ, "TERM": "xterm"}
            process = subprocess.Popen(
                [sys.executable, "-c", SLOW_START, str(gate.path)], stdout=theirs, stderr=theirs, env=environment
            )
            os.close(theirs)
            text = read_terminal(ours, "1 of 2 envs are built")
            gate.open()
            text += read_terminal(ours)
            assert process.wait(HANG_GUARD_S) == 0
    finally:
        os.close(ours)
    assert "per second" in text
    assert text.endswith(ERASE_LINE)
