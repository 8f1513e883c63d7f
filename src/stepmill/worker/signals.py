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
from collections.abc import Callable
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

    The handlers are exchanged because blocking the signals in this thread would only let another thread receive them. A
    handler that raises can interrupt the exchange itself, which is then done once more. A deferral that is over and still
    installed calls the handler.
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
        _do_again_if_interrupted(self._install)

    def end(self) -> None:
        """Put the handlers back, and let them run for the signals that have arrived."""
        try:
            _do_again_if_interrupted(self._uninstall)
        finally:
            while self._arrived:
                signal.raise_signal(self._arrived.pop(0))

    def _install(self) -> None:
        self.is_over = False
        for number in DEFERRED:
            handler = signal.getsignal(number)
            while isinstance(handler, _Deferral) and handler is not self:
                handler = handler._handlers[number]
            if callable(handler) and handler is not self:
                self._handlers[number] = handler
                signal.signal(number, self)

    def _uninstall(self) -> None:
        self.is_over = True
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self:
                signal.signal(number, handler)


def _do_again_if_interrupted(exchange: Callable[[], None]) -> None:
    try:
        exchange()
    except BaseException:
        exchange()
        raise


class _DeferredBlock:
    """Not a generator: the end of one that is left in `__enter__` would run whenever its traceback is forgotten."""

    def __init__(self, deferral: _Deferral) -> None:
        self._deferral = deferral

    def __enter__(self) -> None:
        try:
            self._deferral.begin()
        except BaseException:
            self._deferral.end()
            raise

    def __exit__(self, *_: object) -> None:
        self._deferral.end()


class _AllowedBlock:
    def __init__(self, deferral: _Deferral) -> None:
        self._deferral = deferral

    def __enter__(self) -> None:
        try:
            self._deferral.end()
        except BaseException:
            self._deferral.begin()
            raise

    def __exit__(self, *_: object) -> None:
        self._deferral.begin()


def defer_signals() -> contextlib.AbstractContextManager[None]:
    """Postpone signal handlers to the end of the block, where they may raise. Blocks may be nested.

    Keep it short, or let it wait in `allow_signals` only: a program that does not answer to Ctrl-C is broken.
    """
    if not _is_main_thread() or _find_deferral() is not None:
        return contextlib.nullcontext()
    return _DeferredBlock(_Deferral())


def allow_signals() -> contextlib.AbstractContextManager[None]:
    """Let signal handlers run, and raise, in a part of `defer_signals`, of every one that is open."""
    deferral = _find_deferral() if _is_main_thread() else None
    return contextlib.nullcontext() if deferral is None else _AllowedBlock(deferral)


def wait_event(event: threading.Event, seconds: float) -> bool:
    """Wait for an event, at most so long; return whether it is set. Signal handlers run when the wait is over.

    An exception in the middle of Event.wait can leave the event's lock held, and then whoever sets it waits for ever.
    """
    with defer_signals():
        is_set = event.wait(seconds)
        with allow_signals():
            pass
    return is_set


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _find_deferral() -> _Deferral | None:
    for number in DEFERRED:
        handler = signal.getsignal(number)
        if isinstance(handler, _Deferral) and not handler.is_over:
            return handler
    return None
