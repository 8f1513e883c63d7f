"""Infos are merged as Gymnasium merges them, and only when they are read."""

import copy
import json
import pickle

import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmill.pool.infos import LazyInfo, merge, rows_of
from stepmill.pool.pool import Pool
from stepmill.spec.errors import BadOutput
from stepmill.testing import CountingEnv
from tests.harness.effort import examples
from tests.harness.pools import begun

ints = st.integers(-(2**31), 2**31)
floats = st.floats(allow_nan=False)
KINDS = {
    "int": ints,
    "float": floats,
    "bool": st.booleans(),
    "np_bool": st.booleans().map(np.bool_),
    "f32": st.floats(width=32, allow_nan=False).map(np.float32),
    "u8": st.integers(0, 255).map(np.uint8),
    "text": st.text(max_size=3),
    "none": st.none(),
    "list": st.lists(ints, max_size=3),
    "tuple": st.tuples(ints, floats),
    "array": st.lists(ints, min_size=3, max_size=3).map(np.array),
    "scalar_array": floats.map(np.array),
    "image": st.integers(0, 255).map(lambda value: np.full((2, 3), value, np.uint8)),
    "strings": st.lists(st.text("ab", max_size=3), min_size=2, max_size=2).map(lambda names: np.array(names, "<U3")),
    "number": st.one_of(ints, st.floats(-1e6, 1e6), st.booleans()),  # dtype by first value
    "_alone": ints,  # a key that looks like a mask
    7: ints,
    "final_obs": st.one_of(ints, st.lists(ints, max_size=2), st.dictionaries(st.text("a"), ints), ints.map(np.array)),
}
flat_infos = st.fixed_dictionaries({}, optional=KINDS)
infos = st.fixed_dictionaries(
    {}, optional=KINDS | {"inner": st.fixed_dictionaries({}, optional=KINDS | {"deeper": flat_infos})}
)


def gymnasium_merge(payloads, num):
    envs = VectorEnv()
    envs.num_envs = num
    merged = {}
    for row, info in payloads:
        merged = envs._add_info(merged, info, row)
    return merged


def same(ours, theirs):
    """Whether both are equal in keys, order, types, dtypes and values, all the way down."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        return all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if theirs.dtype == object:
            return all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        return np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours == theirs
    return True


@settings(max_examples=examples(50))
@given(st.lists(infos, min_size=1, max_size=5))
def test_infos_merge_as_gymnasium_merges_them(rows):
    payloads = list(enumerate(rows))
    assert same(merge(payloads, len(rows)), gymnasium_merge(payloads, len(rows)))


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(infos, st.none() | infos), min_size=1, max_size=4), st.integers(0, 2))
def test_final_infos_and_missing_rows_merge_as_gymnasium_merges_them(rows, num_missing):
    payloads = []
    for row, (info, final_info) in enumerate(rows, start=num_missing):
        info.pop("final_obs", None)
        if final_info is not None:
            payloads.append((row, {"final_obs": np.arange(2), "final_info": final_info}))
        payloads.append((row, info))
    num = num_missing + len(rows)
    assert same(merge(payloads, num), gymnasium_merge(payloads, num))


BATCHED = {name: KINDS[name] for name in ("int", "float", "bool", "f32", "u8", "text", "none", "image", "final_obs")}
batched_infos = st.fixed_dictionaries(BATCHED, optional={"inner": st.fixed_dictionaries(BATCHED)})


@settings(max_examples=examples(50))
@given(
    st.integers(1, 3).flatmap(
        lambda k: st.lists(st.lists(batched_infos, min_size=k, max_size=k), min_size=1, max_size=3)
    )
)
def test_infos_of_batched_envs_land_in_their_rows(envs):
    rows_each = len(envs[0])
    flat = [info for env in envs for info in env]
    payloads = [(place * rows_each, gymnasium_merge(enumerate(env), rows_each)) for place, env in enumerate(envs)]
    ours = merge(payloads, len(flat), rows_each=rows_each)
    assert same(ours, gymnasium_merge(enumerate(flat), len(flat)))


def test_a_batched_env_may_give_what_is_no_array():
    merged = merge(
        [(2, {"name": "left", "ids": [4, 5], "t": np.array([1, 2]), "_t": np.array([True, False])})], 4, rows_each=2
    )
    assert merged["name"].tolist() == [None, None, "left", "left"]
    assert merged["ids"].tolist() == [None, None, 4, 5]
    assert merged["t"].tolist() == [0, 0, 1, 2]
    assert merged["_t"].tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    "last", [np.array(3.0), np.zeros(1), np.zeros((3, 2)), {"eye": np.zeros((2, 4)), "ear": (np.zeros(1),)}]
)
def test_last_observations_of_a_batched_env_that_are_not_one_per_row_are_its_bad_output(last):
    fits = {"eye": np.arange(2), "ear": (np.arange(2),)}
    assert merge([(0, {"final_obs": fits})], 2, rows_each=2)["final_obs"].tolist() == [
        {"eye": row, "ear": (row,)} for row in range(2)
    ]
    with pytest.raises(BadOutput, match=r"info\['final_obs'\] of env 5 is .* does not fit the env's 2 rows") as caught:
        merge([(0, {"final_obs": fits}), (2, {"final_obs": last})], 4, rows_each=2, env_ids=[4, 4, 5, 5])
    assert (caught.value.env_id, caught.value.phase) == (5, "info")


@settings(max_examples=examples(50))
@given(
    st.lists(infos, min_size=1, max_size=4), st.lists(st.sampled_from(["_int", "_inner", "_7", "_text"]), max_size=3)
)
def test_a_key_that_is_the_mask_of_another_is_left_out_and_named(rows, names):
    without = list(enumerate(rows))
    given_keys = {key for info in rows for key in info}
    hidden = [name for name in names if name[1:] in given_keys]
    payloads = [(row, dict.fromkeys(hidden, 5) | info | dict.fromkeys(hidden, 5)) for row, info in without]
    ours = merge(payloads, len(rows))
    omitted = [[error.leaf for error in errors] for errors in ours.pop("omitted", [])]
    ours.pop("_omitted", None)
    assert same(ours, gymnasium_merge(without, len(rows)))
    assert omitted == ([[f"info[{name!r}]" for name in dict.fromkeys(hidden)]] * len(rows) if hidden else [])


def test_a_key_that_hides_a_mask_in_another_env_is_left_out_whatever_the_order():
    for rows in ([{"_x": 7}, {"x": 1}], [{"x": 1}, {"_x": 7}]):
        merged = merge(enumerate(rows), 2, env_ids=[4, 9])
        assert merged["_x"].tolist() == ["x" in info for info in rows]
        (error,) = merged["omitted"][rows.index({"_x": 7})]
        assert (error.env_id, error.leaf) == ([4, 9][rows.index({"_x": 7})], "info['_x']")
        assert merged["_omitted"].tolist() == ["_x" in info for info in rows]


def test_a_dict_that_contains_itself_is_left_out_and_hides_nothing_else():
    knot = {"t": 1, "deep": {"a": 1}}
    knot["deep"]["self"] = knot
    bush = {}
    for _ in range(40):  # 2**40 dicts, if one walks all of them
        bush = {"left": bush, "right": bush}
    merged = merge([(0, {"x": knot, "t": 5}), (1, {"x": {"t": 2}, "t": 6}), (2, {"y": bush})], 3)
    assert merged["t"].tolist() == [5, 6, 0]
    assert (merged["x"]["t"].tolist(), merged["_x"].tolist()) == ([0, 2, 0], [False, True, False])
    assert [errors and errors[0].leaf for errors in merged["omitted"]] == ["info['x']", None, "info['y']"]
    assert "y" not in merged
    assert all(isinstance(errors[0], BadOutput) for errors in merged["omitted"][[0, 2]])
    assert "info['x'] of env 0 contains itself" in str(merged["omitted"][0][0])


def test_dicts_and_other_values_under_one_key_name_the_env_that_differs():
    for first, second in (({}, 1), ({"a": 1}, 1), (1, {"a": 1}), ({}, np.arange(2)), (np.arange(2), {"a": 1})):
        with pytest.raises(BadOutput, match=r"info\['key'\] of env 9"):
            merge([(0, {"key": first}), (1, {"key": second})], 2, env_ids=[4, 9])


def test_inputs_are_not_changed():
    info = {"a": {"b": 1}, "c": [1]}
    merge([(0, info), (1, {"a": {"b": 2}, "c": [2]})], 2)
    assert info == {"a": {"b": 1}, "c": [1]}


@pytest.mark.parametrize(
    ("first", "second"), [(1, "text"), (1, None), (np.zeros(2), np.zeros(3)), (1.5, {"inner": 1}), (np.uint8(1), 2**70)]
)
def test_a_value_that_does_not_fit_names_key_and_env(first, second):
    with pytest.raises(BadOutput, match=r"info\['key'\] of env 9 .* use one type") as caught:
        merge([(0, {"key": first}), (1, {"key": second})], 2, env_ids=[4, 9])
    assert caught.value.env_id == 9


@pytest.fixture
def loads():
    return []


@pytest.fixture
def lazy(loads):
    def load():
        loads.append(1)
        return {"a": 1, "b": [2]}

    return LazyInfo(load)


LOOKS = {
    "dict": dict,
    "unpacking": lambda info: {**info},
    "keywords": lambda info: dict(**info),
    "copy": lambda info: info.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda info: pickle.loads(pickle.dumps(info)),
    "json": lambda info: json.loads(json.dumps(info)),
    "json with indent": lambda info: json.loads(json.dumps(info, indent=1)),
    "items": lambda info: dict(info.items()),
    "keys and getitem": lambda info: {key: info[key] for key in info.keys()},  # noqa: SIM118
    "iteration": lambda info: {key: info.get(key) for key in info},
    "values": lambda info: dict(zip("ab", info.values(), strict=True)),
    "repr": lambda info: eval(repr(info)),
    "str": lambda info: eval(f"{info}"),
    "or": lambda info: info | {},
    "ror": lambda info: {} | info,
    "ior": lambda info: info.__ior__({}),
    "update of another": lambda info: (other := {}, other.update(info))[0],
    "ior of another": lambda info: {}.__ior__(info),
    "reversed": lambda info: {key: info[key] for key in reversed(info)},
    "merge": lambda info: {key[0]: list(info.values())[place] for place, key in enumerate(info)},
    "setdefault": lambda info: (info.setdefault("a", 5), info)[1],
    "sorted": lambda info: {key: info[key] for key in sorted(info)},
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_every_way_of_looking_sees_the_info(look, lazy, loads):
    assert not loads
    assert look(lazy) == {"a": 1, "b": [2]}
    assert lazy == {"a": 1, "b": [2]}
    assert len(loads) == 1


def test_size_truth_and_membership_see_the_info(loads):
    def fresh():
        return LazyInfo(lambda: {"a": 1})

    assert len(fresh()) == 1
    assert fresh()
    assert "a" in fresh()
    assert "b" not in fresh()
    assert fresh() == {"a": 1}
    assert fresh() != {"a": 2}
    assert not LazyInfo(dict)
    assert json.dumps(LazyInfo(dict)) == "{}"
    match fresh():
        case {"a": value}:
            assert value == 1


def test_writing_reads_first(lazy):
    lazy["c"] = 3
    del lazy["a"]
    assert lazy.pop("b") == [2]
    assert lazy == {"c": 3}
    assert lazy.popitem() == ("c", 3)
    lazy.update(d=4)
    lazy.clear()
    assert lazy == {}


def test_clear_is_not_undone_by_a_later_look(lazy):
    lazy.clear()
    assert lazy == {}


def test_copies_are_plain_dicts(lazy):
    for made in (pickle.loads(pickle.dumps(lazy)), copy.deepcopy(lazy), copy.copy(lazy), lazy.copy()):
        assert type(made) is dict
    assert isinstance(lazy, dict)


def test_an_error_while_reading_comes_at_every_look():
    def load():
        raise BadOutput("info cannot be read")

    info = LazyInfo(load)
    for _ in range(2):
        with pytest.raises(BadOutput):
            info["a"]


def test_a_lazy_info_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="function"):
        LazyInfo({"a": 1})


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_infos_can_be_had_row_by_row_as_the_envs_gave_them(backend):
    class Telling(CountingEnv):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"action": int(action), "note": "x"} if action else {}

    with begun(Pool([Telling] * 3, backend=backend, num_workers=None if backend == "serial" else 2)) as pool:
        batch = pool.step([0, 1, 0])
        assert rows_of(batch.info) == rows_of(batch.info, [1, 2]) == [(1, {"action": 1, "note": "x"})]
        assert rows_of(batch.info, [0]) == []
        assert batch.info["_action"].tolist() == [False, True, False]
        assert rows_of({}) == []
        assert rows_of(dict(batch.info)) == rows_of(pickle.loads(pickle.dumps(batch.info))) == rows_of(batch.info)
