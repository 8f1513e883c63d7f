"""What a step returned stays so, also if the env returns the same arrays, lists and dicts from its next reset."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from tests.harness.external_pools import CountingPool, Script
from tests.harness.pools import make_pool, make_vector_env

WHERE = ["serial", "thread", "fork"]


class Reused(gymnasium.Env[Any, Any]):
    """Returns its own objects in each observation and info, and changes them in place. An episode has two steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(mark=spaces.Box(0, 9, (1,), np.uint8), said=spaces.Sequence(action_space))

    def __init__(self) -> None:
        self.array, self.items, self.time = np.zeros(1), [0, [0]], 0
        self.obs: dict[str, Any] = {"mark": np.zeros(1, np.uint8), "said": []}
        self.info: dict[str, Any] = {"array": self.array, "deep": {"a": self.array}, "list": self.items, "odd": {self}}

    def _put(self) -> tuple[Any, dict[str, Any]]:
        self.obs["mark"][:], self.obs["said"][:] = self.time, range(self.time)
        self.array[:] = self.items[0] = self.items[1][0] = self.info["number"] = self.time
        return self.obs, self.info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.time = 0
        return self._put()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        obs, info = self._put()
        return obs, 1.0, self.time == 2, False, info


class ReusedInCoroutines(Reused):
    async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().reset(**kwargs)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        return super().step(action)


def _check(info: Any, time: int) -> None:
    assert info["array"].tolist() == info["deep"]["a"].tolist() == [[time], [time]]
    assert info["list"].tolist() == [[time, [time]]] * 2
    assert info["number"].tolist() == [time, time]


@pytest.mark.parametrize("kind", [Reused, ReusedInCoroutines])
@pytest.mark.parametrize("where", WHERE)
def test_a_final_observation_and_its_info_have_the_values_of_the_last_step(where, kind):
    with make_pool(where, [kind] * 2, autoreset_mode="SameStep") as pool:
        pool.reset()
        for _ in range(2):
            pool.step([0, 0])
            obs, *_, info = pool.step([0, 0])
            assert (obs["mark"].tolist(), [*obs["said"]]) == ([[0], [0]], [[], []])
            assert [[*map(list, final.values())] for final in info["final_obs"]] == [[[2], [0, 1]]] * 2
            _check(info, 0)
            _check(info["final_info"], 2)


class UnsendableEnd(Reused):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"bad": (each for each in ())} if terminated else {}


def test_a_last_info_that_cannot_be_sent_is_the_fault_of_the_step():
    with make_pool("fork", [UnsendableEnd], autoreset_mode="SameStep") as pool:
        pool.reset()
        pool.step([0])
        with pytest.raises(stepmill.BadOutput, match=r"wrong info of step: info\['bad'\]"):
            pool.step([0])


class ReusingPool(CountingPool):
    """Returns its own array in all infos."""

    def __init__(self, num_envs: int, script: Script) -> None:
        super().__init__(num_envs, script)
        self.array = np.zeros((num_envs, 2))

    def recv(self) -> Any:
        *others, infos = super().recv()
        self.array[:] = infos["time"][:, None]
        return *others, {**infos, "array": self.array}


class ReusingScript(Script):
    def make_pool(self, num_envs: int) -> Any:
        return ReusingPool(num_envs, self), super().make_pool(num_envs)[1]


def test_a_final_info_of_a_external_pool_has_the_values_of_the_last_step():
    script = ReusingScript(length=2, info_bytes=1)
    options = stepmill.PoolOptions(autoreset_mode="SameStep")
    with stepmill.Pool([script] * 2, backend="envpool", options=options) as pool:
        pool.reset()
        pool.step([0, 0])
        assert pool.step([0, 0]).info["final_info"]["array"].tolist() == [[2, 2], [2, 2]]


class ScalarParts(gymnasium.Env[Any, Any]):
    """Observations have parts without a dimension. An episode has one step."""

    observation_space = spaces.Dict(
        a=spaces.Box(0, 9, (), np.float32), b=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 9, (), np.float64)])
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"a": np.array(0, np.float32), "b": (np.int64(0), np.array(1.0))}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"a": np.array(4, np.float32), "b": (np.int64(2), np.array(5.0))}, 0.0, True, False, {}


@pytest.mark.parametrize("where", ["serial", "fork"])
def test_final_observations_have_the_types_that_sync_vector_env_gives(where):
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    makers = [partial(gymnasium.vector.SyncVectorEnv), partial(make_vector_env, where)]
    finals = []
    for make in makers:
        envs = make([ScalarParts] * 2, autoreset_mode=same_step)
        envs.reset()
        finals.append(envs.step(np.zeros(2, int))[4]["final_obs"])
        envs.close()
    for theirs, ours in zip(*finals, strict=True):
        for each, own in [(theirs["a"], ours["a"]), *zip(theirs["b"], ours["b"], strict=True)]:
            assert type(each) is type(own)
            assert each.dtype == own.dtype
            assert each == own
