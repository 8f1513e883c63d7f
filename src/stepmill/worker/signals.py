"""When signal handlers of the user's program may run, since they may raise, as that of Ctrl-C does.

    with defer_signals():               no handler runs: what is acquired here is stored before anything can raise
        pool.fd = OwnedFd.eventfd()
        with allow_signals():           handlers run here and raise here: a wait, or code of the user
            poller.poll()

Python runs handlers in the main thread, between two byte codes. In other threads both blocks do nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# Signals that programs handle in Python, by handlers that may raise.
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


class _Deferral:
    """Stands in for the handlers of signals and collects those that arrive.

    The handlers are exchanged because blocking the signals in this thread would only let another thread receive them. An
    exception can interrupt the exchange itself. So a deferral that is over and still installed calls the handler.
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

    def begin(self) -> None:
        self.is_over = False
        for number in DEFERRED:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not self:
                self._handlers[number] = handler
                signal.signal(number, self)

    def end(self) -> None:
        """Put the handlers back, and let them run for the signals that have arrived."""
        self.is_over = True
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)
        while self._arrived:
            signal.raise_signal(self._arrived.pop(0))


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Postpone signal handlers to the end of the block, where they may raise. Blocks may be nested.

    Keep it short, or let it wait in `allow_signals` only: a program that does not answer to Ctrl-C is broken.
    """
    if not _is_main_thread() or _find_deferral() is not None:
        yield
        return
    deferral = _Deferral()
    try:
        deferral.begin()
        yield
    finally:
        deferral.end()


@contextlib.contextmanager
def allow_signals() -> Iterator[None]:
    """Let signal handlers run, and raise, in a part of `defer_signals`, of every one that is open."""
    deferral = _find_deferral() if _is_main_thread() else None
    if deferral is None:
        yield
        return
    try:
        deferral.end()
        yield
    finally:
        deferral.begin()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _find_deferral() -> _Deferral | None:
    for number in DEFERRED:
        handler = signal.getsignal(number)
        if isinstance(handler, _Deferral) and not handler.is_over:
            return handler
    return None
