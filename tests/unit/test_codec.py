"""The codec: decoding returns the encoded value with its types, and invalid bytes are refused without harm."""

import collections
import enum
import math
import pickle
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stepmill import _native
from tests.harness.effort import examples

SCALAR_TYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.longlong, np.ulonglong,
    np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128, np.clongdouble,
]  # fmt: skip


class Point(NamedTuple):
    x: float
    y: object


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def no_pickle(obj: object) -> bytes:
    raise AssertionError(f"{type(obj)} must not be pickled")


class Refused(ValueError):
    """What an unpickler may raise."""


def no_unpickle(data: bytes) -> object:
    raise Refused


def round_trip(obj: object, pickler: Callable[[object], bytes] = pickle.dumps) -> object:
    return _native.decode(_native.encode(obj, pickler), pickle.loads)


def native_round_trip(obj: object) -> object:
    return _native.decode(_native.encode(obj, no_pickle), no_unpickle)


def is_same(a: object, b: object) -> bool:
    """Tell whether two values are equal in every type and bit (NaN equals NaN, 0.0 differs from -0.0)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        if a.dtype != b.dtype or a.dtype.byteorder != b.dtype.byteorder or a.shape != b.shape:
            return False
        return is_same(a.tolist(), b.tolist()) if a.dtype.hasobject else is_same_items(a, b)
    if isinstance(a, np.generic):
        assert isinstance(b, np.generic)
        return a.dtype == b.dtype and is_same_items(np.asarray(a), np.asarray(b))
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        assert isinstance(b, (list, tuple))
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        assert isinstance(b, complex)
        return is_same(a.real, b.real) and is_same(a.imag, b.imag)
    return a == b


def is_same_items(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare bit by bit, but for the long types, whose padding is nothing."""
    if a.dtype.char in "gG":
        return bool(np.array_equal(a, b, equal_nan=True))
    return a.tobytes() == b.tobytes()


def scalars() -> st.SearchStrategy[object]:
    dtypes = st.one_of(hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc"))
    return dtypes.flatmap(lambda dtype: hnp.from_dtype(dtype.newbyteorder("="))).map(
        lambda value: value if isinstance(value, np.generic) else np.asarray(value)[()]
    )


def arrays() -> st.SearchStrategy[object]:
    dtypes = st.one_of(
        hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?"), hnp.complex_number_dtypes(endianness="?"),
        hnp.byte_string_dtypes(max_len=9), hnp.unicode_string_dtypes(endianness="?", max_len=9),
    )  # fmt: skip
    return hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=2**63), st.floats(), st.complex_numbers(),
    st.text(st.characters(exclude_categories=[])), st.binary(), scalars(), arrays(),
)  # fmt: skip
KEYS = st.one_of(
    st.text(max_size=70), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text())
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=25,
)


@given(VALUES)
@settings(max_examples=examples(150))
def test_every_value_comes_back_with_its_exact_types_and_unpickled(value: object) -> None:
    assert is_same(native_round_trip(value), value)


@pytest.mark.parametrize(
    "number",
    [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, -(3**5000), 10**6000],
    ids=lambda number: f"{number.bit_length()} bits",
)
def test_an_integer_of_any_size_comes_back(number: int) -> None:
    assert is_same(native_round_trip(number), number)


@pytest.mark.parametrize("scalar_type", SCALAR_TYPES)
def test_a_numpy_scalar_keeps_its_type(scalar_type: type[np.generic]) -> None:
    value = scalar_type(1)
    got = native_round_trip({"value": value})
    assert isinstance(got, dict)
    assert type(got["value"]) is scalar_type
    assert got["value"] == value


@pytest.mark.parametrize("text", ["", "a", "ü", "\U0001f600", "\ud800", "a\0b", "x" * 100_000])
def test_any_text_comes_back(text: str) -> None:
    assert native_round_trip(text) == text
    assert native_round_trip({text: text}) == {text: text}


ARRAYS = {
    "zero-d": np.array(3.5),
    "transposed": np.arange(6).reshape(2, 3).T,
    "strided": np.arange(20)[::-3],
    "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
    "swapped": np.arange(4, dtype=">i4"),
    "swapped and strided": np.arange(8, dtype=">f8")[::2],
    "empty": np.zeros((0, 3)),
    "empty and vast": np.zeros((0, 2**40), dtype=np.int8),
    "bytes": np.array([b"a", b"bcd"]),
    "text": np.array([["a", "ü\U0001f600"]]),
    "many dimensions": np.zeros((1,) * 32),
    "bool": np.array([True, False]),
    "float16": np.array([1.5, np.inf], dtype=np.float16),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_layout_comes_back(name: str) -> None:
    assert is_same(native_round_trip(ARRAYS[name]), ARRAYS[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_a_decoded_array_is_writable_and_owns_its_memory(name: str) -> None:
    data = _native.encode(ARRAYS[name], no_pickle)
    first, second = _native.decode(data, None), _native.decode(data, None)
    assert isinstance(first, np.ndarray)
    assert first.flags.writeable
    assert first.flags.owndata
    assert first.flags.c_contiguous
    first.fill(first.dtype.type(7 if first.dtype.kind not in "SU" else "7"))
    assert is_same(second, ARRAYS[name])


PICKLED = {
    "named tuple": Point(1.0, [2]),
    "enum": Colour.RED,
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "subclass of str": Text("x"),
    "object array": np.array([1, None, "x"], dtype=object),
    "structured array": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "structured scalar": np.zeros(2, dtype=[("a", "i4")])[0],
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "date": np.datetime64("2020-01-01"),
    "masked": np.ma.MaskedArray([1, 2], [True, False]),
    "33 dimensions or a set": {1, 2} if np.lib.NumpyVersion(np.__version__) < "2.0.0" else np.zeros((1,) * 33),
    "bytearray": bytearray(b"x"),
    "numpy text": np.str_("x"),
    "range": range(3),
    "class": Point,
}


@pytest.mark.parametrize("name", PICKLED)
def test_what_the_codec_does_not_know_is_pickled_whole_and_alone(name: str) -> None:
    value = PICKLED[name]
    seen: list[object] = []

    def pickler(obj: object) -> bytes:
        seen.append(obj)
        return pickle.dumps(obj)

    got = round_trip({"a": [1, value]}, pickler)
    assert len(seen) == 1
    assert seen[0] is value
    assert isinstance(got, dict)
    assert type(got["a"][1]) is type(value)
    assert repr(got["a"][1]) == repr(value)


def test_keys_keep_their_order_and_are_interned_when_they_come_again() -> None:
    names = ["lives", "frame_number", "_lives", "r", "l", "t", "episode", "TimeLimit.truncated"]
    data = _native.encode(dict.fromkeys(names, 1), no_pickle)
    for _ in range(2):
        got = _native.decode(data, None)
    assert isinstance(got, dict)
    assert list(got) == names
    assert all(key is sys.intern(name) for key, name in zip(got, names, strict=True))


def test_a_list_that_holds_itself_comes_back_holding_itself() -> None:
    value: list[object] = [1]
    value.append(value)
    got = round_trip({"x": value})
    assert isinstance(got, dict)
    assert got["x"][1] is got["x"]


def test_deep_nesting_and_branching_without_end_are_left_to_pickle() -> None:
    deep: list[object] = []
    for _ in range(65):
        deep = [deep]
    assert round_trip(deep) == deep
    wide: list[object] = []
    for _ in range(40):
        wide = [wide, wide]  # 2 ** 40 parts, but 40 objects
    got = round_trip(wide)
    assert isinstance(got, list)
    assert got[0] is got[1]


def test_the_deepest_native_nesting_comes_back() -> None:
    deep: list[object] = []
    for _ in range(64):
        deep = [deep]
    assert native_round_trip(deep) == deep


@pytest.mark.parametrize("count", [0, 127, 128, 16383, 16384, 200_000])
def test_containers_of_any_length_come_back(count: int) -> None:
    items = list(range(count))
    assert native_round_trip(items) == items
    assert native_round_trip(tuple(items)) == tuple(items)
    assert native_round_trip(dict.fromkeys(items, 0)) == dict.fromkeys(items, 0)


def test_a_container_that_changes_while_it_is_pickled_does_no_harm() -> None:
    items: list[object] = [Colour.RED, *range(100)]
    table: dict[object, object] = {"a": Colour.RED, **{str(i): i for i in range(100)}}

    def pickler(obj: object) -> bytes:
        items.clear()
        table.clear()
        table["new"] = 1
        return pickle.dumps(obj)

    assert round_trip(items, pickler) == [Colour.RED]
    assert isinstance(round_trip({"b": table, "a": Colour.RED}, pickler), dict)
    table["a"] = Colour.RED
    assert isinstance(round_trip(table, pickler), dict)


def test_errors_of_the_pickler_arrive_and_bad_picklers_are_named() -> None:
    with pytest.raises(AssertionError, match="must not be pickled"):
        _native.encode({"a": {1}}, no_pickle)
    with pytest.raises(TypeError, match="it must return bytes"):
        _native.encode({1}, lambda obj: "text")  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="needs a pickler"):
        _native.encode({1}, None)


def test_errors_of_the_unpickler_arrive_as_they_are() -> None:
    data = _native.encode({1}, pickle.dumps)
    with pytest.raises(Refused):
        _native.decode(data, no_unpickle)
    with pytest.raises(ValueError, match="payload holds a pickled value, and there is no unpickler"):
        _native.decode(data, None)


def test_an_interrupt_while_unpickling_stays_an_interrupt() -> None:
    def interrupted(data: bytes) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _native.decode(_native.encode([{1}], pickle.dumps), interrupted)


SAMPLE = _native.encode(
    {"a": [1, 2**70, 0.5, 1j, "ü", b"x", None, True], "b": {"c": np.arange(6, dtype=">i2").reshape(2, 3), 3: np.array(["x"])},
     "d": (np.float32(1), np.bool_(True), {1})},
    pickle.dumps,
)  # fmt: skip


def decode_or_refuse(data: bytes) -> None:
    """Decode, or be refused as only a payload is refused; walk what was decoded, so that bad memory is met."""
    refusal = ""
    try:
        value = _native.decode(data, no_unpickle)
    except ValueError as error:
        refusal = str(error)
    else:
        assert repr(value)
        native_round_trip(value)
    assert refusal == "" or refusal.startswith("payload ")


@pytest.mark.parametrize("length", range(len(SAMPLE)))
def test_a_payload_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="payload"):
        _native.decode(SAMPLE[:length], pickle.loads)


def test_a_payload_that_goes_on_is_refused() -> None:
    with pytest.raises(ValueError, match="payload goes on after its value"):
        _native.decode(SAMPLE + b"N", pickle.loads)


@given(st.binary(max_size=200))
@settings(max_examples=examples(200))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    decode_or_refuse(data)


@given(st.lists(st.tuples(st.sampled_from(list(b"NFTiIfcskbgadltp")), st.binary(max_size=6)), max_size=30))
@settings(max_examples=examples(200))
def test_random_tags_do_no_harm(parts: list[tuple[int, bytes]]) -> None:
    decode_or_refuse(b"".join(bytes([tag]) + rest for tag, rest in parts))


@given(VALUES, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=examples(200))
def test_overwritten_bytes_do_no_harm(value: object, changes: list[tuple[int, int]]) -> None:
    data = bytearray(_native.encode(value, no_pickle))
    for place, byte in changes:
        data[place % len(data)] = byte
    decode_or_refuse(bytes(data))


HUGE = b"\xff" * 9 + b"\x01"  # the varint of 2**64 - 1

HOSTILE = {
    "list of 2**64 items": b"l" + HUGE,
    "lists of lists as long as what is left": b"".join(b"l" + bytes([127 - i]) for i in range(60)) + b"N" * 127,
    "text of 2**64 bytes": b"s" + HUGE,
    "number without end": b"l" + b"\xff" * 20,
    "array of 2**64 items": b"a" + bytes([np.dtype("f8").num, 0, 1]) + HUGE,
    "array of 2**80 items": b"a" + bytes([np.dtype("f8").num, 0, 2]) + (b"\xff" * 5 + b"\x7f") * 2,
    "empty array of 2**80 items": b"a" + bytes([np.dtype("f8").num, 0, 3, 0]) + (b"\xff" * 5 + b"\x7f") * 2,
    "array of objects": b"a" + bytes([np.dtype("O").num, 0, 0]) + b"\x41" * 8,
    "array of 200 dimensions": b"a" + bytes([np.dtype("u1").num, 0, 200]) + b"\x01" * 300,
    "text items of no size": b"a" + bytes([np.dtype("U").num, 0, 0, 1, 1]),
    "text items of 3 bytes": b"a" + bytes([np.dtype("U").num, 0, 3, 1, 1]) + b"xyz",
    "a character beyond Unicode": b"a" + bytes([np.dtype("U").num, 0, 4, 0]) + b"\xff" * 4,
    "a bool that is 7": b"a" + bytes([np.dtype("?").num, 0, 1, 1, 7]),
    "a key that cannot be hashed": b"d\x01l\x00N",
    "an integer of letters": b"I\x03xyz",
    "an integer with a zero in it": b"I\x030\x001",
    "nested too deep": b"l\x01" * 70 + b"N",
    "bytes that are no text": b"s\x01\xff",
    "a key that is not a text": b"d\x01k\x01\xffN",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^payload "):
        _native.decode(HOSTILE[name], no_unpickle)


def test_a_nan_keeps_its_bits() -> None:
    odd = struct.unpack("d", struct.pack("Q", 0x7FF8_0000_DEAD_BEEF))[0]
    assert math.isnan(odd)
    assert is_same(native_round_trip({"x": odd, "y": np.float64(odd)}), {"x": odd, "y": np.float64(odd)})
