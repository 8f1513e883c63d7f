"""An env of any spaces. It returns seeded samples, and echoes each action with its type, dtype and bytes.

Two such envs with the same arguments, seeds and actions return the same data in every engine, which differential tests
compare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from stepmill.testing.envs import Info, Options

DTYPES: tuple[type[np.generic], ...] = (
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64,
)  # fmt: skip
"""Every dtype that a Box may have."""

Draw = Callable[[np.random.Generator], object]


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


def describe(value: object) -> str:
    """Return a text that is equal for two values only if their types, dtypes, shapes, structures and bytes are equal."""
    if isinstance(value, np.ndarray):
        data = describe(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes().hex()
        return f"ndarray({value.dtype.str}, {value.shape}, {data})"
    if isinstance(value, np.generic):
        return f"{type(value).__name__}({value.tobytes().hex()})"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items())
        return f"{type(value).__name__}{{{inside}}}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}[{', '.join(describe(item) for item in value)}]"
    return f"{type(value).__name__}:{value!r}"


def _draw_mixed(rng: np.random.Generator) -> object:
    number = int(rng.integers(100))
    return [number, float(number) + 0.5, bool(number % 2), np.float32(number), np.int16(number)][int(rng.integers(5))]


def _draw_nested(rng: np.random.Generator) -> object:
    deep = {"d": np.float32(rng.normal()), "text": "deep"} if rng.random() < 0.6 else {}
    return {"count": int(rng.integers(9)), "deep": deep}


INFO_DRAWS: dict[Any, Draw] = {
    "int": lambda rng: int(rng.integers(-(2**60), 2**60)),
    "float": lambda rng: float(rng.normal()),
    "bool": lambda rng: bool(rng.integers(2)),
    "np_bool": lambda rng: np.bool_(rng.integers(2)),
    "np_int8": lambda rng: np.int8(rng.integers(-128, 128)),
    "np_uint64": lambda rng: np.uint64(2**63 + int(rng.integers(2**62))),
    "np_float16": lambda rng: np.float16(rng.normal()),
    "np_complex": lambda rng: np.complex64(complex(rng.normal(), rng.normal())),
    "nan": lambda _: float("nan"),
    "mixed": _draw_mixed,
    "array": lambda rng: rng.normal(size=3).astype(np.float32),
    "array_2d": lambda rng: rng.integers(0, 255, (2, 3)).astype(np.uint8),
    "array_0d": lambda rng: np.array(rng.normal()),
    "array_bool": lambda rng: rng.integers(0, 2, 4).astype(bool),
    "array_text": lambda _: np.array(["ab", "cd"]),
    "array_object": lambda rng: np.array([{"k": int(rng.integers(9))}, None], dtype=object),
    "array_strided": lambda rng: rng.normal(size=(4, 4))[::2, ::-1][:, 1:3],
    "array_swapped": lambda rng: rng.normal(size=2).astype(">f8"),
    "array_empty": lambda _: np.zeros((0, 2), np.int32),
    "big": lambda rng: np.full(3000, rng.normal()),
    "text": lambda rng: "snowman \u2603 " + "x" * int(rng.integers(40)),
    "bytes": lambda rng: b"\x00\xff" * int(rng.integers(4)),
    "none": lambda _: None,
    "list": lambda _: [1, "two", {"three": 3.0}],
    "tuple": lambda _: (1, 2.0, np.float32(3)),
    "set": lambda _: frozenset({1, 2}),
    "huge_text": lambda _: "y" * 20_000,
    "fraction": lambda rng: Fraction(int(rng.integers(1, 9)), 7),
    "nested": _draw_nested,
    "empty": lambda _: {},
    3: lambda rng: int(rng.integers(9)),
    "": lambda rng: float(rng.normal()),
    "_hidden": lambda rng: int(rng.integers(9)),
}
"""The values that a `SampledEnv` may put into its infos, by key. `mixed` has a different type each time."""


class SampledEnv(gymnasium.Env[Any, Any]):
    """Returns seeded samples of `observation_space`, ends episodes at random, and fills infos at random.

    `info["echo"]` describes the action of a step, and the options of a reset. Everything is drawn from one RNG, which a reset
    with a seed restarts; before the first such reset it is seeded with `base_seed`.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        base_seed: int = 0,
        end_chance: float = 0.25,
        info_chance: float = 0.3,
    ) -> None:
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = copy.deepcopy(action_space)
        self._end_chance = end_chance
        self._info_chance = info_chance
        self._start(base_seed)

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        if seed is not None:
            self._start(seed)
        info = self._draw_info()
        info["echo"] = describe(options)
        return self.observation_space.sample(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        reward = float(self._rng.normal())
        terminated, truncated = (self._rng.random(2) < self._end_chance / 2).tolist()
        info = self._draw_info()
        info["echo"] = describe(action)
        return self.observation_space.sample(), reward, terminated, truncated, info

    def _start(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.observation_space.seed(int(self._rng.integers(2**31)))

    def _draw_info(self) -> Info:
        wanted = self._rng.random(len(INFO_DRAWS)) < self._info_chance
        return {
            key: draw(self._rng) for (key, draw), is_wanted in zip(INFO_DRAWS.items(), wanted, strict=True) if is_wanted
        }
