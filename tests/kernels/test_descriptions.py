"""What a library says of its kernel is checked: a wrong field is an error that names the library, the field and what is allowed."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import stepmill
from stepmill.kernels.library import _Description
from tests.kernels.library_builder import build_text

# A kernel whose description is read from a file, so that a library is compiled once for all descriptions.
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include "stepmill_kernel.h"
static struct {
    stepmill_kernel kernel;
    char name[32], obs_dtype[32], action_dtype[32];
    double bounds[4][4];
    uint8_t has_bounds[4];
} given;
static int32_t reset(void *state, stepmill_rng *rng, void *obs, stepmill_result *result) {
    (void)state, (void)rng, (void)obs, (void)result;
    return 0;
}
static int32_t step(void *state, const void *action, stepmill_rng *rng, void *obs, stepmill_result *result) {
    (void)state, (void)action, (void)rng, (void)obs, (void)result;
    return 0;
}
const stepmill_kernel *stepmill_kernel_describe(void) {
    FILE *file = fopen(getenv("STEPMILL_TEST_DESCRIPTION"), "rb");
    if (file == NULL || fread(&given, sizeof given, 1, file) != 1) return NULL;
    fclose(file);
    const double **bounds[4] = {&given.kernel.observation.lows, &given.kernel.observation.highs,
                                &given.kernel.action.lows, &given.kernel.action.highs};
    for (int i = 0; i < 4; ++i) *bounds[i] = given.has_bounds[i] ? given.bounds[i] : NULL;
    given.kernel.name = given.name;
    given.kernel.observation.dtype = given.obs_dtype;
    given.kernel.action.dtype = given.action_dtype;
    given.kernel.reset = reset;
    given.kernel.step = step;
    return &given.kernel;
}
"""


class _Given(ctypes.Structure):
    _fields_ = [
        ("kernel", _Description),
        ("name", ctypes.c_char * 32),
        ("obs_dtype", ctypes.c_char * 32),
        ("action_dtype", ctypes.c_char * 32),
        ("bounds", ctypes.c_double * 16),
        ("has_bounds", ctypes.c_uint8 * 4),
    ]


class _Library:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.with_name("description")
        os.environ["STEPMILL_TEST_DESCRIPTION"] = str(self._file)

    def load(self, fields: dict[str, Any]) -> stepmill.kernels.LibraryKernel:
        """Load the kernel with these fields of its description, as `observation.n`; the others are right."""
        given = _Given(name=b"given", obs_dtype=b"f4", action_dtype=b"i4")
        given.kernel.abi_version, given.kernel.size_bytes = 1, ctypes.sizeof(_Description)
        for space in (given.kernel.observation, given.kernel.action):
            space.num_dims, space.shape[0], space.low, space.high, space.n = 1, 2, -3.0, 3.0, 4
        for name, value in fields.items():
            *parents, field = name.split(".")
            target = given if field in _PLAIN else given.kernel
            for parent in parents:
                target = getattr(target, parent)
            if isinstance(value, (list, tuple)):
                getattr(target, field)[: len(value)] = value
            else:
                setattr(target, field, value)
        self._file.write_bytes(bytes(given))
        return stepmill.kernels.load(self.path)


_PLAIN = {"name", "obs_dtype", "action_dtype", "bounds", "has_bounds"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Library]:
    yield _Library(build_text(_SOURCE, tmp_path_factory.mktemp("described"), "described.c"))
    del os.environ["STEPMILL_TEST_DESCRIPTION"]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": b"\xe9t\xe9"}, r"name is b'.*'; it must be UTF-8"),
        ({"obs_dtype": b"f\xff"}, "observation.dtype is .*; it must be UTF-8"),
        ({"obs_dtype": b">f4"}, "observation.dtype is '>f4'; it must be a native number of 1 to 8 bytes"),
        ({"action_dtype": b"f4,f4"}, "action.dtype is 'f4,f4'; it must be a native number"),
        ({"obs_dtype": b"((((("}, r"observation.dtype is '\(\(\(\(\('; it must be a native number"),
        ({"obs_dtype": b""}, "observation.dtype is ''; it must be a native number"),
        ({"observation.kind": 7}, r"observation.kind is 7; it must be 0 \(Box\) or 1 \(Discrete\)"),
        ({"observation.num_dims": 7}, "observation.num_dims is 7; it must be 0 to 6"),
        ({"observation.shape": [-1]}, r"observation.shape is \(-1,\); it must be dimensions of 0 or more"),
        ({"observation.shape": [2**62]}, "observation.shape is .*; it must be .* of at most 268435456 bytes"),
        ({"observation.num_dims": 2, "observation.shape": [2**32, 2**32]}, "observation.shape is .*; it must be"),
        ({"action.low": -INF}, r"action.low is \[-inf\]; it must be whole, from -2147483648 to 2147483647 for int32"),
        ({"action.high": INF}, r"action.high is \[inf\]; it must be whole, from"),
        ({"action.high": 0.5}, r"action.high is \[0.5\]; it must be whole, from"),
        ({"action_dtype": b"u1"}, r"action.low is \[-3.\]; it must be whole, from 0 to 255 for uint8"),
        ({"observation.low": NAN}, r"observation.low is \[nan\]; it must be from -inf to inf"),
        ({"observation.low": 4.0}, r"observation.low is \[4.\]; it must be at most the upper bound"),
        ({"bounds": [0.0, NAN], "has_bounds": [1]}, r"observation.low is \[nan\]; it must be"),
        ({"observation.kind": 1, "observation.n": 0}, "observation.n is 0; it must be 1 or more"),
        ({"action.kind": 1, "action.start": 2**63 - 1}, "action.start is 9223372036854775807; it must be at most"),
        ({"state_bytes": 2**64 - 1}, "state_bytes is 18446744073709551615; it must be less than 2 GiB"),
        ({"max_episode_steps": -3}, "max_episode_steps is -3; it must be 1 or more, or 0 for no limit"),
        ({"size_bytes": 8}, r"size_bytes is 8; it must be sizeof\(stepmill_kernel\)"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_must_be(library: _Library, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(stepmill.UsageError, match=f"^{re.escape(str(library.path))}: {text}"):
        library.load(fields)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("i8", -(2**63), 2**63 - 1), ("u8", 0, 2**64 - 1), ("i1", -128, 127), ("?", 0, 1), ("f8", -INF, INF)],
)
def test_bounds_may_be_all_that_their_type_has(library: _Library, dtype: str, low: float, high: float) -> None:
    fields = {"obs_dtype": dtype.encode(), "observation.low": float(low), "observation.high": float(high)}
    space: Any = library.load(fields).observation_space
    assert space.low.tolist() == [low, low]
    assert space.high.tolist() == [high, high]


_INTEGERS = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1))
_UNSIGNED = st.one_of(st.integers(0, 99), st.integers(0, 2**64 - 1))
_TEXTS = st.binary(max_size=31)
_DTYPES = st.one_of(st.sampled_from([b"f4", b"f8", b"u1", b"?", b"i8", b"g", b"f2", b">i2", b"O", b"U3"]), _TEXTS)
_DOUBLES = st.floats(width=64)


def _space(name: str) -> dict[str, Any]:
    return {
        f"{name}.kind": st.one_of(st.integers(0, 1), st.integers(-(2**31), 2**31 - 1)),
        f"{name}.num_dims": st.one_of(st.integers(-1, 7), st.integers(-(2**31), 2**31 - 1)),
        # Nothing between: a row of 100 MB is allowed, and takes long.
        f"{name}.shape": st.lists(st.one_of(st.integers(-2, 2), st.integers(2**29, 2**63 - 1)), max_size=6),
        f"{name}.low": _DOUBLES,
        f"{name}.high": _DOUBLES,
        f"{name}.n": _INTEGERS,
        f"{name}.start": _INTEGERS,
    }


_GARBAGE = st.fixed_dictionaries(
    {},
    optional={
        "name": _TEXTS,
        "obs_dtype": _DTYPES,
        "action_dtype": _DTYPES,
        "bounds": st.lists(_DOUBLES, max_size=16),
        "state_bytes": _UNSIGNED,
        "max_episode_steps": _INTEGERS,
        "size_bytes": st.integers(0, 2**32 - 1),
        **_space("observation"),
        **_space("action"),
    },
)


@hypothesis.settings(max_examples=200)
@hypothesis.given(fields=_GARBAGE)
@pytest.mark.filterwarnings("ignore:Data type alias 'a' was deprecated")
def test_a_library_is_refused_with_the_name_of_a_field_or_runs(library: _Library, fields: dict[str, Any]) -> None:
    try:
        kernel = library.load(fields)
    except stepmill.UsageError as error:
        found = re.match(rf"{re.escape(str(library.path))}: (?:observation\.|action\.)?(\w+) is ", str(error))
        named = found[1] if found else str(error)
    else:
        named = None
        _run(kernel)
    hypothesis.event("runs" if named is None else f"refused: {named}")
    assert named in {None, "name", "dtype", "low", "high", *(field.rpartition(".")[2] for field in fields)}


def _run(kernel: stepmill.kernels.LibraryKernel) -> None:
    for space in (kernel.observation_space, kernel.action_space):
        assert space.dtype.isnative
        assert space.contains(np.asarray(space.sample(), space.dtype))
    if kernel.compile().state.itemsize > 10_000:
        return
    with stepmill.Pool([kernel] * 2, backend="kernel") as pool:
        pool.reset(seed=0)
        pool.step(np.stack([kernel.action_space.sample(), kernel.action_space.sample()]))
