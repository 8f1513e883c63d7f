"""Any file is read as a crash capsule, or refused with a plain error."""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepmill
from stepmill.observe.replay import code_to_run
from stepmill.observe.replay_command import describe_capsule
from stepmill.observe.replay_command import facts as facts_of
from stepmill.spec import capsule as capsules
from stepmill.spec.capsule import Capsule, read_capsule, write_capsule
from stepmill.spec.json_values import calls_in, modules_in, to_plain
from tests.harness.effort import examples

FACTS: dict[str, Any] = {
    "made": "2026-01-01T00:00:00Z",
    "kind": "raised",
    "phase": "step",
    "error_type": "ValueError",
    "message": "env 0 raised ValueError",
    "traceback": "",
    "exit_code": None,
    "signal_name": None,
    "trace": "",
    "env_id": 0,
    "worker": 0,
    "worker_env_ids": [0],
    "constructor": {"@": "object", "name": "module:Env"},
    "episode": 0,
    "seed": 0,
    "options": None,
    "is_whole": True,
    "command": "step",
    "command_seed": None,
    "command_options": None,
    "call": None,
    "attributes": {},
    "versions": {},
    "pool": {"num_envs": 1},
    "notes": [],
}
ARRAYS = {
    "rewards": np.zeros(3),
    "flags": np.zeros(3, np.uint8),
    "hashes": np.zeros(3, np.uint16),
    "action.0": np.zeros((3, 2), np.float32),
}


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _members() -> dict[str, bytes]:
    facts = {"format": capsules.FORMAT, **FACTS}
    return {"capsule.json": json.dumps(facts).encode()} | {f"{name}.npy": _npy(array) for name, array in ARRAYS.items()}


def _write(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _read_or_refuse(path: Path) -> Capsule | None:
    """Read a file, and tell what it tells; None if it was refused as it should be."""
    try:
        capsule = read_capsule(str(path))
    except stepmill.UsageError as error:
        assert "crash capsule" in error.message  # noqa: PT017
        assert error.message.isprintable()  # noqa: PT017
        return None
    assert all(line.isprintable() for line in describe_capsule(capsule).split("\n"))
    json.dumps(facts_of(capsule))
    code_to_run(capsule, has_env=False)
    return capsule


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.npz"


def test_a_capsule_comes_back_as_it_was_written(tmp_path: Path):
    capsule = Capsule(**FACTS, arrays=ARRAYS)
    back = read_capsule(write_capsule(capsule, str(tmp_path), "name"))
    assert {**asdict(back), "arrays": None} == {**asdict(capsule), "arrays": None}
    assert all(np.array_equal(back.arrays[name], array) for name, array in ARRAYS.items())
    assert all(back.arrays[name].dtype == array.dtype for name, array in ARRAYS.items())


@given(st.binary(max_size=400))
@settings(max_examples=examples(100))
def test_any_bytes_are_refused(path: Path, data: bytes):
    path.write_bytes(data)
    assert _read_or_refuse(path) is None


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=examples(150))
def test_any_changes_of_bytes_are_read_or_refused(path: Path, changes: list[tuple[int, int]]):
    _write(path, _members(), zipfile.ZIP_STORED)  # so that changes reach the members' bytes
    data = bytearray(path.read_bytes())
    for place, byte in changes:
        data[place % len(data)] = byte
    path.write_bytes(data)
    _read_or_refuse(path)


HEADERS = st.one_of(
    st.text(max_size=80),
    st.builds(
        "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}\n".format,
        st.sampled_from(["'<f8'", "'|O'", "'<f3'", "[('a', '<f8')]", "(" * 300, "'<U9'", "-" * 5000 + "1", "None"]),
        st.sampled_from(["False", "True", "1", "()"]),
        st.sampled_from(
            ["(3,)", "()", "(-3,)", "(3.0,)", "(9,9,9)", "(" + "9" * 300 + ",)", "(0,)", "(" + "1," * 99 + ")"]
        ),
    ),
)


@given(HEADERS, st.sampled_from([(1, 0), (2, 0), (3, 0), (9, 9)]), st.binary(max_size=30))
@settings(max_examples=examples(150))
def test_any_header_of_an_array_is_read_or_refused(path: Path, header: str, version: tuple[int, int], body: bytes):
    text = header.encode()
    length = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    _write(path, {**_members(), "rewards.npy": b"\x93NUMPY" + bytes(version) + length + text + body})
    _read_or_refuse(path)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["@", "name", "args", "kwargs", "items", "kind", "payload", "x"]), inner, max_size=4
        ),
        st.fixed_dictionaries(
            {"@": st.sampled_from(["object", "call", "partial", "tuple", "dict"]), "name": inner, "args": inner}
        ),
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from([*FACTS, "format", "other"]), JSON, max_size=4),
    st.sets(st.sampled_from(list(FACTS)), max_size=1),
)
@settings(max_examples=examples(150))
def test_any_facts_are_read_or_refused(path: Path, changes: dict[str, Any], missing: set[str]):
    facts = {"format": capsules.FORMAT, **FACTS, **changes}
    _write(
        path,
        {**_members(), "capsule.json": json.dumps({key: facts[key] for key in facts if key not in missing}).encode()},
    )
    _read_or_refuse(path)


ODD_ARRAYS = {
    "rewards.npy": np.zeros((3, 2)),
    "flags.npy": np.zeros(3, np.int64),
    "hashes.npy": np.zeros(2, np.uint16),
    "action.1.npy": np.zeros((2, 2)),
    "action.7.npy": np.zeros((3, 2)),
    "action.0.npy": np.float32(1),
    "action.x.npy": np.zeros(3),
    "other.npy": np.zeros(3),
}


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_arrays_that_no_capsule_has_are_refused(path: Path, name: str):
    _write(path, {**_members(), name: _npy(ODD_ARRAYS[name])})
    assert _read_or_refuse(path) is None


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_to_compress_are_refused(path: Path, compression: int):
    _write(path, _members(), compression)
    assert _read_or_refuse(path) is None


def test_deep_facts_are_refused(path: Path):
    deep = b'{"@": "dict", "items": ' * 300 + b"1" + b"}" * 300
    facts = json.dumps({"format": capsules.FORMAT, **FACTS, "seed": "SEED"}).encode().replace(b'"SEED"', deep)
    _write(path, {**_members(), "capsule.json": facts})
    assert _read_or_refuse(path) is None


def test_a_file_that_is_too_large_is_refused_before_it_is_read_to_its_end(path: Path):
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no room
    with pytest.raises(stepmill.UsageError, match="larger than"):
        read_capsule(str(path))


def test_a_directory_of_millions_of_members_is_refused(path: Path):
    path.write_bytes(capsules._MEMBER_MARK.ljust(46, b"\x00") * 100_000)
    with pytest.raises(stepmill.UsageError, match="too many members"):
        read_capsule(str(path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(stepmill.UsageError, match="not a regular file"):
        read_capsule(str(tmp_path / "pipe"))
    with pytest.raises(stepmill.UsageError, match="not a regular file"):
        read_capsule("/dev/zero")


def test_calls_are_shown_with_all_their_arguments():
    from functools import partial

    plain = to_plain(partial(dict, {"a": (1, [2.5])}, b=partial(list, np.float32)))
    assert calls_in([1, {"x": plain}]) == ["builtins:dict({'a': (1, [2.5])}, b=builtins:list(numpy:float32))"]
    assert modules_in(plain) == ["builtins", "numpy"]
    assert calls_in({"x": [1, "module:Env"]}) == []
