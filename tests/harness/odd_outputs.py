"""Envs whose results are invalid, unusual, or have every memory layout that NumPy allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.testing.envs import CountingEnv, Info, Options
from stepmill.testing.sampled import DTYPES, box


class Pair(NamedTuple):
    """A named tuple that an env returns where its space is a Tuple."""

    left: Any
    right: Any


def _as_strided(value: NDArray[Any]) -> NDArray[Any]:
    wide = np.zeros(tuple(2 * size for size in value.shape), value.dtype)
    wide[tuple(slice(None, None, 2) for _ in value.shape)] = value
    return wide[tuple(slice(None, None, 2) for _ in value.shape)]


def _as_read_only(value: NDArray[Any]) -> NDArray[Any]:
    value = value.copy()
    value.flags.writeable = False
    return value


def _as_unaligned(value: NDArray[Any]) -> NDArray[Any]:
    raw = np.zeros(value.nbytes + 1, np.uint8)
    shifted = raw[1:].view(value.dtype).reshape(value.shape)
    shifted[...] = value
    return shifted


class Subclassed(np.ndarray):
    """A subclass of ndarray."""


DISGUISES: dict[str, Callable[[NDArray[Any]], Any]] = {
    "plain": lambda value: value,
    "strided": _as_strided,
    "reversed": lambda value: value[::-1].copy()[::-1],
    "fortran": np.asfortranarray,
    "broadcast": lambda value: np.broadcast_to(value[:1], value.shape),
    "read-only": _as_read_only,
    "unaligned": _as_unaligned,
    "byte-swapped": lambda value: value.astype(value.dtype.newbyteorder()),
    "subclass": lambda value: value.view(Subclassed),
    "list": lambda value: value.tolist(),
}
"""Functions that return the values of a [2, 3] array in another memory layout."""


class _Observing(gymnasium.Env[Any, np.int64]):
    """Returns the observations of `_observe`, which may use the number of the step."""

    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, Info]:
        self._t += 1
        return self._observe(), 0.0, False, False, {}

    def _observe(self) -> Any:
        raise NotImplementedError


class DisguiseEnv(_Observing):
    """Returns predictable arrays in a different memory layout each step. The space has a [2, 3] Box of every dtype.

    Step t uses layout number t of `DISGUISES`, and its values must equal `expected(t)`. The layout `list` is used only for
    int64, float64 and bool, whose values keep their type in a list.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({np.dtype(dtype).name: box(dtype, (2, 3)) for dtype in DTYPES})

    @staticmethod
    def expected(t: int) -> dict[str, NDArray[Any]]:
        """Return the observation of step t in plain arrays."""
        values = (np.arange(6).reshape(2, 3) + 7 * t) % 90
        shown = {np.dtype(dtype).name: (values % 2 if dtype is np.bool_ else values).astype(dtype) for dtype in DTYPES}
        if list(DISGUISES)[t % len(DISGUISES)] == "broadcast":
            shown = {name: np.ascontiguousarray(np.broadcast_to(value[:1], (2, 3))) for name, value in shown.items()}
        return shown

    def _observe(self) -> dict[str, Any]:
        name = list(DISGUISES)[self._t % len(DISGUISES)]
        plain = self.expected(self._t)
        keeps = ("int64", "float64", "bool")
        return {
            key: DISGUISES[name if name != "list" or key in keeps else "plain"](value) for key, value in plain.items()
        }


def _as_python(value: Any, _: Any) -> Any:
    return value


def _as_scalar(value: Any, kind: Any) -> Any:
    return kind(value)


def _as_array(value: Any, kind: Any) -> Any:
    return np.array(value, kind)


class ScalarDisguiseEnv(_Observing):
    """Returns numbers as Python numbers, NumPy scalars and 0-d arrays in turn, and tuples as named tuples."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "f4": box(np.float32, ()),
                "f8": box(np.float64, ()),
                "i8": box(np.int64, ()),
                "b": box(np.bool_, ()),
                "d": spaces.Discrete(100),
                "pair": spaces.Tuple([spaces.Discrete(100), box(np.float64, (1,))]),
            }
        )

    def _observe(self) -> Any:
        t = self._t
        wrap: Callable[[Any, Any], Any] = [_as_python, _as_scalar, _as_array][t % 3]
        shown = {
            "pair": Pair(wrap(t, np.int64), np.array([t / 2])),
            "f8": wrap(t / 4, np.float64),
            "f4": wrap(t / 4, np.float32),
            "b": wrap(t % 2 == 1, np.bool_),
            "i8": wrap(t, np.int64),
            "d": wrap(t, np.int64),
        }
        return OrderedDict(shown) if t % 2 else shown


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
        "dict for array": lambda s: ({**s[0], "count": {"a": 1}}, *s[1:]),
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
