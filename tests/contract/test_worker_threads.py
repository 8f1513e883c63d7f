"""Workers with several threads: each thread runs envs of its own, and one that blocks does not delay those of other threads."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.pool.plans import plan_workers
from stepmill.pool.stats import read_timers
from tests.chaos import ChaosEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun

MEET, WAIT = 8, 9
PARTIES = 32
MEETING = threading.Barrier(PARTIES)
GATE = threading.Event()
NUM_INITS = [0]


class BlockingEnv(ChaosEnv):
    """Blocks by action: until as many envs of its process do as are PARTIES, or until another env of its process opens the gate."""

    def __init__(self, identity: int = 0, length: int = 5) -> None:
        super().__init__(identity, length)
        self._thread = threading.get_ident()
        self._num_strangers = 0

    def reset(self, **keywords: Any) -> Any:
        self._check_thread()
        obs, _ = super().reset(**keywords)
        return obs, {"pid": os.getpid()}

    def step(self, action: np.int64) -> Any:
        self._check_thread()
        if action == MEET:
            MEETING.wait(HANG_GUARD_S)
        if action == WAIT:
            assert GATE.wait(HANG_GUARD_S)
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"pid": os.getpid(), "strangers": self._num_strangers}

    def _check_thread(self) -> None:
        self._num_strangers += threading.get_ident() != self._thread

    def open_gate(self) -> int:
        self._check_thread()
        GATE.set()
        return self._num_strangers


def make_pool(num_envs: int, *, threads: int, lengths: int = 5, **options: Any) -> stepmill.Pool:
    env_fns = [partial(BlockingEnv, env_id, lengths + env_id % 3) for env_id in range(num_envs)]
    return stepmill.Pool(env_fns, backend="process", workers={"threads_per_worker": threads}, **options)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_64_envs_that_block_run_in_two_processes(context: Any) -> None:
    with make_pool(64, threads=PARTIES, context=context) as pool:
        assert pool.num_workers == 2
        pool.reset(seed=0)

        batch = pool.step([MEET] * 64)  # no env of a process goes on before all of them are in their steps

        assert len(set(batch.info["pid"].tolist())) == 2
        assert not batch.info["strangers"].any()
        assert batch.obs[:, 0].tolist() == list(range(64))


def play(pool: stepmill.Pool, mode: str) -> list[Any]:
    """Return all results of some steps, with some resets of some envs."""
    rng = np.random.default_rng(1)
    first = pool.reset(seed=3)
    found: list[Any] = [first.obs.tolist()]
    for step in range(25):
        batch = pool.step(rng.integers(0, 8, pool.num_envs))
        episodes = batch.info["episode"]["r"].tolist() if "episode" in batch.info else None
        finals = [None if each is None else list(each) for each in batch.info.get("final_obs", ())]
        fields = (batch.obs, batch.reward, batch.terminated, batch.truncated)
        found.append([each.tolist() for each in fields] + [episodes, finals])
        ended = np.flatnonzero(batch.terminated | batch.truncated).tolist() if mode == "Disabled" else []
        ended += [2] if step % 7 == 3 and 2 not in ended else []
        if ended:
            found.append(pool.reset(env_ids=sorted(ended)).obs.tolist())
    return found


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_results_are_those_of_the_serial_backend(mode: Any, threads: int) -> None:
    env_fns = [partial(ChaosEnv, env_id, 4 + env_id % 3) for env_id in range(7)]
    shared: dict[str, Any] = {"autoreset_mode": mode, "seeding": "per_episode"}
    with stepmill.Pool(env_fns, backend="serial", **shared) as pool:
        expected = play(pool, mode)
    with stepmill.Pool(
        env_fns, num_workers=2, workers={"threads_per_worker": threads}, context="fork", **shared
    ) as pool:
        assert play(pool, mode) == expected


@pytest.mark.parametrize("resets", [{"spare_envs": 3}, {"overlap": True}])
def test_spares_and_early_resets_give_the_results_of_one_thread(resets: Any) -> None:
    env_fns = [partial(ChaosEnv, env_id, 4) for env_id in range(8)]
    found = []
    for threads in (1, 3):
        workers = {"threads_per_worker": threads}
        with stepmill.Pool(env_fns, num_workers=2, workers=workers, resets=resets, seeding="per_episode") as pool:
            pool.reset(seed=0)
            found.append([pool.step([1] * pool.num_envs).obs.tolist() for _ in range(12)])
    assert found[0] == found[1]


def test_a_call_to_one_env_does_not_wait_for_the_step_of_another() -> None:
    with begun(make_pool(4, threads=2, num_workers=2, context="fork")) as pool:
        pool.send([WAIT], env_ids=[1])

        assert pool.call("open_gate", env_ids=[0]) == (0,)  # in the same process, which the step of env 1 waits for

        assert pool.recv(1).env_id.tolist() == [1]


def test_calls_and_attributes_reach_their_envs() -> None:
    with begun(make_pool(7, threads=3, num_workers=2, context="fork")) as pool:
        assert pool.call("locate") == tuple(range(7))
        pool.set_attr("height", [10 * env_id for env_id in range(7)])
        pool.set_attr("height", [-1, -2], env_ids=[6, 2])
        assert pool.get_attr("height") == (0, 10, -2, 30, 40, 50, -1)
        with pytest.raises(stepmill.EnvError, match="env 5"):
            pool.call("no_such_method", env_ids=[5])


def test_settings_are_restored_in_all_threads_of_a_restarted_worker() -> None:
    with begun(make_pool(7, threads=3, num_workers=2, context="fork")) as pool:
        pool.set_attr("height", [10 * env_id for env_id in range(7)])
        before = set(pool.call("locate")), pool.reset().info["pid"]

        pool.revive([4], restart_living=True)
        pool.reset()

        after = set(pool.call("locate")), pool.reset().info["pid"]
        assert after[0] == before[0]
        assert (after[1] != before[1]).tolist() == [False] * 3 + [True] * 4
        assert pool.get_attr("height") == tuple(10 * env_id for env_id in range(7))


def test_workers_are_recycled_by_the_episodes_of_all_their_threads() -> None:
    with make_pool(4, threads=2, num_workers=2, restarts={"recycle_after_episodes": 2}, lengths=1) as pool:
        first = pool.reset(seed=0).info["pid"]
        for _ in range(12):
            pool.step([1] * 4)
        batch = pool.reset()
        stats = pool.stats()
    assert not set(batch.info["pid"].tolist()) & set(first.tolist())
    assert [worker.recycles for worker in stats.workers][1::2] == [0, 0]
    assert all(worker.recycles > 0 for worker in stats.workers[::2])
    assert sum(worker.deaths for worker in stats.workers) == 0


def test_each_thread_has_its_statistics_and_timers() -> None:
    with begun(make_pool(6, threads=3, num_workers=2, context="fork", tuning={"timers_every": 1})) as pool:
        pool.step([1] * 6)
        stats = pool.stats()
        assert [worker.steps for worker in stats.workers] == [1] * 6
        assert len({worker.pid for worker in stats.workers}) == 2
        assert read_timers(pool)["metadata"]["num_workers"] == 6


def count_inits() -> None:
    NUM_INITS[0] += 1


class InitEnv(BlockingEnv):
    def count_inits(self) -> int:
        return NUM_INITS[0]


def test_the_function_for_workers_is_called_once_in_each_process() -> None:
    workers = {"threads_per_worker": 2, "init": count_inits}
    with stepmill.Pool([InitEnv] * 4, num_workers=2, workers=workers) as pool:
        assert pool.call("count_inits") == (1, 1, 1, 1)


class Bricks(ChaosEnv):
    """Cannot be built, if it is env 2. The others write that they were closed."""

    def __init__(self, folder: str, identity: int) -> None:
        if identity == 2:
            raise LookupError("no bricks")
        super().__init__(identity)
        self._folder = folder

    def close(self) -> None:
        with open(os.path.join(self._folder, str(self.identity)), "x"):
            pass


def test_an_env_that_cannot_be_built_is_named_and_the_others_are_closed_once(tmp_path: Any) -> None:
    env_fns = [partial(Bricks, str(tmp_path), env_id) for env_id in range(4)]
    with pytest.raises(stepmill.EnvError, match="env 2 raised LookupError in construct"):
        stepmill.Pool(env_fns, num_workers=1, workers={"threads_per_worker": 4}, context="fork")
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "3"]


def test_close_closes_the_envs_of_all_threads_once(tmp_path: Any) -> None:
    env_fns = [partial(Bricks, str(tmp_path), env_id) for env_id in (0, 1, 3, 4, 5)]
    stepmill.Pool(env_fns, num_workers=2, workers={"threads_per_worker": 2}, context="fork").close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "3", "4", "5"]


def lanes_of(num_envs: int, threads: int, **options: Any) -> list[dict[int, tuple[int, ...]]]:
    workers = {"threads_per_worker": threads}
    chosen = stepmill.PoolOptions(backend="process", workers=workers, **options)
    return [plan.lanes for plan in plan_workers([ChaosEnv] * num_envs, chosen)]


def test_envs_are_divided_evenly_among_workers_and_their_threads() -> None:
    assert lanes_of(7, 2, num_workers=2) == [{0: (0,), 1: (1, 2)}, {2: (3, 4), 3: (5, 6)}]
    assert lanes_of(3, 8, num_workers=2) == [{0: (0,)}, {1: (1,), 2: (2,)}]
    assert lanes_of(4, 2, envs_per_worker=4) == [{0: (0, 1), 1: (2, 3)}]
    assert len(lanes_of(256, 32)) == 8  # without a number of workers, each env has a thread


def test_where_threads_of_workers_do_not_work_is_said() -> None:
    workers = {"threads_per_worker": 2}
    with pytest.raises(stepmill.UsageError, match=r"threads_per_worker=2 does not work with backend='ray'"):
        stepmill.PoolOptions(backend="ray", workers=workers)
    with pytest.raises(stepmill.UsageError, match=r"backend='envpool' does not support workers\.threads_per_worker"):
        stepmill.PoolOptions(backend="envpool", workers=workers)
    with pytest.raises(stepmill.UsageError, match="threads_per_worker"):
        stepmill.PoolOptions(workers={"threads_per_worker": 0})
    for backend in ("serial", "thread"):
        with pytest.warns(RuntimeWarning, match=r"threads_per_worker: no effect"):
            stepmill.Pool([ChaosEnv] * 2, backend=backend, workers=workers).close()  # type: ignore[arg-type]


class Pictures(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(256)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros((64, 64, 3), np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.full((64, 64, 3), action, np.uint8), 0.0, False, False, {"large": bytes(100_000)}


def test_observations_that_are_lent_and_large_infos_come_from_all_threads() -> None:
    with stepmill.Pool([Pictures] * 6, num_workers=2, workers={"threads_per_worker": 2}, context="fork") as pool:
        pool.reset()
        held = [pool.step(list(range(first, first + 6))) for first in (0, 100)]
        assert pool.stats().leased_slots > 0
        for first, batch in zip((0, 100), held, strict=True):
            assert batch.obs[:, 63, 63, 2].tolist() == list(range(first, first + 6))
        assert [len(each) for each in held[1].info["large"]] == [100_000] * 6
