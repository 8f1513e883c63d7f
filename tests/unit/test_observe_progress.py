"""The progress bars of the commands: on terminals only, and only if the work takes long."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from stepmill.observe import progress
from stepmill.observe.progress import show_progress
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.terminals import Terminal


class WatchedTerminal(Terminal):
    """A terminal that tells when the first text is drawn on it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_drawn = threading.Event()

    def write(self, text: str) -> int:
        if "measuring" in text:
            self.is_drawn.set()
        return super().write(text)


def replace_stderr(monkeypatch: pytest.MonkeyPatch, file: io.StringIO) -> None:
    """Give the bars this stderr. pytest replaces the real one."""
    monkeypatch.setattr(progress, "Console", lambda *, stderr: Console(file=file) if stderr else None)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> WatchedTerminal:
    file = WatchedTerminal()
    monkeypatch.setenv("TERM", "xterm")
    replace_stderr(monkeypatch, file)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    return file


def test_long_work_shows_a_bar_and_gives_the_cursor_back(terminal):
    with show_progress("waiting", 2, is_quiet=False) as show:
        show(1, "measuring")
        assert terminal.is_drawn.wait(HANG_GUARD_S)
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_short_work_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "DELAY_S", HANG_GUARD_S)
    with show_progress("measuring", 2, is_quiet=False) as show:
        show(1)
    assert terminal.getvalue() == ""


def test_quiet_work_shows_nothing_and_starts_no_thread(terminal):
    num_threads = threading.active_count()
    with show_progress("measuring", 2, is_quiet=True) as show:
        show(1)
        assert threading.active_count() == num_threads
    assert terminal.getvalue() == ""


def test_what_is_no_terminal_shows_nothing(terminal, monkeypatch):
    file = io.StringIO()
    replace_stderr(monkeypatch, file)
    with show_progress("measuring", 2, is_quiet=False) as show:
        show(1)
    assert file.getvalue() == ""


def test_the_bar_goes_when_the_work_raises(terminal):
    def work() -> None:
        with show_progress("measuring", 2, is_quiet=False):
            assert terminal.is_drawn.wait(HANG_GUARD_S)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")
