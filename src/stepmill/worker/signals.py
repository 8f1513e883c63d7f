"""Defers the signal handlers of the user's program. A handler may raise an exception, as that of Ctrl-C does.

    with defer_signals():               no handler runs, so that a resource is stored before anything can raise
        pool.fd = OwnedFd.eventfd()
        with allow_signals():           handlers run here, and may raise: for waits and code of the user
            poller.poll()

Python runs handlers in the main thread, between two bytecodes. In other threads, both blocks do nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

# Signals that programs handle in Python, with handlers that may raise exceptions.
DEFERRED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

Handler = Callable[[int, "FrameType | None"], object]

# The functions of `signal` make enum members of handlers, and first the text of an error, which contains the repr of the handler:
# that of asyncio names its task and takes 20 us.
_signals: Any = import_module("_signal")
read_handler: Callable[[int], Any] = _signals.getsignal
_setsignal: Callable[[int, Handler], Any] = _signals.signal


class _Deferral:
    """Replaces the handlers of signals, and collects the signals that arrive.

    Handlers are replaced because signals that are blocked in this thread would be delivered to another one. A handler that
    raises an exception can interrupt the replacement itself, which is then repeated. A deferral that has ended and is
    still installed calls the original handler.

    This is a class, because if `__enter__` of a generator were interrupted, its end would run when the traceback is freed.
    """

    def __init__(self) -> None:
        self.is_over = True
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:
            self._handlers[number](number, frame)
        else:
            self._arrived.append(number)

    def __enter__(self) -> None:
        try:
            self._install()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Put the handlers back, and let them run for the signals that have arrived."""
        try:
            self._uninstall()
        except BaseException:
            self._uninstall()
            raise
        finally:
            if self._arrived:
                self._deliver()

    def _deliver(self) -> None:
        while self._arrived:
            try:
                signal.raise_signal(self._arrived.pop(0))
            finally:
                self._deliver()  # the others, also if this handler raises

    def _install(self) -> None:
        self.is_over = False
        for number in DEFERRED:
            handler = read_handler(number)
            while isinstance(handler, _Deferral) and handler is not self:
                handler = handler._handlers[number]
            if callable(handler) and handler is not self:
                self._handlers[number] = handler
                _setsignal(number, self)

    def _uninstall(self) -> None:
        self.is_over = True
        for number, handler in self._handlers.items():
            if read_handler(number) is self:
                _setsignal(number, handler)


class _Pause:
    """The part of a deferral's block in which handlers run."""

    def __init__(self, deferral: _Deferral) -> None:
        self._deferral = deferral

    def __enter__(self) -> None:
        try:
            self._deferral.__exit__()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._deferral._install()
        except BaseException:
            self._deferral._install()
            raise


def defer_signals() -> contextlib.AbstractContextManager[None]:
    """Defer signal handlers to the end of the block, where they may raise. Blocks may be nested.

    Keep the block short, and wait only in `allow_signals`, so that the program reacts to Ctrl-C.
    """
    is_main = threading.get_ident() == threading.main_thread().ident
    return _Deferral() if is_main and _find_deferral() is None else contextlib.nullcontext()


def allow_signals() -> contextlib.AbstractContextManager[None]:
    """Let signal handlers run, and raise, in this part of all enclosing blocks of `defer_signals`."""
    is_main = threading.get_ident() == threading.main_thread().ident
    deferral = _find_deferral() if is_main else None
    return contextlib.nullcontext() if deferral is None else _Pause(deferral)


def wait_event(event: threading.Event, seconds: float) -> bool:
    """Wait at most `seconds` for an event, and return whether it is set. Signal handlers run after the wait.

    An exception inside Event.wait could leave the event's lock held, and a thread that sets the event would then block.
    """
    with defer_signals():
        is_set = event.wait(seconds)
        with allow_signals():
            pass
    return is_set


def _find_deferral() -> _Deferral | None:
    for number in DEFERRED:
        handler = read_handler(number)
        if isinstance(handler, _Deferral) and not handler.is_over:
            return handler
    return None
