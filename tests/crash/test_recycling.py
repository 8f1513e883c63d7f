"""Workers of leaky envs are restarted between episodes: nothing is lost, no value changes, and stats() counts it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.spec.errors import EnvError, UsageError
from stepmill.testing import CountingEnv
from stepmill.testing.compare import find_difference
from stepmill.testing.gates import Gate, wait_at
from tests.harness.leaky_envs import LeakyEnv
from tests.harness.pools import begun, kill_worker

STEPS = 40
Make = Callable[..., Any]


def make_pool(env_fns: Any, **options: Any) -> stepmill.Pool:
    return stepmill.Pool(env_fns, backend="process", **{"context": "fork", "envs_per_worker": 1, **options})


def leaky(num_envs: int, **arguments: Any) -> list[Callable[[], LeakyEnv]]:
    return [partial(LeakyEnv, identity, **arguments) for identity in range(num_envs)]


def recycles_of(pool: Any) -> list[int]:
    return [worker.recycles for worker in pool.stats().workers]


def columns(batch: stepmill.Batch) -> tuple[Any, ...]:
    return batch.obs, batch.reward, batch.terminated, batch.truncated, batch.env_id, dict(batch.info)


def play_together(pool: stepmill.Pool) -> Iterator[Any]:
    rng = np.random.default_rng(1)
    yield columns(pool.reset(seed=3))
    for _ in range(STEPS):
        yield columns(pool.step(rng.integers(0, 10, pool.num_envs)))


def play_with_resets(pool: stepmill.Pool) -> Iterator[Any]:
    """For DISABLED."""
    rng = np.random.default_rng(1)
    yield columns(pool.reset(seed=3))
    for _ in range(STEPS):
        batch = pool.step(rng.integers(0, 10, pool.num_envs))
        yield columns(batch)
        ended = np.flatnonzero(batch.terminated)
        if len(ended):
            yield columns(pool.reset(env_ids=ended))


def play_as_they_come(pool: stepmill.Pool) -> Iterator[Any]:
    """Half of the envs are always ahead. What each env returns is compared, because their order depends on timing."""
    seen: dict[int, list[Any]] = {env_id: [] for env_id in range(pool.num_envs)}
    pool.reset(seed=3)
    pool.send(np.arange(pool.num_envs))
    while min(map(len, seen.values())) < STEPS:
        batch = pool.recv(min_envs=2)
        for row, env_id in enumerate(batch.env_id.tolist()):
            seen[env_id].append((batch.obs[row].tolist(), batch.reward[row], batch.terminated[row]))
        pool.send(batch.env_id, batch.env_id)
    pool.recv()
    yield from ((env_id, results[:STEPS]) for env_id, results in seen.items())


@pytest.mark.parametrize(
    ("play", "options"),
    [
        (play_together, {}),
        pytest.param(play_together, {"seeding": "fixed"}, marks=pytest.mark.slow),
        pytest.param(play_together, {"on_fault": "replay"}, marks=pytest.mark.slow),
        (play_together, {"on_fault": "replay", "autoreset_mode": "SameStep"}),
        (play_together, {"resets": {"overlap": True}, "num_episodes": 12}),
        pytest.param(play_together, {"resets": {"spare_envs": 2}}, marks=pytest.mark.slow),
        (play_together, {"resets": {"spare_envs": 2}, "on_fault": "replay"}),
        pytest.param(play_with_resets, {"autoreset_mode": "Disabled"}, marks=pytest.mark.slow),
        (play_with_resets, {"autoreset_mode": "Disabled", "resets": {"spare_envs": 1}}),
        (play_as_they_come, {}),
    ],
    ids=lambda given: given.__name__ if callable(given) else str(given),
)
def test_a_run_has_the_same_values_with_and_without_recycling(play: Make, options: dict[str, Any]) -> None:
    chosen = {"seeding": "per_episode", **options}
    with make_pool(leaky(4), **chosen) as pool:
        expected = list(play(pool))
        assert sum(recycles_of(pool)) == 0
    with make_pool(leaky(4), restarts={"recycle_after_episodes": 2}, **chosen) as pool:
        actual = list(play(pool))
        workers = pool.stats().workers
    assert find_difference(actual, expected, "run") is None
    assert all(worker.recycles > 1 for worker in workers)
    assert all(worker.recycles - worker.restarts in (0, 1) for worker in workers)  # the last one may not have ended
    assert [worker.deaths for worker in workers] == [0] * len(workers)


def test_envs_of_a_worker_that_end_together_are_recycled_together() -> None:
    with make_pool(
        leaky(4, length=3), envs_per_worker=2, restarts={"recycle_after_episodes": 4}, seeding="per_episode"
    ) as pool:
        list(play_together(pool))
        assert recycles_of(pool) == [5, 5]  # after every second of ten episodes of three steps and a reset


def test_a_worker_is_not_recycled_while_one_of_its_envs_is_in_an_episode() -> None:
    endless = [partial(LeakyEnv, 0, length=3), partial(LeakyEnv, 1, length=10**9)]
    with make_pool(endless, envs_per_worker=2, restarts={"recycle_after_episodes": 1}) as pool:
        pids = pool.call("locate")
        list(play_together(pool))
        assert recycles_of(pool) == [0]
        assert pool.call("locate") == pids


def test_a_vector_env_recycles_too() -> None:
    def play(**options: Any) -> list[Any]:
        with stepmill.VectorEnv(leaky(3), backend="process", num_workers=3, seeding="per_episode", **options) as envs:
            results = [envs.reset(seed=5)]
            results += [envs.step(np.full(3, step % 10)) for step in range(STEPS)]
            assert (sum(recycles_of(envs)) > 3) is bool(options)
        return results

    assert find_difference(play(restarts={"recycle_after_episodes": 2}), play(), "run") is None


# ---- seeds under seeding="continue" --------------------------------------------------------------------------------------


def seeds_of(seed: int | None, **options: Any) -> list[list[int]]:
    """The seeds of all resets, by env."""
    with make_pool(leaky(2, length=3), **options) as pool:
        seeds = [[each] for each in pool.reset(seed=seed).info["seed"].tolist()]
        for _ in range(24):
            batch = pool.step([1, 1])
            for env_id in np.flatnonzero(batch.info.get("_seed", [])):
                seeds[env_id].append(int(batch.info["seed"][env_id]))
    return seeds


def test_a_generator_that_cannot_continue_is_seeded_as_per_episode_would_seed_it() -> None:
    derived = seeds_of(7, seeding="per_episode")
    continued = seeds_of(7, restarts={"recycle_after_episodes": 2})
    assert continued == [[own[0], -1, own[2], -1, own[4], -1, own[6]] for own in derived]
    assert seeds_of(7) == [[7] + [-1] * 6, [8] + [-1] * 6]


def test_a_run_without_a_seed_stays_without() -> None:
    assert seeds_of(None, restarts={"recycle_after_episodes": 2}) == [[-1] * 7] * 2


# ---- memory ----------------------------------------------------------------------------------------------------------------


def test_a_leaky_env_stays_below_its_limit_of_memory() -> None:
    leak_mb, spare_mb = 20, 90
    # A fork of this process would begin with its memory, which other tests let grow and shrink between the two pools.
    make = partial(make_pool, leaky(2, length=2, leak_mb=leak_mb), context="forkserver")
    with make() as pool:
        limit_mb = max(pool.call("measure_mb")) + spare_mb
    with begun(make(restarts={"recycle_above_mb": limit_mb}, seeding="per_episode")) as pool:
        used_mb = []
        for _ in range(3 * 16):  # 17 episodes would leak 340 MiB
            pool.step([1, 1])
            used_mb.append(max(pool.call("measure_mb")))
        recycles = recycles_of(pool)
    assert all(1 <= num <= 8 for num in recycles), recycles  # not after each of the 16 episodes
    assert max(used_mb) > limit_mb - leak_mb
    assert max(used_mb) < limit_mb + 2 * leak_mb


def test_memory_that_stays_below_the_limit_restarts_nothing() -> None:
    with make_pool(leaky(2, length=1), restarts={"recycle_above_mb": 1 << 20}) as pool:
        list(play_together(pool))
        assert recycles_of(pool) == [0, 0]


# ---- what belongs to a restart -----------------------------------------------------------------------------------------------


def test_settings_are_applied_again_and_envs_are_closed(tmp_path: Path) -> None:
    with make_pool(leaky(2, length=2, folder=tmp_path), restarts={"recycle_after_episodes": 1}) as pool:
        pids = pool.call("locate")
        pool.set_attr("level", [4, 5])
        pool.reset(seed=0)
        for _ in range(3):
            batch = pool.step([1, 1])
        assert batch.obs[:, 3].tolist() == [4, 5]
        assert recycles_of(pool) == [1, 1]
        assert {path.name for path in tmp_path.iterdir()} == {f"{env_id}-{pid}" for env_id, pid in enumerate(pids)}


def test_calls_that_meet_a_restart_are_neither_lost_nor_refused() -> None:
    with begun(make_pool(leaky(2, length=1), restarts={"recycle_after_episodes": 1})) as pool:
        for _ in range(4):
            pool.step([1, 1])
            before = pool.call_async("locate")  # has no answer when the next line ends the workers
            pool.send([1, 1])
            after = pool.call("locate")
            assert not set(before.result()) & set(after)
            pool.recv()
        assert recycles_of(pool) == [4, 4]


def test_restarts_between_episodes_do_not_count_as_restarts_after_faults() -> None:
    with begun(
        make_pool(leaky(2, length=1), restarts={"recycle_after_episodes": 1, "max_restarts": 1}, on_fault="truncate")
    ) as pool:
        for _ in range(8):
            pool.step([1, 1])
        kill_worker(pool, 0)
        for _ in range(4):
            pool.step([1, 1])
        first, second = pool.stats().workers
        assert (first.deaths, first.restarts - first.recycles) == (1, 1)
        assert (second.deaths, second.restarts - second.recycles) == (0, 0)
        assert second.recycles == 6


class BuiltOnce(CountingEnv):
    def __init__(self, flag: Path) -> None:
        if flag.exists():
            raise ValueError("only once")
        flag.touch()
        super().__init__(length=1)


def test_a_successor_that_cannot_be_built_is_an_error_of_the_step(tmp_path: Path) -> None:
    fns = [partial(BuiltOnce, tmp_path / "0"), CountingEnv]
    with begun(make_pool(fns, restarts={"recycle_after_episodes": 1, "max_restarts": 0})) as pool:
        pool.step([1, 1])
        with pytest.raises(EnvError, match="only once"):
            pool.step([1, 1])
        (tmp_path / "0").unlink()
        assert pool.reset(env_ids=[0]).obs.tolist() == [[0, 0, 0]]


class SlowToClose(LeakyEnv):
    gate: Path | None = None

    def close(self) -> None:
        if self.gate is not None:
            wait_at(self.gate)


def test_an_env_that_does_not_close_is_killed() -> None:
    with Gate() as gate, make_pool([SlowToClose, SlowToClose], restarts={"recycle_after_episodes": 1}) as pool:
        pool.set_attr("gate", gate.path)
        pids = pool.call("locate")
        pool.reset(seed=0)
        while not all(recycles_of(pool)):
            pool.step([1, 1])
        assert not set(pool.call("locate")) & set(pids)
        pool.set_attr("gate", None)


# ---- what cannot be ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"backend": "thread"}, {"backend": "serial"}], ids=str)
@pytest.mark.parametrize(
    "recycling", [{"restarts": {"recycle_after_episodes": 5}}, {"restarts": {"recycle_above_mb": 100}}], ids=str
)
def test_backends_without_processes_refuse(options: dict[str, Any], recycling: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"restart worker processes.*use backend='process'"):
        stepmill.Pool([CountingEnv] * 2, **options, **recycling)


def test_one_env_of_backend_auto_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="the backend 'serial' has none; use backend='process'"):
        stepmill.VectorEnv([CountingEnv], restarts={"recycle_above_mb": 100})


def test_kernels_refuse() -> None:
    with pytest.raises(UsageError, match="restart worker processes"):
        stepmill.make_vec("CartPole-v1", 2, backend="kernel", restarts={"recycle_after_episodes": 5})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"autoreset_mode": "SameStep"}, "need on_fault='replay' with autoreset_mode SAME_STEP"),
        ({"resets": {"spare_envs": 1}}, "need seeding='per_episode' or 'fixed' with resets.spare_envs"),
        (
            {"restarts": {"recycle_after_episodes": 0}},
            "recycle_after_episodes=0 must be a whole number, 1 or more, or None",
        ),
    ],
)
def test_what_cannot_keep_the_values_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        stepmill.PoolOptions(**{"restarts": {"recycle_after_episodes": 5}, **options})


def test_recycling_and_deaths_by_chance_lose_no_step() -> None:
    """Under on_fault="replay" a kill at any moment, also during a restart, changes no value."""
    chosen = {"seeding": "per_episode", "on_fault": "replay"}
    with make_pool(leaky(3), **chosen) as pool:
        expected = list(play_together(pool))
    rng = np.random.default_rng(5)
    with make_pool(leaky(3), restarts={"recycle_after_episodes": 2, "max_restarts": 1000}, **chosen) as pool:
        actual = []
        for results, step in zip(play_together(pool), itertools.count()):
            actual.append(results)
            if step % 4 == 3:
                kill_worker(pool, int(rng.integers(3)))
        assert sum(worker.deaths for worker in pool.stats().workers) > 3
        assert sum(recycles_of(pool)) > 3
    assert find_difference(actual, expected, "run") is None
