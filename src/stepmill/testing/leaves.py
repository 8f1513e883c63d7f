"""Envs whose observations have every dtype and every memory layout that NumPy allows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.testing.envs import Info, Options

DTYPES: tuple[type[np.generic], ...] = (
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
)
"""Every dtype that a Box may have."""


def box(dtype: type[np.generic], shape: tuple[int, ...]) -> spaces.Box:
    """Return a Box of `shape` with bounds 0 and 100, or 0 and 1 if the dtype is bool."""
    high = 1 if dtype is np.bool_ else 100
    return spaces.Box(0, high, shape, dtype)  # type: ignore[arg-type]


def all_leaves_space() -> spaces.Dict:
    """Return a nested space with a Box of every dtype, with and without dimensions, and each kind of discrete space."""
    return spaces.Dict(
        {
            "boxes": spaces.Dict({np.dtype(dtype).name: box(dtype, (2, 3)) for dtype in DTYPES}),
            "scalars": spaces.Tuple([box(dtype, ()) for dtype in DTYPES]),
            "empty": spaces.Box(0, 1, (0, 3), np.float32),
            "discrete": spaces.Tuple(
                [
                    spaces.Discrete(5),
                    spaces.Discrete(3, start=-7),
                    spaces.Discrete(2000, start=10),
                    spaces.MultiDiscrete([3, 4, 5]),
                    spaces.MultiDiscrete(np.array([[3, 4], [5, 6]]), dtype=np.int32),
                    spaces.MultiBinary(4),
                    spaces.MultiBinary((2, 2)),
                ]
            ),
            "deep": spaces.Tuple([spaces.Dict({"a": spaces.Tuple([spaces.Dict({"b": box(np.float32, (1,))})])})]),
        }
    )


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


class DisguiseEnv(gymnasium.Env[Any, np.int64]):
    """Returns predictable arrays in a different memory layout each step. The space has a [2, 3] Box of every dtype.

    Step t uses layout number t of `DISGUISES`, and its values must equal `expected(t)`. The layout `list` is used only for
    int64, float64 and bool, whose values keep their type in a list.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({np.dtype(dtype).name: box(dtype, (2, 3)) for dtype in DTYPES})
        self.action_space = spaces.Discrete(2)
        self._t = 0

    @staticmethod
    def expected(t: int) -> dict[str, NDArray[Any]]:
        """Return the observation of step t in plain arrays."""
        values = (np.arange(6).reshape(2, 3) + 7 * t) % 90
        shown = {np.dtype(dtype).name: (values % 2 if dtype is np.bool_ else values).astype(dtype) for dtype in DTYPES}
        if list(DISGUISES)[t % len(DISGUISES)] == "broadcast":
            shown = {name: np.ascontiguousarray(np.broadcast_to(value[:1], (2, 3))) for name, value in shown.items()}
        return shown

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, Info]:
        self._t += 1
        return self._observe(), 0.0, False, False, {}

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


class ScalarDisguiseEnv(gymnasium.Env[Any, np.int64]):
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
        self.action_space = spaces.Discrete(2)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, Info]:
        self._t += 1
        return self._observe(), 0.0, False, False, {}

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
