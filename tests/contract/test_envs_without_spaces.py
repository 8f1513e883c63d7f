"""Envs in Gymnasium's API that declare no spaces, or only one: any picklable value is an observation or an action."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.testing.sampled import describe
from tests.harness.kills import kill_process
from tests.harness.pools import begun, make_pool

WHERE = ["serial", "thread", "fork", "forkserver"]
NUM_ENVS = 3


@dataclass(frozen=True)
class Move:
    """A value of a class of its own."""

    to: tuple[int, int]
    note: str = ""


class FreeEnv:
    """Not of Gymnasium's class, and without spaces. Its observations are values of all kinds."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._rng = random.Random(seed if seed is None else int(seed))
        self._story: list[Any] = []
        return self._observe(), {"seed": seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._story.append(action)
        number = self._rng.random()
        return self._observe(), number, len(self._story) == 4, False, {"seen": type(action).__name__}

    def count_turns(self) -> int:
        return len(self._story)

    def _observe(self) -> Any:
        story = [describe(action) for action in self._story]
        forms = ["\n".join(story), {"turns": story}, Move((len(story), 0)), None, np.arange(len(story)), tuple(story)]
        return self._rng.choice(forms)


class HalfEnv(gymnasium.Env[Any, Any]):
    """Of Gymnasium's class, with those spaces that it is given; None declares none."""

    def __init__(self, **declared: gymnasium.Space[Any] | None) -> None:
        for name, space in declared.items():
            setattr(self, name, space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.full(2, float(len(str(action)))), 1.0, False, False, {"echo": str(action)}


OBSERVED = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTIONS: list[Any] = [
    "a text",
    {"tool": "search", "args": ["x"] * 200},
    Move((1, 2)),
    5,
    None,
    b"\0",
    [np.float32(1.5)],
]


def draw(rng: random.Random) -> list[Any]:
    return [rng.choice(ACTIONS) for _ in range(NUM_ENVS)]


def facts(batch: stepmill.Batch) -> str:
    assert isinstance(batch.obs, tuple)
    infos = {key: batch.info.get(key) for key in ("seed", "seen", "final_obs", "fault")}
    return describe(
        [repr(batch.obs), [*map(describe, batch.obs)], batch.reward, batch.terminated, batch.truncated, infos]
    )


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("where", WHERE)
def test_values_of_any_kind_reach_envs_without_spaces_and_come_back(where: str, mode: str) -> None:
    rng = random.Random(1)
    with make_pool(where, [FreeEnv] * NUM_ENVS, autoreset_mode=mode, seeding="per_episode") as pool:
        envs = [FreeEnv() for _ in range(NUM_ENVS)]
        first = [env.reset(seed=7 + env_id) for env_id, env in enumerate(envs)]
        batch = pool.reset(seed=7)
        assert list(map(describe, batch.obs)) == [describe(obs) for obs, _ in first]
        assert batch.info["seed"].tolist() == [7, 8, 9]
        for _ in range(3):
            actions = draw(rng)
            rows = [env.step(action) for env, action in zip(envs, actions, strict=True)]
            batch = pool.step(actions)
            assert list(map(describe, batch.obs)) == [describe(row[0]) for row in rows]
            assert batch.reward.tolist() == [row[1] for row in rows]
            assert batch.info["seen"].tolist() == [row[4]["seen"] for row in rows]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_their_episodes_are_replayed_with_every_value_equal(context: str, mode: str) -> None:
    rng = random.Random(2)
    options = {"autoreset_mode": mode, "seeding": "per_episode", "context": context}
    restarts = {"max_restarts": 100, "restart_window_s": 0.02}
    with (
        make_pool(context, [FreeEnv] * NUM_ENVS, on_fault="replay", restarts=restarts, **options) as pool,
        make_pool("serial", [FreeEnv] * NUM_ENVS, autoreset_mode=mode, seeding="per_episode") as calm,
    ):
        assert facts(pool.reset(seed=1)) == facts(calm.reset(seed=1))
        for step in range(20 if context == "fork" else 9):
            actions = draw(rng)
            if step % 4 == 2:
                kill_process(pool.stats().workers[rng.randrange(2)].pid)
            ours, theirs = pool.step(actions), calm.step(actions)
            assert facts(ours) == facts(theirs), step
            if mode == "Disabled" and ours.terminated.any():
                pool.reset(), calm.reset()


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("is_none", [False, True])
def test_one_of_the_spaces_may_be_missing(where: str, name: str, is_none: bool) -> None:
    spaces = {"observation_space": OBSERVED, "action_space": gymnasium.spaces.Discrete(200)}
    ((other, space),) = ((key, space) for key, space in spaces.items() if key != name)
    env_fn = partial(HalfEnv, **{other: space}, **({name: None} if is_none else {}))
    actions: list[Any] = [3, 100] if name == "observation_space" else ["abc", {"x": 1}]
    with make_pool(where, [env_fn] * 2) as pool:
        assert isinstance(pool.reset(seed=0).obs, tuple if name == "observation_space" else np.ndarray)
        batch = pool.step(actions)
        assert np.array_equal(batch.obs, [[len(str(action))] * 2 for action in actions])
        assert batch.info["echo"].tolist() == list(map(str, actions))
        assert getattr(pool, f"single_{other}") == space
        with pytest.raises(stepmill.UsageError, match=f"the envs declare no {name}; set"):
            getattr(pool, name)
        with pytest.raises(stepmill.UsageError, match=f"the envs declare no {name}; set"):
            getattr(pool, f"single_{name}")


def test_a_vector_env_says_which_space_is_missing() -> None:
    with pytest.raises(
        stepmill.UsageError, match=r"declare no observation_space and no action_space, which .* use stepmill\.Pool"
    ):
        stepmill.VectorEnv([FreeEnv] * 2, backend="serial")
    with pytest.raises(stepmill.UsageError, match="declare no action_space, which"):
        stepmill.VectorEnv([partial(HalfEnv, observation_space=OBSERVED)] * 2, backend="serial")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (("x", "good", False, False, {}), "reward must be a number"),
        (("x", 0.0, np.zeros(2), False, {}), "terminated must be True or False"),
        (("x", 0.0, False, False, None), "info must be a dict"),
        (("x", 0.0, False, {}), "five values"),
    ],
)
def test_what_is_not_the_observation_is_checked_as_always(result: Any, message: str) -> None:
    class Wrong(FreeEnv):
        def step(self, action: Any) -> Any:
            return result

    with begun(make_pool("fork", [Wrong])) as pool, pytest.raises(stepmill.StepmillError, match=message):
        pool.step(["a"])


def test_one_action_for_several_envs_is_refused() -> None:
    with begun(make_pool("serial", [FreeEnv] * 2)) as pool:
        with pytest.raises(stepmill.UsageError, match="got 3 actions for 2 envs"):
            pool.step(["a", "b", "c"])
        with pytest.raises(stepmill.UsageError, match="one item per env"):
            pool.step(5)


def test_methods_and_attributes_of_such_envs_are_reached_and_they_need_no_close() -> None:
    with make_pool("fork", [FreeEnv] * 2) as pool:
        pool.set_attr("name", ["a", "b"])
        assert pool.get_attr("name") == ("a", "b")
        pool.reset(seed=3)
        pool.step(["x", {"y": 2}])
        assert pool.call("count_turns") == (1, 1)


def test_an_async_pool_takes_such_envs_and_replays_their_episodes() -> None:
    async def play() -> list[Any]:
        options = {"on_fault": "replay", "seeding": "per_episode", "context": "fork"}
        async with stepmill.AsyncPool(FreeEnv, num_envs=1, num_workers=1, **options) as pool, pool.lease() as env:
            rows = [(await env.reset(seed=3))[0]]
            for action in ACTIONS[:3]:
                kill_process(pool.pool.stats().workers[0].pid)
                rows.append((await env.step(action))[:4])
            return rows

    env = FreeEnv()
    expected = [env.reset(seed=3)[0], *(env.step(action)[:4] for action in ACTIONS[:3])]
    assert describe(asyncio.run(play())) == describe(expected)
