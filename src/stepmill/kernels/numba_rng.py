"""The generator of `rng.py`, for functions that Numba compiles: `rng.random()` and its other methods."""

# mypy: ignore-errors
# Numba gives these functions other types than Python does.

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, overload_method, register_model

from stepmill.kernels.rng import Rng


class RngType(types.Type):
    """A pointer to the four words of a generator."""

    def __init__(self) -> None:
        super().__init__(name="stepmill.Rng")


rng_type = RngType()


@register_model(RngType)
class _RngModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, ir.IntType(64).as_pointer())


@intrinsic
def _read(typing_context: Any, rng: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.gep(arguments[0], [arguments[1]]))

    return types.uint64(rng_type, types.intp), generate


@intrinsic
def _write(typing_context: Any, rng: Any, place: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(rng_type, types.intp, types.uint64), generate


@njit
def _bits(rng: Any) -> Any:
    s0, s1, s2, s3 = _read(rng, 0), _read(rng, 1), _read(rng, 2), _read(rng, 3)
    total = s0 + s3
    bits = ((total << np.uint64(23)) | (total >> np.uint64(41))) + s0
    shifted = s1 << np.uint64(17)
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= shifted
    s3 = (s3 << np.uint64(45)) | (s3 >> np.uint64(19))
    _write(rng, 0, s0)
    _write(rng, 1, s1)
    _write(rng, 2, s2)
    _write(rng, 3, s3)
    return bits


@overload_method(RngType, "random")
def _overload_random(rng: Any) -> Any:
    def random(rng: Any) -> Any:
        return np.float64(_bits(rng) >> np.uint64(11)) * 2.0**-53

    return random


@overload_method(RngType, "integers")
def _overload_integers(rng: Any, low: Any, high: Any) -> Any:
    def integers(rng: Any, low: Any, high: Any) -> Any:
        largest = np.uint64(np.int64(high) - np.int64(low) - np.int64(1))
        mask = largest
        mask |= mask >> np.uint64(1)
        mask |= mask >> np.uint64(2)
        mask |= mask >> np.uint64(4)
        mask |= mask >> np.uint64(8)
        mask |= mask >> np.uint64(16)
        mask |= mask >> np.uint64(32)
        while True:
            value = _bits(rng) & mask
            if value <= largest:
                return np.int64(low) + np.int64(value)

    return integers


# The other methods only call these, so that Numba can compile them as they are. It compares the signatures, with the annotations.
@overload_method(RngType, "uniform")
def _overload_uniform(self, low: float, high: float) -> float:
    return Rng.uniform


@overload_method(RngType, "normal")
def _overload_normal(self) -> float:
    return Rng.normal
