"""Policy replay: replays that cannot succeed, and what else happens while envs are replayed."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.pool.events import EnvFailed, ReplayFailed
from tests.chaos import RAISE, ChaosEnv
from tests.chaos.envs import Traps
from tests.crash.test_replayed_calls import GainEnv, make, make_once
from tests.harness.pools import begun, kill_worker, make_pool

REPLAY = {"on_fault": "replay", "seeding": "per_episode"}


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_episode_with_calls_is_cut_short_once_three_replays_have_raised(tmp_path: Any, is_killed: bool) -> None:
    with begun(make_once(tmp_path)) as pool:
        pool.step([1] * 4)
        pool.call("amplify", 2.0)
        pool.step([1] * 4)
        Traps(str(tmp_path)).set("second", 1, RAISE, times=9)
        if is_killed:
            kill_worker(pool)
        else:
            Traps(str(tmp_path)).set("step", 1, RAISE)

        with pytest.warns(RuntimeWarning, match="it raised in between"):
            batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False, True, False, False]
        assert (tmp_path / "second-1").read_text() == f"{RAISE} 6"


class WorkerOnly:
    """A factor that can be loaded only where workers.env has set a variable."""

    def __reduce__(self) -> Any:
        return _read_factor, ()


def _read_factor() -> float:
    return float(os.environ["STEPMILL_TEST_FACTOR"])


@pytest.mark.parametrize("in_episode", [False, True])
def test_a_call_that_only_a_worker_can_load_ends_the_replay_and_the_pool_goes_on(in_episode: bool) -> None:
    with make(workers={"env": {"STEPMILL_TEST_FACTOR": "2"}}) as pool:
        if in_episode:
            pool.reset(seed=0)
        pool.call("amplify", WorkerOnly(), env_ids=[0])
        if not in_episode:
            pool.reset(seed=0)
        kill_worker(pool)

        with pytest.warns(RuntimeWarning, match="the call of 'amplify' raised when it was repeated"):
            assert pool.step([1] * 4).truncated.tolist() == [True, False, False, False]

        pool.step([1] * 4)
        assert pool.step([1] * 4).obs[:, 2].tolist() == [1, 3, 3, 3]


class FailsAtEnv(GainEnv):
    """Raises once after the step of a number, where a file says so."""

    def __init__(self, folder: str, identity: int) -> None:
        super().__init__(identity)
        self._traps = Traps(folder)

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self._traps.trigger(f"step{self._clock}", self.identity)
        return result


def test_a_replay_that_fails_while_another_env_of_its_worker_raises_leads_to_one_restart(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env_fns = [partial(FailsAtEnv, str(tmp_path), env_id) for env_id in range(2)]
    with begun(make_pool("fork", env_fns, num_workers=1, **REPLAY, restarts={"max_restarts": 100})) as pool:
        pool.step([1, 1])
        pool.call("amplify", 2.0)
        pool.step([1, 1])
        kill_worker(pool)
        Traps(str(tmp_path)).set("step2", 0, RAISE)  # in its replay
        Traps(str(tmp_path)).set("step3", 1, RAISE)  # after its replay
        replays = pool._recovery.replays
        advance = replays.advance

        def advance_when_both_have_failed(events: Any) -> Any:
            both = any(isinstance(event, EnvFailed) for event in events)
            return advance([event for event in events if both or not isinstance(event, ReplayFailed)])

        monkeypatch.setattr(replays, "advance", advance_when_both_have_failed)

        batch = pool.step([1, 1])

        assert batch.truncated.tolist() == [False, False]
        assert batch.reward.tolist() == [6.0, 6.0]
        assert not list(tmp_path.iterdir())


def test_a_call_that_ctrl_c_interrupts_once_it_is_sent_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(make()) as pool:
        backend = pool._runtime.backend
        call = backend.call

        def call_and_interrupt(requests: Any) -> Any:
            futures = call(requests)
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
            return futures

        monkeypatch.setattr(backend, "call", call_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.call("amplify", 2.0)
        assert pool.get_attr("gain") == (2.0,) * 4
        kill_worker(pool)

        assert pool.get_attr("gain") == (2.0,) * 4


def test_a_reset_waits_for_the_replay_that_its_own_revival_has_begun(tmp_path: Any) -> None:
    env_fns = [partial(ChaosEnv, i) for i in range(3)]
    with begun(make_pool("fork", env_fns, num_workers=1, **REPLAY, restarts={"max_env_errors": 0})) as pool:
        for _ in range(9):
            pool.step([1] * 3)
        with pytest.raises(stepmill.EnvError):
            pool.step([RAISE, 1, 1])
        pool.recv(2)
        kill_worker(pool)

        assert pool.reset(env_ids=[0, 1]).obs[:, 2].tolist() == [0, 0]
        assert pool.step([1] * 3).obs[:, 2].tolist() == [1, 1, 11]
