"""DI-engine's managers: envs that raise, hang, die, or return what cannot be read; resets that are tried again."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, BaseEnvManager, EnvState, SyncSubprocessEnvManager
from stepmill.frontends.di_engine.errors import with_env_class
from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout
from stepmill.testing.faulty import OddSignatureError
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import DingEnv, ding_envs
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S

QUICK = {"max_retry": 3, "retry_waiting_time": 0.01}


@pytest.fixture(params=[AsyncSubprocessEnvManager, SyncSubprocessEnvManager])
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


# ---- steps that raise ------------------------------------------------------------------------------------------------


@pytest.mark.covers("D-21", "D-B6")
def test_a_step_that_raises_closes_the_manager_and_all_errors_are_raised_together(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 3)
    with pytest.raises(RuntimeError, match="env 0 raised RuntimeError in step: env 0 fails on purpose") as caught:
        manager.step({0: "error", 1: 1, 2: "error"})
    error: Any = caught.value
    assert isinstance(error, EnvError)
    assert "Env Process Exception:" in str(error)
    assert "in _act" in error.remote_traceback
    assert (error.env_id, [other.env_id for other in error.others], list(error.timesteps)) == (0, [2], [1])
    assert error.timesteps[1].obs.tolist() == [1, 0, 1]
    assert manager.closed
    assert set(manager._env_states.values()) == {EnvState.VOID}
    manager.launch()
    assert list(manager.ready_obs) == [0, 1, 2]


@pytest.mark.covers("D-B5")
def test_an_exception_with_a_constructor_of_its_own_arrives_as_its_class(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, step_wait_timeout=None)
    with pytest.raises(OddSignatureError, match="code 7: odd") as caught:
        manager.step({0: 1, 1: "odd"})
    assert isinstance(caught.value, EnvError)
    assert caught.value.env_id == 1


@pytest.mark.parametrize("name", ["builtins.print", "nowhere.NoError", "SystemExit", "numpy.ndarray", "ValueError"])
def test_only_exceptions_that_are_known_here_keep_their_class(name: str) -> None:
    error = with_env_class(EnvError("text", env_id=3, error_type=name))
    assert (error.env_id, error.message) == (3, "text")
    assert isinstance(error, ValueError) is (name == "ValueError")


@pytest.mark.covers("D-B6")
def test_with_on_error_abnormal_the_others_go_on(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 3, on_error="abnormal", wait_num=3, step_wait_timeout=None)
    timesteps = manager.step({0: 1, 1: "error", 2: 2})
    assert timesteps[1][:3] == (None, None, None)
    assert timesteps[1].info["abnormal"] is True
    assert timesteps[1].info["fault"] == "EnvError"
    assert timesteps[2].obs.tolist() == [2, 0, 1]
    assert manager._env_states == {0: EnvState.RUN, 1: EnvState.ERROR, 2: EnvState.RUN}
    manager.reset({1: None})
    assert list(manager.ready_obs) == [0, 1, 2]


@pytest.mark.covers("D-22", "D-B11", "G-20/abnormal")
def test_an_abnormal_timestep_comes_as_it_is_and_only_its_env_stops(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 3, wait_num=3, step_wait_timeout=None, episode_num=5)
    manager.step({0: 1, 1: 1, 2: 1})
    timesteps = manager.step({0: "abnormal", 1: 1, 2: 1})
    assert tuple(timesteps[0]) == (None, None, True, {"abnormal": True})  # the original fills in a stale observation
    assert [timesteps[env_id].obs.tolist() for env_id in (1, 2)] == [[1, 0, 2], [2, 0, 2]]
    assert manager._env_states[0] is EnvState.ERROR
    assert manager._env_episode_count[0] == 0
    assert list(manager.ready_obs) == [1, 2]
    with pytest.raises(AssertionError, match="ERROR"):
        manager.step({0: 1})
    manager.reset({0: {"stat": "back"}})
    assert manager.ready_obs[0].tolist() == [0, 1, 0]


@pytest.mark.covers("D-22")
def test_an_info_of_several_agents_is_abnormal_if_one_of_the_first_two_is(launched: MakeManager) -> None:
    fns = [partial(AgentsEnv, 0, infos=[{}, {"abnormal": True}]), partial(AgentsEnv, 1, infos=({"a": 1}, {}))]
    manager = launched(SyncSubprocessEnvManager, fns)
    timesteps = manager.step({0: 1, 1: 1})
    assert timesteps[0].info == [{}, {"abnormal": True}]
    assert timesteps[1].info == ({"a": 1}, {})
    assert manager._env_states == {0: EnvState.ERROR, 1: EnvState.RUN}


@pytest.mark.covers("D-22")
def test_an_info_that_is_none_is_refused(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, [partial(AgentsEnv, 0, infos=None)])
    with pytest.raises(TypeError, match="invalid env timestep type: <class 'NoneType'>"):
        manager.step({0: 1})


class AgentsEnv(DingEnv):
    """Returns the infos that it was made with."""

    infos: Any

    def step(self, action: Any) -> Any:
        return super().step(action)._replace(info=self.infos)


@pytest.mark.covers("D-22")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_timestep_that_cannot_be_read_is_abnormal_and_its_process_is_replaced(
    launched: MakeManager, shared_memory: bool
) -> None:
    manager = launched(SyncSubprocessEnvManager, shared_memory=shared_memory)
    pids = manager.pid
    timesteps = manager.step({0: 1, 1: "torn"})
    assert timesteps[1][:3] == (None, None, None)
    assert timesteps[1].info["abnormal"] is True
    assert timesteps[0].obs.tolist() == [0, 0, 1]
    manager.reset({1: None})
    assert manager.pid[0] == pids[0]
    assert manager.pid[1] != pids[1]


def test_an_observation_that_does_not_fit_its_space_closes_the_manager(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, [partial(WrongShape, 0)])
    with pytest.raises(BadOutput, match=r"env 0 gave a wrong.*launch\(\) it again") as caught:
        manager.step({0: 1})
    assert isinstance(caught.value, ValueError)  # DI-engine's buffers raise it
    assert manager.closed


def test_an_env_that_does_not_exist_is_a_key_error_that_names_those_that_do(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 2)
    for call in (lambda: manager.reset({9: {}}), lambda: manager.step({9: 1})):
        with pytest.raises(KeyError, match="there are envs 0 to 1"):
            call()
    assert manager.ready_env == [0, 1]


class WrongShape(DingEnv):
    """Its observations grow."""

    def _obs(self) -> Any:
        return np.zeros(3 + self._t, np.float32)


# ---- deaths and deadlines --------------------------------------------------------------------------------------------


@pytest.mark.covers("D-B5")
def test_an_env_that_dies_gives_an_abnormal_timestep_that_names_it(
    cls: Any, launched: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager = launched(cls, 3, wait_num=3, step_wait_timeout=None)
    timesteps = manager.step({0: 1, 1: "die", 2: 2})
    info = timesteps[1].info
    assert (info["abnormal"], info["fault"]) == (True, "WorkerDied")
    assert "SIGKILL" in info["message"]
    assert "envs [1]" in info["message"]
    assert "env 1 returns an abnormal timestep" in caplog.text
    assert timesteps[2].reward.tolist() == [2]
    manager.reset({1: None})
    assert [obs.tolist() for obs in manager.ready_obs.values()] == [[0, 0, 1], [1, 0, 0], [2, 0, 1]]


@pytest.mark.covers("D-B5")
def test_two_deaths_between_two_steps_cost_their_envs_only(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 3)
    victims = [psutil.Process(pid) for pid in (manager.pid[0], manager.pid[1])]
    for victim in victims:
        victim.kill()
    psutil.wait_procs(victims, timeout=HANG_GUARD_S)
    timesteps = manager.step({0: 1, 1: 1, 2: 1})
    assert [timesteps[env_id].info.get("fault") for env_id in range(3)] == ["WorkerDied", "WorkerDied", None]
    manager.reset({0: None, 1: None})
    assert list(manager.ready_obs) == [0, 1, 2]


@pytest.mark.covers("D-B5")
def test_envs_that_share_a_process_are_lost_together_and_come_back(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 4, num_workers=2)
    timesteps = manager.step({0: "die", 2: 1})
    assert timesteps[0].info["abnormal"]
    assert timesteps[2].obs.tolist() == [2, 0, 1]
    timesteps = manager.step({1: 1, 3: 1})
    assert timesteps[1].info["fault"] == "WorkerDied"
    assert timesteps[3].obs.tolist() == [3, 0, 1]
    manager.reset({0: None, 1: None})
    assert list(manager.ready_obs) == [0, 1, 2, 3]
    assert len(manager.step(dict.fromkeys(range(4), 1))) == 4


@pytest.mark.covers("D-B7", "D-19")
def test_a_step_that_hangs_is_ended_at_its_timeout(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 2, step_timeout=DEADLINE_S)

    def step_on() -> None:
        while True:
            manager.step({env_id: "sleep" if env_id == 1 else 1 for env_id in manager.ready_obs})

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="env 1 took longer than its deadline") as caught:
        step_on()
    took_s = time.monotonic() - began
    assert isinstance(caught.value, EnvTimeout)
    assert caught.value.timeout_s == DEADLINE_S
    assert DEADLINE_S <= took_s < HANG_GUARD_S  # the env sleeps for 1000 s
    assert manager.closed


@pytest.mark.covers("D-B7")
def test_with_on_error_abnormal_a_step_that_hangs_costs_its_env_only(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 2, step_timeout=DEADLINE_S + 0.25, on_error="abnormal")
    began = time.monotonic()
    timesteps = manager.step({0: 1, 1: "sleep"})
    assert time.monotonic() - began >= DEADLINE_S + 0.25  # not before its limit
    assert timesteps[1].info["fault"] == "EnvTimeout"
    assert "deadline of 1.25 s" in timesteps[1].info["message"]  # a fraction of a second, not rounded up
    manager.reset({1: None})
    assert [obs.tolist() for obs in manager.ready_obs.values()] == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.covers("D-19")
@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        ({"connect_timeout": 0.2}, "env reset connection timeout"),
        ({"connect_timeout": 30, "reset_timeout": 0.2}, "env 0 took longer than its deadline"),
    ],
)
def test_a_reset_that_hangs_is_a_failed_attempt(make_manager: MakeManager, cfg: dict[str, Any], text: str) -> None:
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(2), max_retry=2, retry_waiting_time=0.01, **cfg)
    with pytest.raises(RuntimeError, match=rf"Env 0 reset has exceeded max retries\(2\).*{text}"):
        manager.launch({0: {"stat": "sleep"}, 1: None})
    assert manager.closed


# ---- resets that fail ------------------------------------------------------------------------------------------------


@pytest.mark.covers("D-18", "D-3")
def test_a_reset_that_always_fails_closes_the_manager_with_the_env_s_traceback(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(2), **QUICK)
    text = r"Env 1 reset has exceeded max retries\(3\), and the latest exception is: env 1 raised RuntimeError"
    with pytest.raises(RuntimeError, match=text) as caught:
        manager.launch({0: None, 1: {"stat": "error"}})
    error: Any = caught.value
    assert "in _act" in error.remote_traceback
    assert manager.closed
    manager.launch()
    assert list(manager.ready_obs) == [0, 1]


@pytest.mark.covers("D-18")
def test_values_below_one_mean_a_single_attempt(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(1), max_retry=-5)
    with pytest.raises(RuntimeError, match=r"max retries\(1\)"):
        manager.launch({0: {"stat": "once"}})


@pytest.mark.covers("D-18", "D-B19")
def test_retry_by_reset_keeps_the_env_and_does_not_close_it(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, **QUICK)
    serials = manager.serial
    manager.reset({0: {"stat": "even"}})
    assert manager.serial == serials
    assert manager.is_closed == [False, False]  # the original resets the env that it has closed
    assert [len(resets) for resets in manager.resets] == [3, 1]


@pytest.mark.covers("D-18", "D-B9", "D-25")
@pytest.mark.parametrize("cls", [SyncSubprocessEnvManager, BaseEnvManager])
def test_retry_by_renewal_gives_the_new_env_its_seed_its_arguments_and_its_replay_path(
    make_manager: MakeManager, cls: Any
) -> None:
    manager = make_manager(cls, ding_envs(2), retry_type="renew", **QUICK)
    if cls is SyncSubprocessEnvManager:  # in line it would keep the episode from being reset
        manager.enable_save_replay("videos")
    manager.seed(40, dynamic_seed=False)
    manager.launch()
    serials, pids = manager.serial, manager.pid
    manager.reset({1: None, 0: {"stat": "even", "level": 2}})
    assert manager.serial[0] != serials[0]
    assert manager.serial[1] == serials[1]
    assert (manager.pid[0] != pids[0]) is (cls is SyncSubprocessEnvManager)
    assert manager.seeds[0][0] == (40, False)
    assert manager.resets[0][-1] == {"stat": "even", "level": 2}
    assert manager.replay_path == (["videos"] * 2 if cls is SyncSubprocessEnvManager else ["", ""])


@pytest.mark.covers("D-32", "D-38", "D-B4")
@pytest.mark.parametrize("question", ["ready_obs", "ready_env"])
def test_a_reset_that_fails_in_the_background_is_raised_by_the_next_call(launched: MakeManager, question: str) -> None:
    manager = launched(SyncSubprocessEnvManager, 2, length=1)
    manager._reset_param[0] = {"stat": "error"}
    assert manager.step({0: 1})[0].done

    def look_on() -> None:
        while True:
            getattr(manager, question)  # takes what has arrived

    with pytest.raises(RuntimeError, match="Env 0 reset has exceeded max retries") as caught:
        look_on()
    assert "fails on purpose" in str(caught.value)  # the original says that the manager is closed
    assert manager.closed


@pytest.mark.covers("D-18")
def test_while_one_env_waits_for_its_next_attempt_the_others_step(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 2, length=1, max_retry=2, retry_waiting_time=600.0, episode_num=9)
    manager._reset_param[0] = {"stat": "error"}
    manager.step({0: 1})
    began = time.monotonic()
    for _ in range(3):
        assert list(manager.step({1: 1})) == [1]
        while list(manager.ready_obs) != [1]:
            pass
    assert time.monotonic() - began < HANG_GUARD_S
