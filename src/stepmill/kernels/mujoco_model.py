"""The common parts of MuJoCo tasks: the properties of their model, and sums in NumPy's order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stepmill.spec.errors import UsageError

Given: TypeAlias = "Mapping[str, Any]"
"""The arguments of a task by Gymnasium's names: all of them."""

F32 = np.float32
FREE = math.inf


@dataclass(frozen=True)
class Model:
    """The properties of a model that tasks need before they are compiled.

    Attributes:
        qpos, qvel: the values at the beginning.
        timestep: the simulated seconds of one mj_step.
        dt: the simulated seconds of one step of the env.
        masses: the masses of the bodies.
        bodies: the names of the bodies.
        num_tendons: the number of tendons of the model.
    """

    qpos: Any
    qvel: Any
    timestep: float
    dt: float
    masses: Any
    bodies: tuple[str, ...]
    num_tendons: int

    def find_body(self, body: str | int) -> int:
        """Return the number of a body.

        Raises:
            UsageError: the model has no such body.
        """
        if isinstance(body, str) and body in self.bodies:
            return self.bodies.index(body)
        if isinstance(body, str) or not 0 <= body < len(self.bodies):
            raise UsageError(
                f"the model has no body {body!r}, which the task needs; it has {', '.join(filter(None, self.bodies))}"
            )
        return body


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
