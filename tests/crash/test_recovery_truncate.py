"""Policy truncate: a broken episode ends, is marked, and the next one begins; healthy envs notice nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from tests.chaos import KILL, RAISE, ChaosEnv
from tests.chaos.envs import TrappedEnv, Traps, length_of, make_env
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import EnvFns, await_restart, begun, kill_worker, make_pool


def pool_of(env_fns: EnvFns, where: str = "fork", **options: Any) -> stepmill.Pool:
    return make_pool(where, env_fns, **{"on_fault": "truncate", "seeding": "per_episode", **options})


def make(num_envs: int = 4, where: str = "fork", **options: Any) -> stepmill.Pool:
    return pool_of([partial(ChaosEnv, env_id) for env_id in range(num_envs)], where, **options)


def kinds(batch: stepmill.Batch) -> list[str | None]:
    if "fault" not in batch.info:
        return [None] * len(batch.env_id)
    return [
        str(kind) if has else None for kind, has in zip(batch.info["fault"]["kind"], batch.info["_fault"], strict=True)
    ]


def test_a_rebuilt_env_gets_an_attribute_as_it_was_when_it_was_set_though_the_caller_has_changed_it_since() -> None:
    with begun(make()) as pool:
        goal = np.array([1, 2])
        pool.set_attr("goal", goal)
        goal[:] = 9
        kill_worker(pool)
        for _ in range(2):  # the second step waits for the rebuilt envs
            pool.step([1] * 4)

        assert [value.tolist() for value in pool.get_attr("goal")] == [[1, 2]] * 4


def test_a_fault_that_nothing_comes_of_does_not_outlast_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(make(where="thread")) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool._recovery, "handle", lambda **_: None)
            pool.send([1, RAISE, 1, 1])
            with pytest.raises(stepmill.RecvTimeout, match="nothing is lost"):
                pool.recv(4, timeout_s=0.2)

        assert pool.recv(4).truncated.tolist() == [False, True, False, False]


@pytest.mark.covers("X-12/total", "X-12/rate")
def test_the_budget_of_restarts_ends_in_the_error_and_old_restarts_do_not_count() -> None:
    with begun(make(restarts={"max_restarts": 1, "restart_window_s": HANG_GUARD_S * 60})) as pool:
        assert pool.step([KILL, 1, 1, 1]).truncated[0]
        pool.step([1] * 4)
        with pytest.raises(stepmill.WorkerDied, match="limit of restarts of worker 0 is reached") as caught:
            pool.step([KILL, 1, 1, 1])
        assert "cut short" not in str(caught.value)
    with begun(make(restarts={"max_restarts": 1, "restart_window_s": 0.001})) as pool:
        for _ in range(3):
            assert pool.step([KILL, 1, 1, 1]).truncated[0]
            pool.step([1] * 4)


def test_all_workers_may_die_at_once() -> None:
    with begun(make()) as pool:
        batch = pool.step([KILL, 1, KILL, 1])

        assert batch.truncated.tolist() == [True] * 4
        assert pool.step([1] * 4).obs[:, 2].tolist() == [0] * 4


@pytest.mark.parametrize("when", ["idle", "in its reset"])
def test_a_batched_env_whose_rows_have_all_ended_is_not_cut_short_once_more(when: str, tmp_path: Path) -> None:
    env_fns = [partial(make_env, str(tmp_path), identity, 2) for identity in range(2)]
    with begun(pool_of(env_fns)) as pool:
        for _ in range(length_of(0)):
            batch = pool.step([1] * 4)
        assert batch.truncated.tolist() == [True, True, False, False]
        if when == "idle":
            kill(pool, 0)
        else:
            Traps(str(tmp_path)).set("reset", 1, KILL)

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False, False, True, True]  # those end by themselves
        assert batch.obs[:2, 2].tolist() == [0, 0]
        assert kinds(batch) == [None] * 4
        assert pool.step([1] * 4).obs[:2, 2].tolist() == [1, 1]


def kill(pool: stepmill.Pool, worker: int) -> None:
    await_restart(pool, worker)
    kill_worker(pool, worker)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("where", ["serial", "fork"])
def test_an_episode_that_breaks_in_its_first_step_has_no_return_and_no_length(mode: str, where: str) -> None:
    with begun(make(2, where, num_workers=1, autoreset_mode=mode)) as pool:
        while not (batch := pool.step([1, 1])).truncated[0]:
            pass
        assert batch.info["episode"]["l"][0] == 12
        if mode == "NextStep":
            pool.step([1, 1])
        if mode == "Disabled":
            pool.reset()

        batch = pool.step([RAISE, 1])

        assert batch.truncated.tolist() == [True, False]
        assert batch.info["_episode"].tolist() == [True, False]
        assert (batch.info["episode"]["l"][0], batch.info["episode"]["r"][0]) == (0, 0.0)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_episode_that_breaks_later_has_the_return_and_length_of_its_good_steps(mode: str) -> None:
    with begun(make(2, "serial", autoreset_mode=mode)) as pool:
        for _ in range(3):
            pool.step([1, 1])

        batch = pool.step([RAISE, 1])

        assert (batch.info["episode"]["l"][0], batch.info["episode"]["r"][0]) == (3, 6.0)


def test_with_same_step_an_env_that_dies_right_after_its_episodes_end_is_marked() -> None:
    with make(2, num_workers=1, autoreset_mode="SameStep") as pool:
        pool.reset(seed=0)
        while not (batch := pool.step([1, 1])).truncated.all():
            pass
        begun = batch.obs.copy()
        kill(pool, 0)

        batch = pool.step([1, 1])

        assert batch.truncated.all()
        assert np.array_equal(np.stack(batch.info["final_obs"]), begun)
        assert all("SIGKILL" in str(text) for text in batch.info["final_info"]["fault"]["message"])


def test_with_same_step_an_env_that_dies_over_the_reset_after_a_fault_is_marked_again() -> None:
    with begun(make(2, num_workers=1, autoreset_mode="SameStep")) as pool:
        pool.send([RAISE], [0])
        pool._waits.wait(None, env_ids=[0])  # the next episode has begun, and nobody has received it
        kill(pool, 0)
        pool.send([1], [1])
        pool.recv(env_ids=[1])

        first = pool.recv(env_ids=[0])
        assert first.truncated.tolist() == [True]
        batch = pool.step([1, 1])

        assert batch.truncated[0]
        assert np.array_equal(batch.info["final_obs"][0], first.obs[0])


def test_a_batched_env_that_breaks_beside_one_that_ends_has_its_last_observations_by_row(tmp_path: Path) -> None:
    env_fns = [partial(make_env, str(tmp_path), identity, 2, mode="SameStep") for identity in range(2)]
    with begun(pool_of(env_fns, "serial", autoreset_mode="SameStep")) as pool:
        for _ in range(length_of(0) - 1):
            good = pool.step([1] * 4).obs.copy()

        batch = pool.step([1, 1, RAISE, 1])

        assert batch.truncated.tolist() == [True] * 4
        assert [final[2] for final in batch.info["final_obs"]] == [8, 8, 7, 7]
        assert np.array_equal(np.stack(batch.info["final_obs"][2:]), good[2:])


def test_a_batched_env_that_breaks_twice_in_a_row_has_no_steps_the_second_time(tmp_path: Path) -> None:
    env_fns = [partial(make_env, str(tmp_path), 0, 2, mode="SameStep")]
    with begun(pool_of(env_fns, "serial", autoreset_mode="SameStep", episode_stats=True)) as pool:
        for _ in range(5):
            pool.step([1, 1])

        first, second = pool.step([RAISE, 1]), pool.step([1, RAISE])

        assert first.info["episode"]["l"].tolist() == [5, 5]
        assert second.info["episode"]["l"].tolist() == [0, 0]
        assert second.info["episode"]["r"].tolist() == [0.0, 0.0]


def make_rows(folder: str, identity: int, lengths: tuple[int, int] = (3, 6)) -> SyncVectorEnv:
    """Two rows with these episode lengths."""
    rows = [partial(TrappedEnv, folder, 2 * identity + row, length, 1.0) for row, length in enumerate(lengths)]
    return SyncVectorEnv(rows, autoreset_mode=AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("how", ["dies idle", "dies in a step", "raises in a step", "dies idle, twice"])
def test_a_row_of_a_batched_env_whose_episode_has_ended_does_not_end_once_more(how: str, tmp_path: Path) -> None:
    env_fns = [partial(make_rows, str(tmp_path), identity) for identity in range(2)]
    with begun(pool_of(env_fns, episode_stats=True, restarts={"max_restarts": 2})) as pool:
        batches = [pool.step([1] * 4) for _ in range(3)]
        assert batches[-1].truncated.tolist() == [True, False] * 2
        last = batches[-1].obs
        if "idle" in how:
            kill(pool, 0)
        else:
            Traps(str(tmp_path)).set("step", 1, KILL if "dies" in how else RAISE)

        batches.append(pool.step([1] * 4))

        assert batches[-1].truncated.tolist() == [False, True, False, False]
        assert batches[-1].info["episode"]["_r"].tolist() == [False, True, False, False]
        assert [kind is not None for kind in kinds(batches[-1])] == [True, True, False, False]
        assert np.array_equal(batches[-1].obs[:2], last[:2])
        if "twice" in how:
            kill(pool, 0)
        batches += [pool.step([1] * 4) for _ in range(2)]
        assert batches[-1].obs[:, 2].tolist() == [1, 1, 2, 6]
        ends = sum((batch.terminated | batch.truncated).astype(int) for batch in batches)
        assert ends.tolist() == [1, 1, 1, 1]


def test_a_batched_env_that_has_just_begun_an_episode_is_cut_short_with_its_neighbour(tmp_path: Path) -> None:
    env_fns = [partial(make_rows, str(tmp_path), i, lengths) for i, lengths in enumerate([(3, 3), (6, 6)])]
    with begun(pool_of(env_fns, num_workers=1)) as pool:
        for _ in range(3):
            pool.step([1] * 4)
        Traps(str(tmp_path)).set("step", 2, KILL)

        clocks, ends = [], []
        for _ in range(4):
            batch = pool.step([1] * 4)
            clocks.append(batch.obs[:, 2].tolist())
            ends.append(batch.truncated.tolist())

        assert clocks == [[0, 0, 3, 3], [0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 2, 2]]
        assert ends == [[False, False, True, True], [True, True, False, False], [False] * 4, [False] * 4]


def test_a_rollout_takes_no_transition_of_a_row_that_waited_for_its_next_episode_twice(tmp_path: Path) -> None:
    with pool_of([partial(make_rows, str(tmp_path), 0)], "serial") as pool:
        rollout = begun(stepmill.Rollout(pool, num_steps=3))
        rollout.collect(lambda obs, env_ids: np.ones(len(obs), np.int64))
        Traps(str(tmp_path)).set("step", 1, RAISE)

        batch = rollout.collect(lambda obs, env_ids: np.ones(len(obs), np.int64))

        assert batch.valid.T.tolist() == [[False, False, True], [True, False, True]]
        assert batch.obs[:, :, 2].T.tolist() == [[3, 3, 0, 1], [3, 3, 0, 1]]
