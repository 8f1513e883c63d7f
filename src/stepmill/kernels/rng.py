"""The random numbers of kernels: xoshiro256++ 1.0, seeded by splitmix64.

`stepmill_kernel.h` has the same functions for C, and `numba_rng.py` for Numba: all three draw the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFFFFFFFFFF
WORDS = 4


class Rng:
    """One env's generator. Kernels get it as `rng`; it has the methods below and no others."""

    def __init__(self, words: NDArray[np.uint64]) -> None:
        """Use the generator whose state is in `words` [4], and change it there."""
        self._words = words

    def random(self) -> float:
        """Return a number in [0, 1) with 53 random bits."""
        return float((self._bits() >> 11) * 2.0**-53)

    def uniform(self, low: float, high: float) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * self.random()

    def integers(self, low: int, high: int) -> int:
        """Return one of low … high - 1, all equally likely."""
        largest = int(high) - int(low) - 1
        mask = (1 << largest.bit_length()) - 1
        while True:
            value = self._bits() & mask
            if value <= largest:
                return int(low) + value

    def normal(self) -> float:
        """Return a standard normal number."""
        while True:
            u = 2.0 * self.random() - 1.0
            v = 2.0 * self.random() - 1.0
            s = u * u + v * v
            if 0.0 < s < 1.0:
                return u * math.sqrt(-2.0 * math.log(s) / s)

    def _bits(self) -> int:
        s: list[int] = self._words.tolist()
        total = (s[0] + s[3]) & _MASK
        bits = (((total << 23) | (total >> 41)) + s[0]) & _MASK
        shifted = (s[1] << 17) & _MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = ((s[3] << 45) | (s[3] >> 19)) & _MASK
        self._words[:] = s
        return bits


def seed_words(words: NDArray[np.uint64], seed: int) -> None:
    """Seed the generator in `words`."""
    state: Any = seed & _MASK
    for place in range(WORDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        words[place] = mixed ^ (mixed >> 31)
