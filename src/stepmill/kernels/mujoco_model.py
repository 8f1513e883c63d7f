"""What MuJoCo tasks have in common: what they know of their model, and sums in NumPy's order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

F32 = np.float32
FREE = math.inf


@dataclass(frozen=True)
class Model:
    """What tasks need to know of a model before they are compiled.

    Attributes:
        qpos, qvel: at the beginning.
        timestep: of mj_step, in seconds.
        dt: of a step of the env, in seconds.
        masses: of the bodies.
        bodies: their numbers by name.
    """

    qpos: Any
    qvel: Any
    timestep: float
    dt: float
    masses: Any
    bodies: dict[str, int]


def sum_squares(values: Any) -> Any:
    """Return the sum of squares of a 1-D array, in its own precision, as `np.sum(np.square(values))` does."""
    num = len(values)
    if num < 8:
        total = values[0] * values[0]
        for place in range(1, num):
            total += values[place] * values[place]
        return total
    a, b, c, d = values[0] * values[0], values[1] * values[1], values[2] * values[2], values[3] * values[3]
    e, f, g, h = values[4] * values[4], values[5] * values[5], values[6] * values[6], values[7] * values[7]
    place = 8
    while place + 8 <= num:
        a += values[place] * values[place]
        b += values[place + 1] * values[place + 1]
        c += values[place + 2] * values[place + 2]
        d += values[place + 3] * values[place + 3]
        e += values[place + 4] * values[place + 4]
        f += values[place + 5] * values[place + 5]
        g += values[place + 6] * values[place + 6]
        h += values[place + 7] * values[place + 7]
        place += 8
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    while place < num:
        total += values[place] * values[place]
        place += 1
    return total


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
