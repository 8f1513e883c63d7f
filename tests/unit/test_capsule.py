"""Any file is read as a crash capsule, or refused with a plain error."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepmill
from stepmill import _native
from stepmill.observe.replay import code_to_run
from stepmill.observe.replay_command import describe_capsule
from stepmill.observe.replay_command import facts as facts_of
from stepmill.pool.capsule import Capsule, read_capsule, write_capsule
from stepmill.spec import container
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
    "episode": 0,
    "seed": 0,
    "is_whole": True,
    "command": "step",
    "call": "",
    "command_seed": [1, None],
    "num_actions": 3,
    "pickled": {"env_fn": "module.Env"},
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
PARTS = {
    "env_fn": _native.encode(print, pickle.dumps),
    "options": _native.encode({7: (1, {2.5})}, pickle.dumps),
    "broken": b"\xff",
}


def _write(path: Path, facts: object = FACTS, **payload: object) -> None:
    data = _native.encode({"arrays": ARRAYS, "parts": PARTS, **payload}, pickle.dumps)
    path.write_bytes(container.pack("crash capsule", {"facts": facts}, data))


def _read_or_refuse(path: Path) -> Capsule | None:
    """Read a file, and tell what it tells; None if it was refused as it should be."""
    try:
        capsule = read_capsule(str(path))
        code_to_run(capsule, has_env=False)
    except stepmill.UsageError as error:
        assert "capsule" in error.message  # noqa: PT017
        assert error.message.isprintable()  # noqa: PT017
        return None
    assert all(line.isprintable() for line in describe_capsule(capsule).split("\n"))
    json.dumps(facts_of(capsule))
    return capsule


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_capsule_comes_back_as_it_was_written(tmp_path: Path):
    capsule = Capsule(**FACTS, arrays=ARRAYS, parts=PARTS)
    written = write_capsule(capsule, str(tmp_path), "name")
    assert list(tmp_path.iterdir()) == [Path(written)]
    back = read_capsule(written)
    assert {**asdict(back), "arrays": None} == {**asdict(capsule), "arrays": None}
    assert all(np.array_equal(back.arrays[name], array) for name, array in ARRAYS.items())
    assert all(back.arrays[name].dtype == array.dtype for name, array in ARRAYS.items())


def test_the_facts_are_lines_of_text_in_the_file(path: Path):
    _write(path)
    assert b'\n  "message": "env 0 raised ValueError",\n' in path.read_bytes()


def test_pickles_are_loaded_only_from_a_trusted_capsule(path: Path):
    _write(path)
    with pytest.raises(stepmill.UsageError, match="not named in the header"):
        read_capsule(str(path)).load("env_fn")
    capsule = read_capsule(str(path), trust=True)
    assert (capsule.load("env_fn"), capsule.load("options"), capsule.load("call")) == (print, {7: (1, {2.5})}, None)
    with pytest.raises(stepmill.UsageError, match="cannot load the broken in this capsule here"):
        capsule.load("broken")


def test_functions_that_were_sent_by_value_are_refused_under_another_python(path: Path):
    import cloudpickle

    python = {"python": "3.99.1"}
    parts = {"env_fn": _native.encode(lambda: 3, cloudpickle.dumps), "options": PARTS["options"]}
    _write(path, {**FACTS, "versions": python}, parts=parts)
    capsule = read_capsule(str(path), trust=True)
    assert capsule.load("options") == {7: (1, {2.5})}
    with pytest.raises(stepmill.UsageError, match=r"functions of Python 3\.99\.1"):
        capsule.load("env_fn")


def test_files_of_the_older_format_are_refused_by_name(tmp_path: Path):
    with pytest.raises(stepmill.UsageError, match="older format; replay it with the version that wrote it"):
        read_capsule(str(tmp_path / "stepmill-1.npz"))


@given(st.binary(max_size=400))
@settings(max_examples=examples(100))
def test_any_bytes_are_refused(path: Path, data: bytes):
    path.write_bytes(data)
    assert _read_or_refuse(path) is None


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=examples(150))
def test_any_changes_of_bytes_are_read_or_refused(path: Path, changes: list[tuple[int, int]]):
    payload = bytearray(_native.encode({"arrays": ARRAYS, "parts": PARTS}, None))
    for place, byte in changes:
        payload[place % len(payload)] = byte
    path.write_bytes(container.pack("crash capsule", {"facts": FACTS}, bytes(payload)))
    _read_or_refuse(path)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=4)),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from([*FACTS, "other"]), JSON, max_size=4),
    st.sets(st.sampled_from(list(FACTS)), max_size=1),
)
@settings(max_examples=examples(150))
def test_any_facts_are_read_or_refused(path: Path, changes: dict[str, Any], missing: set[str]):
    facts = {**FACTS, **changes}
    _write(path, {key: facts[key] for key in facts if key not in missing})
    _read_or_refuse(path)


ODD_ARRAYS = {
    "rewards": np.zeros((3, 2)),
    "flags": np.zeros(3, np.int64),
    "hashes": np.zeros(2, np.uint16),
    "action.1": np.zeros((2, 2)),
    "action.7": np.zeros((3, 2)),
    "action.0": np.float32(1),
    "action.x": np.zeros(3),
    "other": [0, 0, 0],
}


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_arrays_that_no_capsule_has_are_refused(path: Path, name: str):
    _write(path, arrays={**ARRAYS, name: ODD_ARRAYS[name]})
    assert _read_or_refuse(path) is None


@pytest.mark.parametrize("payload", [{"arrays": []}, {"parts": None}, {"parts": {"env_fn": 3}}, {"arrays": {1, 2}}])
def test_other_payloads_are_refused(path: Path, payload: dict[str, object]):
    _write(path, **payload)
    assert _read_or_refuse(path) is None


def test_a_file_that_is_too_large_is_not_read_to_its_end(path: Path):
    for begin, what in ((b"", "not a crash capsule"), (b"stepmill", "damaged")):
        with path.open("wb") as file:
            file.write(begin)
            file.truncate(1 << 40)  # a hole, which takes no room
        with pytest.raises(stepmill.UsageError, match=what):
            read_capsule(str(path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for special in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        with pytest.raises(stepmill.UsageError, match="crash capsule"):
            read_capsule(special)
