"""Texts that identify policies, env functions and tasks in a resume file, also if they differ only in the values of arrays."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_TEXT = 200  # longer texts are cut, and their checksum stands for the rest
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, CodeType, np.generic)


def identify(value: object) -> str:
    """Return a text that differs for values with other reprs or other arrays, and is the same in another process.

    The arrays are those of NumPy, torch and JAX that the value refers to: in containers, arguments of partial functions, attributes,
    parameters and buffers of modules, and, for functions, in defaults, closures and the globals of their module that they use.
    Envs are not searched, because they change.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    checksum = blake2b(digest_size=8)
    is_cut, has_arrays = len(text) > _MAX_TEXT, False
    if is_cut:
        checksum.update(text.encode(errors="surrogatepass"))
    for array in _arrays_of(value):
        has_arrays = True
        checksum.update(f"{array.dtype.descr}{array.shape}".encode())
        checksum.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return f"{text[:_MAX_TEXT]} {checksum.hexdigest()}" if is_cut or has_arrays else text


def _arrays_of(value: object) -> Iterator[NDArray[Any]]:
    """Yield all arrays to which a value refers, in an order that depends on the value alone."""
    seen: dict[int, object] = {}  # with the objects, so that no id is used again
    left = [value]
    while left:
        part = left.pop()
        array = _as_array(part)
        if array is not None and not array.dtype.hasobject:
            yield array
        elif id(part) not in seen and not isinstance(part, _PLAIN):
            seen[id(part)] = part
            left += reversed([*_children(part)] if array is None else array.reshape(-1).tolist())


def _as_array(value: object) -> NDArray[Any] | None:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, _PLAIN) or not (hasattr(value, "__array__") and hasattr(value, "dtype")):
        return None
    if hasattr(value, "detach"):  # a tensor; NumPy does not know all of its dtypes
        import torch

        tensor = torch.as_tensor(value).detach().cpu()
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        array: NDArray[Any] = dense.contiguous().reshape(-1).view(torch.uint8).numpy()
        return array
    return np.asarray(value)


def _children(value: Any) -> Iterator[object]:
    """Yield the values that may have arrays of a value."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, deque)):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from _values_of_function(value)
    elif hasattr(value, "named_parameters") and hasattr(value, "named_buffers"):
        yield from (dict(value.named_parameters()), dict(value.named_buffers()))
    elif hasattr(getattr(value, "policy", None), "named_parameters"):  # a model of Stable-Baselines3
        yield value.policy
    elif not (hasattr(value, "reset") and hasattr(value, "step")):
        yield getattr(value, "__dict__", None)
        slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
        yield from [getattr(value, name, None) for own in slots for name in ((own,) if isinstance(own, str) else own)]


def _values_of_function(function: FunctionType) -> Iterator[object]:
    """Yield the values that a function refers to: of its defaults, its closure, and its own module."""
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    known = function.__globals__
    for name in _names_in(function.__code__):
        found = known.get(name)
        if getattr(found, "__globals__", known) is known:  # no functions of other modules
            yield found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
