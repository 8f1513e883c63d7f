"""Policy replay: calls of an env are repeated, each at its place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.chaos import RAISE, ChaosEnv
from tests.chaos.envs import Traps
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.kills import stop_process
from tests.harness.pools import assert_same, begun, kill_worker, make_pool


class GainEnv(ChaosEnv):
    """Multiplies its reward with a gain that calls and attributes change, and that no reset touches."""

    def __init__(self, identity: int = 0) -> None:
        super().__init__(identity, length=6)
        self.gain = 1.0
        self.offset = 0.0

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward * self.gain + self.offset, terminated, truncated, info

    def render(self) -> Any:
        return np.array([self.gain, self.offset])

    def amplify(self, by: float) -> float:
        self.gain *= by
        return self.gain

    def end_it_all(self) -> None:
        os._exit(3)

    def clock(self) -> int:
        """Return the number of steps since the reset, without which this raises."""
        if self._clock < 0:
            raise RuntimeError("call reset() first")
        return self._clock

    def fail(self) -> None:
        raise ValueError("this call fails whenever it is made")

    def fail_once(self) -> None:
        path = os.environ.get("STEPMILL_TEST_FAILED")
        if path is not None and not os.path.exists(path):
            open(path, "x").close()
            raise ValueError("once")


class TouchyEnv(GainEnv):
    """Dies of an offset below 0, and refuses one over 99."""

    @property  # type: ignore[override]
    def offset(self) -> float:
        return self._offset

    @offset.setter
    def offset(self, value: float) -> None:
        if value < 0:
            os._exit(3)
        if value > 99:
            raise ValueError("too large")
        self._offset = value


def make(on_fault: str = "replay", env_class: Any = GainEnv, where: str = "fork", **options: Any) -> stepmill.Pool:
    chosen = {"on_fault": on_fault, "seeding": "per_episode", "restarts": {"max_restarts": 100}, **options}
    return make_pool(where, [partial(env_class, env_id) for env_id in range(4)], **chosen)


def make_once(folder: Path, **options: Any) -> stepmill.Pool:
    return make(env_class=partial(OnceEnv, str(folder)), **options)


@pytest.mark.covers("G-5")
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("kills", [{3}, {1, 3, 9}, {12}])
def test_calls_and_attributes_are_repeated_where_they_were_made(kills: set[int], mode: str) -> None:
    with make(autoreset_mode=mode) as pool, make("raise", autoreset_mode=mode) as calm:
        for each in (pool, calm):
            each.call("amplify", 2.0)
            each.set_attr("offset", [0.5, 1.5, 2.5, 3.5])
            each.reset(seed=0)
        for step in range(15):
            ours, theirs = advance(pool, step, is_killed=step in kills), advance(calm, step, is_killed=False)
            assert_same(ours, theirs, step)
        kill_worker(pool)
        pool.reset(), calm.reset()
        assert pool.step([1] * 4).reward.tolist() == calm.step([1] * 4).reward.tolist()
        assert pool.get_attr("gain") == calm.get_attr("gain")


def advance(pool: stepmill.Pool, step: int, *, is_killed: bool) -> stepmill.Batch:
    if step in (2, 8):
        pool.call("amplify", 1.5, env_ids=[0, 3])
    if step in (3, 10):
        pool.set_attr("offset", 7.0 + step, env_ids=[1])
    if is_killed:
        kill_worker(pool)
    pool.send([1, 2, 3, 4])
    if step in (4, 5, 6):  # after the pending command: in the middle, at the end, and after an automatic reset
        pool.call("amplify", 3.0)
    return pool.recv(4)


ACTS: dict[str, Callable[[stepmill.Pool], object]] = {
    "amplify": lambda pool: pool.call("amplify", 3.0, env_ids=[1, 2]),
    "get": lambda pool: pool.get_attr("gain"),
    "set": lambda pool: pool.set_attr("offset", [1.0, 2.0, 3.0, 4.0]),
    "render": lambda pool: [frame.tolist() for frame in pool.render()],
}


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_call_to_a_worker_that_died_unnoticed_is_answered_as_if_it_lived(act: Any, under_way: bool) -> None:
    with make() as pool, make("raise") as calm:
        for each in (pool, calm):
            each.reset(seed=0)
            each.call("amplify", 2.0)
            each.step([1, 2, 3, 4])
            if under_way:
                each.send([1, 2, 3, 4])
        kill_worker(pool)

        answer = act(pool)

        assert answer == act(calm)
        if not under_way:
            pool.send([1, 2, 3, 4]), calm.send([1, 2, 3, 4])
        for _ in range(8):
            assert_same(pool.recv(4), calm.recv(4))
            pool.send([4, 3, 2, 1]), calm.send([4, 3, 2, 1])


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_call_that_a_worker_did_not_read_before_it_died_is_answered_by_its_successor(
    monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    with make() as pool, make("raise") as calm:
        for each in (pool, calm):
            each.reset(seed=0)
            each.call("amplify", 2.0)
            each.step([1, 2, 3, 4])
        backend = pool._runtime.backend
        pid = pool.stats().workers[0].pid
        stop_process(pid)
        send, to_kill = backend.call, [pid]

        def send_and_kill(requests: Any) -> Any:
            futures = send(requests)
            while to_kill:
                os.kill(to_kill.pop(), signal.SIGKILL)
            return futures

        monkeypatch.setattr(backend, "call", send_and_kill)

        answer = act(pool)

        assert answer == act(calm)
        assert pool.stats().workers[0].pid != pid
        for _ in range(8):
            assert_same(pool.step([1, 2, 3, 4]), calm.step([1, 2, 3, 4]))
        kill_worker(pool)
        assert pool.get_attr("gain") == calm.get_attr("gain")


def test_a_call_that_commands_have_followed_is_not_sent_to_the_successor() -> None:
    with begun(make()) as pool:
        pid = pool.stats().workers[0].pid
        stop_process(pid)
        future = pool.call_async("amplify", 2.0)
        pool.send([1, 2, 3, 4])
        os.kill(pid, signal.SIGKILL)

        with pytest.raises(stepmill.WorkerDied):
            future.result()

        assert pool.recv(4).obs[:, 2].tolist() == [1] * 4


def test_a_worker_that_dies_in_a_call_is_reported_and_its_envs_are_replayed() -> None:
    with make() as pool, make("raise") as calm:
        for each in (pool, calm):
            each.reset(seed=0)
            each.step([1, 2, 3, 4])
        for _ in range(3):  # the effect of such a call is not known, so it is not repeated
            with pytest.raises(stepmill.WorkerDied):
                pool.call("end_it_all", env_ids=[0])

        assert pool.get_attr("gain") == (1.0,) * 4
        assert pool.step([1] * 4).reward.tolist() == calm.step([1] * 4).reward.tolist()


def test_a_call_to_a_dead_worker_raises_its_death_when_no_repair_is_left() -> None:
    with begun(make(restarts={"max_restarts": 1})) as pool:
        kill_worker(pool)
        assert pool.get_attr("gain", env_ids=[0]) == (1.0,)
        kill_worker(pool)

        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.get_attr("gain", env_ids=[0])

        assert caught.value.env_ids == (0, 1)
        assert pool.get_attr("gain", env_ids=[2, 3]) == (1.0, 1.0)
        with pytest.raises(stepmill.UsageError, match=r"envs \[0, 1\] have a fault"):  # its death was raised once
            pool.step([1] * 4)


def test_a_call_that_failed_is_made_again_and_fails_again() -> None:
    with begun(make()) as pool:
        with pytest.raises(stepmill.EnvError):
            pool.call("fail", env_ids=[0])
        pool.step([1] * 4)
        kill_worker(pool)

        assert pool.step([1] * 4).truncated.tolist() == [False] * 4


def test_a_call_with_another_outcome_when_repeated_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPMILL_TEST_FAILED", str(tmp_path / "failed"))
    with begun(make()) as pool:
        with pytest.raises(stepmill.EnvError):
            pool.call("fail_once", env_ids=[0])
        pool.step([1] * 4)
        kill_worker(pool)

        with pytest.warns(RuntimeWarning, match="the call of 'fail_once' succeeded when it was repeated"):
            assert pool.step([1] * 4).truncated.tolist() == [True, False, False, False]


def compare_steps(pool: stepmill.Pool, calm: stepmill.Pool, num_steps: int) -> None:
    for step in range(num_steps):
        assert_same(pool.step([1] * 4), calm.step([1] * 4), step)


@pytest.mark.parametrize(("mode", "recycle_after"), [("NextStep", None), ("SameStep", None), ("SameStep", 2)])
def test_a_method_that_needs_a_reset_and_was_called_in_an_earlier_episode_ends_no_replay(
    mode: str, recycle_after: int | None
) -> None:
    restarts = {"max_restarts": 100, "recycle_after_episodes": recycle_after}
    with make(autoreset_mode=mode, restarts=restarts) as pool, make("raise", autoreset_mode=mode) as calm:
        for each in (pool, calm):
            each.reset(seed=0)
            each.call("clock", env_ids=[0])
        if recycle_after is None:
            compare_steps(pool, calm, 15)
            kill_worker(pool)
        text = "env (object )?0 was rebuilt.*'clock' raised.* use get_attr with a function"
        with pytest.warns(RuntimeWarning, match=text):
            compare_steps(pool, calm, 18)


def test_calls_beyond_the_bound_of_memory_end_in_a_cut_episode_with_the_reason() -> None:
    with make(restarts={"max_restarts": 100, "replay_log_bytes": 2048}) as pool:
        pool.set_attr("offset", 2.0)
        for _ in range(100):
            pool.call("amplify", 1.0, env_ids=[0])
        pool.reset(seed=0)
        pool.step([1] * 4)
        kill_worker(pool)

        with pytest.warns(RuntimeWarning, match="replay_log_bytes"):
            batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [True, False, False, False]
        assert "replay_log_bytes" in batch.info["fault"]["not_replayable"][0]
        assert pool.get_attr("offset") == (2.0,) * 4


@pytest.mark.parametrize("on_fault", ["raise", "truncate", "replay"])
@pytest.mark.parametrize("value", [-1.0, 100.0])
def test_an_attribute_is_what_it_was_when_setting_it_again_has_failed(value: float, on_fault: str) -> None:
    with begun(make(on_fault, TouchyEnv)) as pool:
        pool.set_attr("offset", 5.0)
        with pytest.raises((stepmill.WorkerDied, stepmill.EnvError)):
            pool.set_attr("offset", value, env_ids=[0])
        if value > 0:
            kill_worker(pool)
        if on_fault == "truncate":
            assert pool.step([1] * 4).truncated.tolist() == [True, True, False, False]
        if on_fault == "raise":
            pool.revive([0, 1])
        if on_fault != "replay":
            pool.reset()

        batch = pool.step([1] * 4)

        assert batch.reward.tolist() == [6.0] * 4
        assert pool.get_attr("offset") == (5.0,) * 4


class OnceEnv(GainEnv):
    """Raises once in a step, and once after a second step, where files say so; shows its gain in what it observes, from the reset on."""

    observation_space = gymnasium.spaces.Box(-1, 2**62, (5,), np.int64)

    def __init__(self, folder: str, identity: int) -> None:
        super().__init__(identity)
        self._traps = Traps(folder)

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._traps.trigger("step", self.identity)
        result = super().step(action)
        if self._clock == 2:
            self._traps.trigger("second", self.identity)
        return result

    def _observe(self) -> Any:
        return np.array([*super()._observe(), int(100 * self.gain)], np.int64)


@pytest.mark.parametrize("fails_again", [False, True])  # at another step of its replay
def test_an_env_that_raises_after_a_call_in_its_episode_is_not_called_twice(fails_again: bool, tmp_path: Path) -> None:
    with begun(make_once(tmp_path)) as pool:
        pool.step([1] * 4)
        assert pool.call("amplify", 2.0) == (2.0,) * 4
        pool.set_attr("offset", 1.0, env_ids=[1])
        pool.step([1] * 4)
        Traps(str(tmp_path)).set("step", 1, RAISE)
        if fails_again:
            Traps(str(tmp_path)).set("second", 1, RAISE)

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False] * 4
        assert batch.reward.tolist() == [6.0, 7.0, 6.0, 6.0]
        assert pool.get_attr("gain") == (2.0,) * 4
        assert not list(tmp_path.iterdir())  # it did fail


def test_an_env_that_raises_after_a_call_and_cannot_be_replaced_is_truncated(tmp_path: Any) -> None:
    with begun(make_once(tmp_path, where="serial")) as pool:
        pool.call("amplify", 2.0, env_ids=[1])
        pool.step([1] * 4)
        Traps(str(tmp_path)).set("step", 1, RAISE)

        with pytest.warns(RuntimeWarning, match="only a new worker process could undo that"):
            batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False, True, False, False]
        assert pool.get_attr("gain", env_ids=[1]) == (2.0,)


def test_a_call_between_episodes_comes_before_the_next_though_that_has_begun_ahead(tmp_path: Any) -> None:
    with begun(make_once(tmp_path, resets={"overlap": True})) as pool:
        for _ in range(6):
            batch = pool.step([1] * 4)
        assert batch.truncated.tolist() == [True] * 4
        while pool.stats().resets < 8:  # each has begun its next episode
            pool.recv(min_envs=0)

        pool.call("amplify", 2.0)

        assert pool.step([1] * 4).obs[:, 4].tolist() == [200] * 4
        kill_worker(pool)
        assert pool.step([1] * 4).truncated.tolist() == [False] * 4


def test_an_env_whose_replay_is_given_up_gets_its_calls_and_its_next_episode_can_be_replayed(tmp_path: Any) -> None:
    with make() as pool, make("raise") as calm:
        for each in (pool, calm):
            each.reset(seed=0)
            each.call("amplify", 2.0)
            each.step([1] * 4)
            each.call("amplify", 2.0)
        pool._recovery.replays._failures._reasons[1] = "it is hopeless"
        kill_worker(pool)
        with pytest.warns(RuntimeWarning, match="it is hopeless"):
            assert pool.step([1] * 4).truncated.tolist() == [False, True, False, False]
        calm.step([1] * 4)
        assert pool.get_attr("gain") == calm.get_attr("gain") == (4.0,) * 4

        pool.step([1] * 4)  # env 1 begins an episode
        pool.step([1] * 4)
        kill_worker(pool)

        batch = pool.step([1] * 4)
        assert batch.truncated.tolist() == [False] * 4
        assert batch.reward.tolist()[1] == 2 * 4.0


class MortalCallEnv(GainEnv):
    def count(self) -> int:
        """Return how often this was called, in all processes; the second call ends the worker."""
        path = os.environ["STEPMILL_TEST_CALLS"]
        with open(path, "a") as calls:
            calls.write("x")
        if os.path.getsize(path) == 2:
            os._exit(3)
        return os.path.getsize(path)


def test_a_worker_that_dies_in_a_repeated_call_is_replaced_once_more(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMILL_TEST_CALLS", str(tmp_path / "calls"))
    with begun(make(env_class=MortalCallEnv)) as pool:
        pool.step([1] * 4)
        assert pool.call("count", env_ids=[0]) == (1,)
        kill_worker(pool)

        pool.send([2] * 4)

        assert pool.recv(timeout_s=HANG_GUARD_S).truncated.tolist() == [False] * 4
