"""Values of any size as observations and actions: what carries them, and what exceeds its limit."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.harness.pools import begun, make_pool

LARGE = 100_000_000
TEXT = gymnasium.spaces.Text(10)


class LargeEnv(gymnasium.Env[Any, Any]):
    """Observes a text and an array of the size that its reset is given, and counts the letters of its actions."""

    observation_space = gymnasium.spaces.Dict({"text": TEXT, "array": gymnasium.spaces.Sequence(TEXT)})
    action_space = TEXT

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        size = (options or {}).get("size", 0)
        if (options or {}).get("is_limited"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        return {"text": "♥" + "x" * size, "array": np.full(size // 8, 7.0)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"text": action[-3:], "array": ()}, float(len(action)), False, False, {}


@contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", ["serial", "fork"])
def test_values_of_a_hundred_megabytes_arrive_unchanged_in_both_directions(where: str) -> None:
    with make_pool(where, [LargeEnv], on_fault="replay", seeding="per_episode") as pool:
        obs = pool.reset(seed=0, options={"size": LARGE}).obs
        text, array = obs["text"][0], obs["array"][0]
        assert (len(text), text[:2], text[-1]) == (LARGE + 1, "♥x", "x")
        assert (array.nbytes, array.dtype, set(array[:: 1 << 16])) == (LARGE, np.float64, {7.0})
        batch = pool.step(["x" * LARGE + "end"])
        assert (batch.obs["text"], batch.reward.tolist()) == (("end",), [LARGE + 3.0])
        assert pool.stats().replay_log_bytes == 0  # it exceeds the log, so the episode is not replayable


def test_an_action_that_exceeds_the_limit_is_refused_with_its_name_and_can_be_replaced_by_a_smaller_one() -> None:
    with begun(make_pool("fork", [LargeEnv] * 2)) as pool:
        with (
            file_limit(1 << 20),
            pytest.raises(stepmill.UsageError, match=r"action of env 1 .* 2000\d\d\d bytes .*ulimit -f"),
        ):
            pool.step(["small", "x" * 2_000_000])
        assert pool.step(["small", "x" * 2_000_000]).reward.tolist() == [5.0, 2e6]


def test_an_observation_that_exceeds_the_limit_is_a_fault_with_its_name() -> None:
    with make_pool("fork", [LargeEnv]) as pool:
        with pytest.raises(stepmill.StepmillError, match=r"env 0 .* 2\d* bytes must fit .*ulimit -f"):
            pool.reset(seed=0, options={"size": 1_000_000, "is_limited": True})
        assert pool.reset(seed=0, options={"size": 1000}).obs["text"][0][0] == "♥"
