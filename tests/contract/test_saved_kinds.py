"""Ten kinds of envs are saved at random moments, and go on elsewhere with the same bits; also envs at their begin, and some of a pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from tests.contract.test_saving import BACKENDS, LOGGED, SERIAL, Wanderer, record
from tests.harness.effort import examples


def make_pong() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make("ALE/Pong-v5", frameskip=1))
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def make_tag() -> Any:
    from tests.harness.envs_of_other_apis import Tag

    return Tag()


class Chatter(gymnasium.Env[Any, Any]):
    """Observations and actions without a fixed size."""

    observation_space = spaces.Tuple([spaces.Text(80), spaces.Sequence(spaces.Discrete(5))])
    action_space = spaces.Text(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.said = ""
        return self._obs(), {}

    def _obs(self) -> Any:
        return self.said[-80:], tuple(int(each) for each in self.np_random.integers(0, 5, len(self.said) % 3))

    def step(self, action: Any) -> Any:
        self.said += action
        return self._obs(), float(len(self.said)), len(self.said) > 60, False, {"said": self.said}


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "classic": (partial(gymnasium.make, "Acrobot-v1", max_episode_steps=40), {}),
    "toy text": (partial(gymnasium.make, "FrozenLake-v1"), {}),
    "mujoco": (partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=50), {}),
    "atari": (make_pong, {}),
    "dict": (Wanderer, {"autoreset_mode": "SameStep"}),
    "agents": (make_tag, {}),
    "text": (Chatter, {}),
    "batched": (partial(gymnasium.make_vec, "CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"), {}),
    "kernel": (partial(stepmill.kernels.find, "CartPole-v1"), {"backend": "kernel"}),
    "spares": (Wanderer, {"resets": {"spare_envs": 2}}),
}


def make_pool(kind: str, backend: str, workers: dict[str, Any]) -> stepmill.Pool:
    make, options = KINDS[kind]
    if kind == "kernel":
        return stepmill.Pool([make()] * 4, **options)
    num_fns = 4 + options.get("resets", {}).get("spare_envs", 0)
    return stepmill.Pool([make] * num_fns, backend=backend, **LOGGED, **options, **workers)


def sample(pool: stepmill.Pool, numbers: np.random.Generator) -> Any:
    if pool.spec.agents:
        return {name: numbers.integers(0, 5, pool.num_rows) for name in pool.spec.agents}
    space = pool.single_action_space
    actions = [space.sample() for _ in range(pool.num_rows)]
    return actions if isinstance(space, spaces.Text) else np.array(actions)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "workers"), BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_envs_of_each_kind_go_on_with_the_same_bits(kind: str, backend: str, workers: Any) -> None:
    for needed in {"mujoco": ["mujoco"], "atari": ["ale_py", "cv2"], "kernel": ["numba"]}.get(kind, ()):
        pytest.importorskip(needed)
    moments = random.Random(f"{kind} {backend}")
    for _ in range(examples(1)):
        with make_pool(kind, backend, workers) as pool, make_pool(kind, backend, workers) as other:
            numbers = np.random.default_rng(moments.randrange(1000))
            if not pool.spec.agents:
                pool.single_action_space.seed(moments.randrange(1000))
            pool.reset(seed=moments.randrange(1000))
            for _ in range(moments.randrange(1, 120)):
                newest = record(pool.step(sample(pool, numbers)))
            saved = stepmill.save(pool, None)
            assert record(stepmill.restore(other, saved)) == newest
            for _ in range(200):
                actions = sample(pool, numbers)
                assert record(other.step(actions)) == record(pool.step(actions))


def test_envs_that_were_never_reset_are_saved_and_restored() -> None:
    with stepmill.Pool([Wanderer] * 2, **SERIAL) as pool, stepmill.Pool([Wanderer] * 2, **SERIAL) as other:
        stepmill.restore(other, stepmill.save(pool, None))
        assert record(other.reset(seed=3)) == record(pool.reset(seed=3))


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_save_after_a_partial_restore_has_the_infos_of_the_other_envs(is_restored: bool) -> None:
    with stepmill.Pool([Wanderer] * 3, **SERIAL) as pool, stepmill.Pool([Wanderer] * 3, **SERIAL) as other:
        pool.reset(seed=3)
        pool.step([1, 2, 3])
        saved = stepmill.save(pool, None, env_ids=[1])
        pool.step([4, 5, 6])
        pool.step([7, 8, 9])
        if is_restored:
            stepmill.restore(pool, stepmill.save(pool, None))
        stepmill.restore(pool, saved, env_ids=[0])
        info = stepmill.restore(other, stepmill.save(pool, None)).info
        assert info["action"][1:].tolist() == [8, 9]
        assert info["deep"]["path"][1:].tolist() == [[0, 3, 6]] * 2
        assert not info["_action"][0] or info["action"][0] == 2
