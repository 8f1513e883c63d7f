"""Envs that fail on purpose: they raise, crash their process, or return invalid values.

Each behaves as a `CountingEnv` until it fails, so that the results before the failure can be checked, too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from gymnasium import spaces
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
    """An exception that holds a lock, so that it cannot be pickled."""

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
        self,
        phase: Phase | str = Phase.STEP,
        at: int = 1,
        how: str = "SIGKILL",
        *,
        identity: int = 0,
        length: int = 5,
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


class BadOutputEnv(CountingEnv):
    """Returns an invalid value of the given kind from its `at`-th step, or its `at`-th reset for kinds named "reset ...".

    `BadOutputEnv.KINDS` lists the kinds. All other results are those of a `CountingEnv`. The observation is a Dict of `count`
    (int64 [3]) and `extra` (float32 [2]), so that its structure can be wrong, too.
    """

    Step = tuple[Any, ...]

    KINDS: dict[str, Callable[[Step], object]] = {
        "wrong shape": lambda s: ({**s[0], "count": np.zeros(4, np.int64)}, *s[1:]),
        "wrong rank": lambda s: ({**s[0], "count": np.zeros((1, 3), np.int64)}, *s[1:]),
        "scalar for array": lambda s: ({**s[0], "count": 5}, *s[1:]),
        "lossy dtype": lambda s: ({**s[0], "count": np.full(3, 0.5)}, *s[1:]),
        "text": lambda s: ({**s[0], "count": np.array(["a", "b", "c"])}, *s[1:]),
        "object dtype": lambda s: ({**s[0], "count": np.array([None, {}, []], object)}, *s[1:]),
        "none leaf": lambda s: ({**s[0], "count": None}, *s[1:]),
        "missing key": lambda s: ({"count": s[0]["count"]}, *s[1:]),
        "array for dict": lambda s: (np.zeros(3, np.int64), *s[1:]),
        "tuple for dict": lambda s: (tuple(s[0].values()), *s[1:]),
        "no observation": lambda s: (None, *s[1:]),
        "four values": lambda s: (s[0], s[1], s[2], s[4]),
        "six values": lambda s: (*s, None),
        "nothing": lambda _: None,
        "one number": lambda _: 1.0,
        "text reward": lambda s: (s[0], "much", *s[2:]),
        "none reward": lambda s: (s[0], None, *s[2:]),
        "long reward": lambda s: (s[0], np.zeros(2), *s[2:]),
        "array flag": lambda s: (s[0], s[1], np.array([True, False]), *s[3:]),
        "list info": lambda s: (*s[:4], ["info"]),
        "none info": lambda s: (*s[:4], None),
        "reset wrong shape": lambda s: ({**s[0], "extra": np.zeros(3, np.float32)}, s[4]),
        "reset bare observation": lambda s: s[0],
        "reset nothing": lambda _: None,
    }

    def __init__(self, kind: str, at: int = 1, *, identity: int = 0, length: int = 5) -> None:
        super().__init__(identity, length)
        self._count_space = self.observation_space
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {"count": self._count_space, "extra": spaces.Box(-1, 1, (2,), np.float32)}
        )
        self._kind = kind
        self._at = at

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> Any:
        count, info = super().reset(seed=seed, options=options)
        whole = ({"count": count, "extra": np.zeros(2, np.float32)}, 0.0, False, False, info)
        if self._kind.startswith("reset") and self.num_resets == self._at:
            return self.KINDS[self._kind](whole)
        return whole[0], info

    def step(self, action: np.int64) -> Any:
        count, *rest = super().step(action)
        whole = ({"count": count, "extra": np.zeros(2, np.float32)}, *rest)
        if not self._kind.startswith("reset") and self.num_steps == self._at:
            return self.KINDS[self._kind](whole)
        return whole


class OddRewardEnv(CountingEnv):
    """Returns rewards that are unusual but valid: NaN, infinities, NumPy scalars, ints, bools, 0-d and [1] arrays."""

    REWARDS: tuple[object, ...] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        3,
        True,
        np.float32(0.1),
        np.float16(0.5),
        np.int8(-3),
        np.uint64(2**63),
        np.bool_(True),
        np.array(2.5),
        np.array(7, np.int16),
    )

    def step(self, action: np.int64) -> Any:
        count, _, terminated, truncated, info = super().step(action)
        return count, self.REWARDS[int(action) % len(self.REWARDS)], np.bool_(terminated), int(truncated), info
