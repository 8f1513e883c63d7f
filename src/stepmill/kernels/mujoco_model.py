"""The common parts of MuJoCo tasks: the properties of their model, and sums in NumPy's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def make_sum(term: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the function that adds up a term of each value of a 1-D array, in the order of `np.sum`: eight partial sums."""

    def sum_terms(values: Any) -> Any:
        num = len(values)
        if num < 8:
            total = term(values[0])
            for place in range(1, num):
                total += term(values[place])
            return total
        a, b, c, d = term(values[0]), term(values[1]), term(values[2]), term(values[3])
        e, f, g, h = term(values[4]), term(values[5]), term(values[6]), term(values[7])
        place = 8
        while place + 8 <= num:
            a += term(values[place])
            b += term(values[place + 1])
            c += term(values[place + 2])
            d += term(values[place + 3])
            e += term(values[place + 4])
            f += term(values[place + 5])
            g += term(values[place + 6])
            h += term(values[place + 7])
            place += 8
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
        while place < num:
            total += term(values[place])
            place += 1
        return total

    return sum_terms


def _square(value: Any) -> Any:
    return value * value


sum_squares = make_sum(_square)
"""`np.sum(np.square(values))`, in the precision of the values."""
