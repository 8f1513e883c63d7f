"""Policy replay: a pool whose workers are killed gives, bit for bit, what an undisturbed pool gives."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import BatchedCountingEnv
from tests.chaos import ChaosEnv
from tests.chaos.envs import CLOCK
from tests.harness.effort import every_second
from tests.harness.hangs import DEADLINE_S
from tests.harness.pools import assert_same, begun, kill_unnoticed, kill_worker, make_pool


class UnseededEnv(ChaosEnv):
    """Says who steps it, which is another process after a restart: not replayable."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(os.getpid()), terminated, truncated, info


class StubbornEnv(ChaosEnv):
    """Fails in its third step, in every episode and whenever it is played again; as action 5, 6 or 7 says."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._clock == 2 and action in (5, 6, 7):
            if action == 6:
                os.kill(os.getpid(), signal.SIGSEGV)
            if action == 7:
                time.sleep(600)
            raise LookupError(f"it is {time.monotonic()}")
        return super().step(action)


class MoodyEnv(ChaosEnv):
    """Raises each time at another step: in between, when an episode is played again."""

    def __init__(self, folder: str, env_id: int) -> None:
        super().__init__(env_id)
        self._folder = folder

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        mark = os.path.join(self._folder, f"{self.identity}-{self._clock}")
        if os.path.exists(mark):
            os.unlink(mark)
            raise LookupError("not this time")
        return super().step(action)


class LateEnv(ChaosEnv):
    """What its reset was given shows in the third reward, and not before."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        self._given = (options or {}).get("gain", 0) + self.np_random.random()
        obs[1] = 0
        return obs, info

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        obs[1] = 0
        return obs, self._given if self._clock >= 3 else 0.0, terminated, truncated, info


def make(env_class: type[ChaosEnv] = ChaosEnv, on_fault: str = "replay", **options: Any) -> stepmill.Pool:
    restarts = {"max_restarts": 100, "restart_window_s": 0.02, **options.pop("restarts", {})}
    env_fns = options.pop("env_fns", [partial(env_class, env_id) for env_id in range(4)])
    return make_pool("fork", env_fns, on_fault=on_fault, seeding="per_episode", restarts=restarts, **options)


def play(pool: stepmill.Pool, actions: list[int], env_ids: list[int]) -> dict[int, tuple[Any, float, bool]]:
    """Step these envs; return observation, reward and flag by env."""
    if len(env_ids) == pool.num_envs:
        batch = pool.step(actions)
    else:
        pool.send(actions, env_ids)
        batch = pool.recv(len(env_ids))
    results = zip(batch.obs, batch.reward.tolist(), batch.truncated.tolist(), strict=True)
    return dict(zip(batch.env_id.tolist(), results, strict=True))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_the_episode_after_one_that_was_cut_short_is_replayed(mode: str) -> None:
    with begun(make(StubbornEnv, autoreset_mode=mode)) as pool:
        pool.step([1] * 4)
        pool.step([1] * 4)
        with pytest.warns(RuntimeWarning, match="env 0 is not replayable"):
            assert pool.step([5, 1, 1, 1]).truncated.tolist() == [True, False, False, False]
        if mode == "NextStep":
            pool.step([1] * 4)
        kill_unnoticed(pool)
        batch = pool.step([1] * 4)
        assert batch.truncated.tolist() == [False] * 4
        assert batch.obs[0, CLOCK] == 1


@pytest.mark.parametrize(
    ("mode", "log_bytes"), every_second(["NextStep", "SameStep"], [8000, 64 << 20])
)  # 8000: some 20 batches to a chunk
def test_steps_of_all_envs_and_of_some_are_replayed_in_order(mode: str, log_bytes: int) -> None:
    rng = random.Random(5)
    with (
        make(autoreset_mode=mode, restarts={"replay_log_bytes": log_bytes}) as pool,
        make(on_fault="raise", autoreset_mode=mode) as calm,
    ):
        pool.reset(seed=0), calm.reset(seed=0)
        for step in range(200):
            if step % 13 == 6:
                kill_unnoticed(pool, rng.randrange(2))
            chosen = sorted(rng.sample(range(4), 4 if rng.random() < 0.7 else rng.randint(1, 3)))
            actions = [rng.randrange(10) for _ in chosen]
            ours, theirs = play(pool, actions, chosen), play(calm, actions, chosen)
            for env_id in chosen:
                assert np.array_equal(ours[env_id][0], theirs[env_id][0]), step
                assert ours[env_id][1:] == theirs[env_id][1:], step


class EchoEnv(gymnasium.Env[Any, Any]):
    """Tells the sum of all its actions, which may be of any size."""

    action_space = gymnasium.spaces.Box(-(2**62), 2**62, (2,), np.int64)
    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (2,), np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._sum = np.zeros(2, np.int64)
        return self._sum.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._sum = self._sum * 3 + action
        return self._sum.copy(), 0.0, False, False, {}


def test_actions_of_any_size_are_replayed_unchanged() -> None:
    numbers = [0, 1, -128, 127, -129, 128, 2**31, -(2**40), 5, -1]
    with make(env_fns=[EchoEnv] * 3, num_workers=1) as pool, make_pool("serial", [EchoEnv] * 3) as calm:
        pool.reset(seed=0), calm.reset(seed=0)
        for step in range(20):
            actions = np.roll(np.resize(numbers, 6), step if step % 4 else 0).reshape(3, 2)
            if step < 12:
                actions = actions.clip(-128, 127)
            batch = pool.step(actions)
            assert np.array_equal(batch.obs, calm.step(actions).obs), step
            if step in (7, 12, 19):
                kill_unnoticed(pool)
        assert pool.step(np.zeros((3, 2), np.int64)).truncated.sum() == 0
        assert pool._recovery.workers.num_restarts == 3


class SteadyEnv(ChaosEnv):
    """Gives the same reward and nearly the same observation all the time."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        obs[2] = self._clock // 50
        return obs, 1.0, terminated, truncated, info


@pytest.mark.parametrize(("env_class", "mode"), every_second([ChaosEnv, SteadyEnv], ["NextStep", "SameStep"]))
def test_a_long_episode_beside_short_ones_outlives_the_memory_that_these_took(
    env_class: type[ChaosEnv], mode: str
) -> None:
    limit = 40_000  # one of 600 steps takes half of it; all results together five times as much
    env_fns = [partial(env_class, env_id, length) for env_id, length in enumerate((10_000, 7, 1, 90))]
    rng = random.Random(7)
    with (
        make(env_fns=env_fns, autoreset_mode=mode, restarts={"replay_log_bytes": limit}) as pool,
        make_pool("serial", env_fns, seeding="per_episode", autoreset_mode=mode) as calm,
    ):
        assert np.array_equal(pool.reset(seed=1).obs, calm.reset(seed=1).obs)
        for step in range(600):
            if step in (300, 599):
                kill_unnoticed(pool), kill_unnoticed(pool, 1)
            if step % 10 == 0:
                actions = [rng.randrange(10) for _ in range(4)]
            ours, theirs = pool.step(actions), calm.step(actions)
            assert_same(ours, theirs, step)
            assert pool.stats().replay_log_bytes <= limit


class StillEnv(ChaosEnv):
    """Gives the same all the time; its episodes end by a reset alone."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.int64), 0.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [range(4), range(3)])  # by one call for all, or one by one
def test_logs_take_no_more_memory_than_they_may_however_little_happens(chosen: range) -> None:
    limit = 100_000
    options = stepmill.PoolOptions(on_fault="replay", seeding="per_episode", restarts={"replay_log_bytes": limit})
    with stepmill.Pool([StillEnv] * 4, backend="serial", options=options) as pool:
        for env_id in range(4):
            pool.reset(seed=env_id)
            for _ in range(5_000):
                pool.send([1] * len(chosen), list(chosen))
                pool.recv(len(chosen))
                assert pool.stats().replay_log_bytes <= limit


def test_the_longest_logs_go_first_when_there_is_too_much() -> None:
    with begun(make(restarts={"replay_log_bytes": 400})) as pool:  # 16 a reset, 24 a step
        for _ in range(8):
            pool.send([1], [0])
            pool.recv(1)
        for _ in range(2):
            pool.step([1] * 4)
        kill_unnoticed(pool)

        batch = pool.step([1] * 4)

        assert 0 < pool.stats().replay_log_bytes <= 400
        assert batch.truncated.tolist() == [True, False, False, False]


class UndefinedEnv(ChaosEnv):
    """The reward of its second step is NaN."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self._clock == 2 else reward, *rest


def test_an_episode_with_a_reward_that_is_not_a_number_is_replayed() -> None:
    with begun(make(UndefinedEnv)) as pool:
        for _ in range(3):
            pool.step([1] * 4)
        kill_unnoticed(pool)

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False] * 4
        assert batch.obs[:, CLOCK].tolist() == [4] * 4


def test_an_env_that_replays_otherwise_is_reported_with_the_step() -> None:
    with begun(make(UnseededEnv)) as pool:
        for _ in range(3):
            pool.step([1] * 4)
        kill_unnoticed(pool)

        with pytest.warns(RuntimeWarning, match="not replayable: step 1 gave another result"):
            batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [True, True, False, False]
        assert "step 1" in batch.info["fault"]["not_replayable"][0]
        assert batch.info["episode"]["l"].tolist() == [3, 3, 0, 0]  # of the delivered steps, not of the replayed ones


def test_a_log_that_is_full_falls_back_to_truncate_with_the_reason() -> None:
    with begun(make(restarts={"replay_log_bytes": 64})) as pool:
        for _ in range(5):
            pool.step([1] * 4)
        kill_unnoticed(pool)

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [True, True, False, False]
        assert "its log is incomplete" in batch.info["fault"]["not_replayable"][0]


@pytest.mark.parametrize(
    ("action", "kind", "reason"), [(5, "raised", "LookupError"), (6, "died", "SIGSEGV"), (7, "timed_out", "EnvTimeout")]
)
def test_what_fails_in_the_same_way_again_is_not_played_a_third_time(action: int, kind: str, reason: str) -> None:
    with begun(make(StubbornEnv, step_timeout_s=DEADLINE_S)) as pool:
        before = [pool.step([1] * 4) for _ in range(2)][-1]

        with pytest.warns(RuntimeWarning, match=f"step 3 failed in the same way when it was replayed .*{reason}"):
            batch = pool.step([1, action, 1, 1])

        assert batch.truncated.tolist() == [False, True, False, False]
        assert batch.obs[1].tolist() == before.obs[1].tolist()
        assert batch.obs[:, 2].tolist() == [3, 2, 3, 3]  # neither its neighbour nor the others lost a step
        assert reason in batch.info["fault"]["not_replayable"][1]
        assert batch.info["fault"]["kind"][1] == kind
        assert "replayed" not in batch.info["fault"]["message"][1]
        assert pool._recovery.workers.num_restarts == (0 if action == 5 else 2)
        assert pool.step([1] * 4).obs[:, 2].tolist() == [4, 0, 4, 4]


def test_an_episode_that_fails_at_another_step_of_its_replay_is_replayed_again(tmp_path: Any) -> None:
    with begun(make(partial(MoodyEnv, str(tmp_path)))) as pool:
        for _ in range(4):
            pool.step([1] * 4)
        for place in ("0-4", "0-2", "0-1"):
            (tmp_path / place).touch()

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False] * 4
        assert batch.obs[:, 2].tolist() == [5] * 4
        assert not list(tmp_path.iterdir())


class BriefEnv(MoodyEnv):
    """Env 0 has episodes of three steps."""

    def __init__(self, folder: str, env_id: int) -> None:
        super().__init__(folder, env_id)
        self._length = 3 if env_id == 0 else 12


def test_an_exhausted_env_that_cannot_be_replayed_does_not_block_a_wait(tmp_path: Any) -> None:
    with begun(make(partial(BriefEnv, str(tmp_path)), num_episodes=1)) as pool:
        for _ in range(4):
            pool.step([1] * 4)
        for place in ("0-0", "0-1", "0-2"):
            (tmp_path / place).touch()
        kill_unnoticed(pool)

        with pytest.warns(RuntimeWarning, match="env 0 is not replayable: it raised in between"):
            batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False] * 4
        assert batch.obs[1:, 2].tolist() == [5] * 3
        assert pool.step([1] * 4).obs[1:, 2].tolist() == [6] * 3
        assert pool.states[0] is stepmill.EnvState.EXHAUSTED


def test_an_env_that_failed_before_its_worker_died_is_replayed_in_a_new_one(tmp_path: Any) -> None:
    with make(partial(MoodyEnv, str(tmp_path))) as pool:
        pool.set_attr("note", 1)  # is set again before the episode is
        pool.reset(seed=0)
        pool.step([1] * 4)
        (tmp_path / "0-1").touch()
        pool.send([1] * 4)
        while pool.states.count(stepmill.EnvState.BUSY):
            pass
        kill_worker(pool)

        batch = pool.recv(4)

        assert batch.truncated.tolist() == [False] * 4
        assert batch.obs[:, 2].tolist() == [2] * 4


def test_an_episode_is_replayed_with_the_options_of_its_reset_though_the_caller_has_changed_them_since() -> None:
    with make(LateEnv) as pool, make(LateEnv, on_fault="raise") as calm:
        for each in (pool, calm):
            options = {"gain": 1}
            for env_id in range(4):
                options["gain"] += 1
                each.reset(seed=0, options=options, env_ids=[env_id])
            each.step([1] * 4)
        kill_unnoticed(pool)
        for _ in range(4):
            assert pool.step([1] * 4).reward.tolist() == calm.step([1] * 4).reward.tolist()


class HalfUnseededEnv(BatchedCountingEnv):
    """Its second row's reward says who steps it: not replayable."""

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, np.array([reward[0], float(os.getpid())]), terminated, truncated, info


def test_a_batched_env_is_compared_in_all_its_rows() -> None:
    with begun(make(env_fns=[partial(HalfUnseededEnv, 2)])) as pool:
        pool.step([1, 1])
        kill_unnoticed(pool)
        with pytest.warns(RuntimeWarning, match="step 1 gave another result"):
            assert pool.step([1, 1]).truncated.all()
