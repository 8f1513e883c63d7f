"""Ctrl-C at random moments of a call of the pool."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

DELAYS_S = (0.0, 0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015)


class Interrupter:
    """Sends SIGINT to this process, which raises KeyboardInterrupt in code of the engine only. For the main thread."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._is_armed = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while self._is_armed and frame is not None:
            path = frame.f_code.co_filename
            if "/stepmill/" in path and "/stepmill/testing/" not in path:
                raise KeyboardInterrupt
            frame = frame.f_back

    @contextmanager
    def strike(self) -> Iterator[None]:
        """Interrupt what the block does, some time after it has begun."""
        delay_s = 2 * self._rng.random() * self._rng.choice(DELAYS_S)
        thread = threading.Thread(target=_interrupt, args=(delay_s,), name="stepmill-chaos-ctrl-c")
        thread.start()
        self._is_armed = True
        try:
            yield
        finally:
            self._is_armed = False
            thread.join()


def _interrupt(delay_s: float) -> None:
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGINT)
