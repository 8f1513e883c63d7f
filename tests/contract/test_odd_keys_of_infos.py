"""Keys of infos whose methods fail: a fault of their env, which hides no other value."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
import pytest

import stepmill
from stepmill.pool.infos import rows_of
from stepmill.testing.envs import CountingEnv
from tests.contract.test_unreadable_infos import READABLE, SHY, ShyEnv, loads


class OddKey:
    """A key of an info with methods that fail, or whose hash is another one at each call."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.num_hashed = 0

    def __hash__(self) -> int:
        self.num_hashed += self.how == "hash changes"
        return hash("others") + self.num_hashed

    def __eq__(self, other: object) -> bool:
        if self.how == "eq raises":
            raise RuntimeError("not comparable")
        return self is other

    def __str__(self) -> str:
        if self.how == "str raises":
            raise RuntimeError("not printable")
        return "odd"


class OddKeyEnv(CountingEnv):
    """Env 1 has an odd key in each info, and one in a dict in it."""

    def __init__(self, identity: int, how: str) -> None:
        super().__init__(identity, 5)
        self.how = how

    def step(self, action: np.int64) -> Any:
        *result, _ = super().step(action)
        info: dict[Any, Any] = {"steps": self.identity, "others": 5, "deep": {"a": self.identity, "others": 5}}
        if self.identity == 1:
            info = {"steps": 1, OddKey(self.how): 1, "deep": {"a": 1, OddKey(self.how): 2}}
        return *result, info


@pytest.mark.parametrize("how", ["eq raises", "hash changes", "str raises"])
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_a_key_that_cannot_be_compared_is_omitted_and_hides_nothing_else(
    backend: Literal["serial", "thread", "process"], how: str
) -> None:
    with stepmill.Pool([functools.partial(OddKeyEnv, identity, how) for identity in range(3)], backend=backend) as pool:
        pool.reset(seed=0)
        for _ in range(2):
            info = pool.step(np.zeros(3, np.int64)).info
            assert info["steps"].tolist() == info["deep"]["a"].tolist() == [0, 1, 2]
            assert info["_omitted"].tolist() == [False, True, False]
            errors = info["omitted"][1]
            assert [error.env_id for error in errors] == [1, 1]
            assert all("OddKey" in error.message and "strings or numbers" in error.message for error in errors)
            assert [sorted(row) for _, row in rows_of(info)] == [
                ["deep", "others", "steps"],
                ["deep", "omitted", "steps"],
                ["deep", "others", "steps"],
            ]


def test_a_value_is_unpickled_once_however_its_info_is_read(pool_of):
    def fail() -> None:
        raise ValueError("not at first")

    with pool_of([lambda: ShyEnv(0, None), lambda: ShyEnv(1, None)]) as pool:
        pool.reset(seed=0)
        info = pool.step([READABLE, SHY]).info
        loads.append(fail)
        assert info["_shy"].tolist() == [True, False]
        for _ in range(2):
            assert [error.leaf for error in dict(rows_of(info))[1].pop("omitted")] == ["info['shy']"]
