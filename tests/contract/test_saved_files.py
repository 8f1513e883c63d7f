"""Files of saved envs: damaged, forged and pickled ones, and how they are written."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.spec.container import pack, unpack
from tests.contract.test_saving import SERIAL, Wanderer, play
from tests.harness.effort import examples


def test_pickled_values_are_loaded_only_if_they_are_trusted(tmp_path: Path) -> None:
    path, flag = tmp_path / "envs", tmp_path / "ran"
    with stepmill.Pool([Wanderer], **SERIAL) as pool:
        pool.reset(seed=3)
        pool.call(_Touch(str(flag)))
        flag.unlink()
        stepmill.save(pool, path)
    with stepmill.Pool([Wanderer], **SERIAL) as pool:
        with pytest.raises(stepmill.UsageError, match=r"pickled values of the types \['_Touch'\].*trust=True"):
            stepmill.restore(pool, path)
        assert not flag.exists()
        stepmill.restore(pool, path, trust=True)
        assert flag.exists()


def test_pickled_options_of_a_reset_are_loaded_only_if_they_are_trusted(tmp_path: Path) -> None:
    path, flag = tmp_path / "envs", tmp_path / "ran"
    with stepmill.Pool([Wanderer], **SERIAL) as pool:
        pool.reset(seed=3, options={"start": 1, "other": _Unpickled(str(flag))})
        play(pool, 0, 2)
        stepmill.save(pool, path)
        expected = play(pool, 2, 9)
    flag.unlink()
    _, payload = unpack("file of saved envs", path.read_bytes())
    forged = tmp_path / "forged"
    forged.write_bytes(pack("file of saved envs", {"pickled": []}, payload))
    with stepmill.Pool([Wanderer], **SERIAL) as pool:
        with pytest.raises(stepmill.UsageError, match=r"pickled values of the types \['_Unpickled'\].*trust=True"):
            stepmill.restore(pool, path)
        with pytest.raises(stepmill.UsageError, match="a pickled value is not named in the header"):
            stepmill.restore(pool, forged)
        assert not flag.exists()
        stepmill.restore(pool, path, trust=True)
        assert flag.exists()
        assert play(pool, 2, 9) == expected


class _Unpickled:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__ = state
        Path(self.path).touch()


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, env: Any) -> None:
        Path(self.path).touch()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Touch) and self.path == other.path

    __hash__ = None  # type: ignore[assignment]


def _saved_file(path: Path) -> bytes:
    with stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
        pool.reset(seed=3)
        play(pool, 0, 5)
        stepmill.save(pool, path)
    return path.read_bytes()


def test_damaged_files_are_refused_and_change_no_env(tmp_path: Path) -> None:
    path = tmp_path / "envs"
    data = _saved_file(path)
    rng = random.Random(0)
    with stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
        for _ in range(examples(500)):
            place = rng.randrange(len(data))
            flipped = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
            path.write_bytes(rng.choice([flipped, data[:place], data + data[:place]]))
            with pytest.raises(stepmill.UsageError):
                stepmill.restore(pool, path)
        assert set(pool.states) == {stepmill.EnvState.NEEDS_RESET}
        path.write_bytes(data)
        stepmill.restore(pool, path)


def test_a_value_whose_pickle_has_wrong_attributes_is_a_usage_error() -> None:
    with stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
        pool.reset(seed=3)
        pool.step([1, 2])
        saved = stepmill.save(pool, None)
    for name, value in [*itertools.product(vars(saved), [None, 5, ()]), ("whole", {**saved.whole, "batch": (1, 2)})]:
        forged = pickle.loads(pickle.dumps(saved))
        vars(forged)[name] = value
        with contextlib.suppress(stepmill.UsageError), stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
            stepmill.restore(pool, forged)
    for name in ("env_ids", "facts", "envs", "whole"):
        forged = pickle.loads(pickle.dumps(saved))
        del vars(forged)[name]
        with pytest.raises(stepmill.UsageError), stepmill.Pool([Wanderer] * 2, **SERIAL) as pool:
            stepmill.restore(pool, forged)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "envs"
    data = _saved_file(path)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        _saved_file(path)
    assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["envs"]
