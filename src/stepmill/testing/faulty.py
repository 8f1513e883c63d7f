"""Envs that fail on purpose: they raise, or crash their process.

Each behaves as a `CountingEnv` until it fails, so that the results before the failure can be checked, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from stepmill.testing.envs import CountingEnv, Info, Options

EXIT_CODE = 17
"""Exit code of an env that calls `os._exit`."""


class Phase(Enum):
    """The phase in which an env fails. STEP and RESET are counted from 1."""

    INIT = "init"
    RESET = "reset"
    STEP = "step"
    CALL = "call"
    CLOSE = "close"


class OddSignatureError(Exception):
    """An exception that cannot be constructed from its text alone, and whose pickle does not load."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code = code
        self.detail = detail


class UnpicklableError(Exception):
    """An exception that contains a lock, so that it cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class MuteError(Exception):
    """An exception that raises another when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def _chained() -> BaseException:
    try:
        raise KeyError("the cause")
    except KeyError as cause:
        error = ValueError("the effect")
        error.__cause__ = cause
        return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("a deliberate failure"),
    "odd": lambda: OddSignatureError(7, detail="a deliberate failure"),
    "unpicklable": lambda: UnpicklableError("a deliberate failure"),
    "mute": MuteError,
    "chained": _chained,
    "unicode": lambda: ValueError("a deliberate failure: \ud800 \u2603 \x00"),
    "long": lambda: ValueError("a deliberate failure" + "." * 200_000),
    "stop": lambda: StopIteration("a deliberate failure"),
    "memory": lambda: MemoryError("a deliberate failure"),
    "exit": lambda: SystemExit(3),
    "keyboard": lambda: KeyboardInterrupt("a deliberate failure"),
    "generator": lambda: GeneratorExit("a deliberate failure"),
}
"""Exceptions to raise, by name: unlike some exceptions, a name can always be pickled."""


class _FaultyEnv(CountingEnv):
    """A counting env that calls `_fail` once the count of `phase` has reached `at`."""

    def __init__(self, phase: Phase | str, at: int, identity: int, length: int) -> None:
        self._phase = Phase(phase)
        self._at = at
        if self._phase is Phase.INIT:
            self._fail()
        super().__init__(identity, length)

    def _fail(self) -> None:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[NDArray[np.int64], Info]:
        result = super().reset(seed=seed, options=options)
        if self._phase is Phase.RESET and self.num_resets == self._at:
            self._fail()
        return result

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        result = super().step(action)
        if self._phase is Phase.STEP and self.num_steps == self._at:
            self._fail()
        return result

    def poke(self) -> str:
        """Fail if the phase is CALL; return "alive" otherwise."""
        if self._phase is Phase.CALL:
            self._fail()
        return "alive"

    def close(self) -> None:
        if self._phase is Phase.CLOSE:
            self._fail()


class RaisingEnv(_FaultyEnv):
    """Raises `ERRORS[error]` once, in the given phase, at the `at`-th step or reset. After that it works again."""

    def __init__(
        self, phase: Phase | str = Phase.STEP, at: int = 1, error: str = "value", *, identity: int = 0, length: int = 5
    ) -> None:
        self._error = error
        super().__init__(phase, at, identity, length)

    def _fail(self) -> None:
        error = ERRORS[self._error]()
        raise error


class DyingEnv(_FaultyEnv):
    """Ends its process. `how` is "exit" (os._exit(17)) or a signal name such as "SIGKILL" or "SIGSEGV"."""

    def __init__(
        self, phase: Phase | str = Phase.STEP, at: int = 1, how: str = "SIGKILL", *, identity: int = 0, length: int = 5
    ) -> None:
        self._how = how
        super().__init__(phase, at, identity, length)

    def _fail(self) -> None:
        if self._how == "exit":
            os._exit(EXIT_CODE)
        number = signal.Signals[self._how]
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # otherwise faulthandler writes a traceback to stderr
        os.kill(os.getpid(), number)
        threading.Event().wait()
