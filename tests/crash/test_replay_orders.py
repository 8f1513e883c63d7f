"""Policy replay under orders of any kind: a pool whose workers are killed returns what a pool without kills returns.

Steps of all and of some, results received in parts, resets of some with and without seeds and options, budgets of
episodes, spares, overlapped resets. What an episode was begun with shows late: a replay from something else is not noticed
by the comparison of what was there before.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.pool.port import PoolPort
from tests.chaos import ChaosEnv
from tests.harness.pools import begun, kill_worker

NUM_ENVS, NUM_TURNS = 4, 50
RESETS: list[dict[str, Any]] = [
    {},
    {"seed": 77},
    {"options": {"gain": 7}},
    {"seed": 5, "options": {"gain": 3}},
    {"seed": [2**70 + env_id for env_id in range(NUM_ENVS)]},
]


class HoardingEnv(ChaosEnv):
    """Its rewards are all that it was given since its reset, and are given from the third step on."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        self._hoard = (options or {}).get("gain", 0) + self.np_random.random()
        return self._veil(obs), info

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        self._hoard = self._hoard * 1.01 + int(action) * self._clock
        return self._veil(obs), self._hoard if self._clock >= 3 else 0.0, terminated, truncated, info

    def _veil(self, obs: Any) -> Any:
        obs[1] = obs[3] = 0
        return obs


def make(on_fault: str, **options: Any) -> stepmill.Pool:
    chosen = stepmill.PoolOptions(
        on_fault=on_fault,
        seeding="per_episode",
        context="fork",
        restarts={"max_restarts": 1000, "restart_window_s": 0.02},
        num_episodes=3,
        **options,
    )
    num_objects = NUM_ENVS + chosen.resets.spare_envs
    return stepmill.Pool(
        [partial(HoardingEnv, i, 5 + i % 3) for i in range(num_objects)],
        backend="process",
        num_workers=2,
        options=chosen,
    )


def play(pool: stepmill.Pool, seed: int, kills: random.Random | None) -> Iterator[list[Any]]:
    """Play a game that depends on the seed alone, and on what the pool gives; kill workers now and then."""
    rng = random.Random(seed)
    over = [False] * NUM_ENVS
    batches = [pool.reset(seed=seed)]
    for _ in range(NUM_TURNS):
        if kills is not None and kills.random() < 0.12:
            os.kill(kills.choice(pool.stats().workers).pid, signal.SIGKILL)
        batches = _turn(pool, rng, over)
        for batch in batches:
            ends = (batch.terminated | batch.truncated).tolist()
            for env_id, is_end in zip(batch.env_id.tolist(), ends, strict=True):
                over[env_id] = is_end
            yield [batch.env_id.tolist(), batch.obs.tolist(), batch.reward.tolist(), ends, "fault" in batch.info]


def _turn(pool: stepmill.Pool, rng: random.Random, over: list[bool]) -> list[stepmill.Batch]:
    is_disabled = pool.options.autoreset_mode.value == "Disabled"
    live = [i for i in range(NUM_ENVS) if not pool.exhausted[i] and not (is_disabled and over[i])]
    draw = rng.random()
    if draw < 0.12 or not live:
        ids = sorted(rng.sample(range(NUM_ENVS), rng.randint(1, NUM_ENVS))) if rng.random() < 0.7 else None
        return [pool.reset(env_ids=ids, **rng.choice(RESETS))]
    is_all = draw < 0.6 and len(live) == NUM_ENVS
    ids = live if is_all else sorted(rng.sample(live, rng.randint(1, len(live))))
    pool.send([rng.randrange(10) for _ in ids], None if is_all else ids)
    first = rng.randint(1, len(ids))
    parts = [ids] if rng.random() < 0.6 else [ids[:first], ids[first:]]
    return [pool.recv(env_ids=part) for part in parts if part]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("NextStep", {}),
        ("SameStep", {}),
        pytest.param("Disabled", {}, marks=pytest.mark.slow),
        pytest.param("NextStep", {"resets": {"overlap": True}}, marks=pytest.mark.slow),
        pytest.param("NextStep", {"resets": {"spare_envs": 1}}, marks=pytest.mark.slow),
        ("Disabled", {"resets": {"spare_envs": 1}}),
    ],
)
def test_killed_workers_change_no_bit_in_whatever_order_envs_are_used(mode: str, options: dict[str, Any]) -> None:
    for seed in (1, 2):
        with (
            make("replay", autoreset_mode=mode, **options) as pool,
            make("raise", autoreset_mode=mode, **options) as calm,
        ):
            rows = zip(play(pool, seed, random.Random(seed)), play(calm, seed, None), strict=True)
            for turn, (ours, theirs) in enumerate(rows):
                assert ours == theirs, (seed, turn)


@pytest.mark.parametrize("on_fault", ["raise", "truncate"])
def test_a_reset_without_a_seed_after_a_death_goes_on_with_the_seeds_of_old(on_fault: str) -> None:
    with make(on_fault) as pool, make("raise") as calm:
        for each in (pool, calm):
            each.reset(seed=3), each.step([1] * NUM_ENVS)
        pool.send([10], [0])
        if on_fault == "raise":
            with pytest.raises(stepmill.WorkerDied):
                pool.recv()
        else:
            pool.recv()
        for each in (pool, calm):
            each.reset()
        for _ in range(3):
            ours, theirs = pool.step([1] * NUM_ENVS), calm.step([1] * NUM_ENVS)
        assert ours.reward.tolist() == theirs.reward.tolist()


@pytest.mark.parametrize("on_fault", ["replay", "truncate"])
def test_a_reset_of_an_exhausted_env_whose_worker_died_leaves_its_neighbour_to_the_policy(on_fault: str) -> None:
    with begun(make(on_fault)) as pool:
        while not pool.exhausted[0]:  # the shortest episodes; worker 0 has envs 0 and 1
            pool.step([1] * NUM_ENVS)
        before = PoolPort(pool).num_ended.tolist()
        kill_worker(pool)

        pool.reset(env_ids=[0])
        batch = pool.step([1] * NUM_ENVS)

        assert batch.truncated.tolist() == [False, on_fault == "truncate", False, False]
        assert PoolPort(pool).num_ended.tolist() == [0, before[1] + (on_fault == "truncate"), *before[2:]]
