# mypy: ignore-errors
# Numba gives these functions other types than Python does.
"""Memory and functions at addresses, for functions that Numba compiles and that call libraries without Python."""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic


@intrinsic
def _float64_at(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.DoubleType().as_pointer())

    return types.CPointer(types.float64)(types.uint64), generate


@intrinsic
def _int32_at(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())

    return types.CPointer(types.int32)(types.uint64), generate


@intrinsic
def call(typing_context, function, first, second):
    """Call `void function(void *, void *)`, all three by address. It must not raise, or use Python."""

    def generate(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        type_of = ir.FunctionType(ir.VoidType(), [pointer, pointer])
        target = builder.inttoptr(arguments[0], type_of.as_pointer())
        builder.call(target, [builder.inttoptr(argument, pointer) for argument in arguments[1:]])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


@njit
def view(address, shape):
    """Return an array of float64 over memory that somebody else owns."""
    return carray(_float64_at(address), shape)


@njit
def view_int32(address, shape):
    """Return an array of int32 over memory that somebody else owns."""
    return carray(_int32_at(address), shape)
