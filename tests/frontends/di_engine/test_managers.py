"""DI-engine's managers: launch and close, states, seeds, resets, and the envs' attributes and methods."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from stepmill.frontends.di_engine import (
    AsyncSubprocessEnvManager,
    BaseEnvManager,
    EnvState,
    SyncSubprocessEnvManager,
    env_lifecycle,
)
from stepmill.spec.errors import EngineBug
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import DingEnv, LateSpaces, ding_envs

RUN = EnvState.RUN


def act(manager: Any, action: Any = 1) -> dict[int, Any]:
    """Step every env that wants an action."""
    timesteps: dict[int, Any] = manager.step(dict.fromkeys(manager.ready_obs, action))
    return timesteps


# ---- settings and life ----------------------------------------------------------------------------------------------


@pytest.mark.covers("D-1")
def test_defaults_are_those_of_di_engine_and_every_call_gives_a_copy() -> None:
    cfg = AsyncSubprocessEnvManager.default_config()
    wanted = {
        "episode_num": float("inf"), "max_retry": 1, "step_timeout": None, "auto_reset": True, "retry_type": "reset",
        "reset_timeout": None, "retry_waiting_time": 0.1, "shared_memory": True, "copy_on_get": True, "context": "fork",
        "wait_num": 2, "step_wait_timeout": 0.01, "connect_timeout": 60, "reset_inplace": False,
        "cfg_type": "AsyncSubprocessEnvManagerDict",
    }  # fmt: skip
    assert {name: cfg[name] for name in wanted} == wanted
    sync = SyncSubprocessEnvManager.default_config()
    assert (sync.wait_num, sync.step_wait_timeout) == (float("inf"), None)
    cfg.episode_num = 3
    assert AsyncSubprocessEnvManager.default_config().episode_num == float("inf")


def test_settings_are_attributes_that_may_be_assigned(cls: Any) -> None:
    given = {"step_timeout": 8, "retry_type": "reset"}
    manager = cls(ding_envs(1), given)
    assert (manager._step_timeout, manager._retry_type, manager._auto_reset) == (8, "reset", True)
    manager._retry_type = "renew"
    assert (manager._retry_type, given["retry_type"]) == ("renew", "reset")


def test_the_envs_of_a_base_manager_are_there_after_close() -> None:
    manager = BaseEnvManager(ding_envs(2), {})
    manager.launch()
    manager.close()
    assert len(manager._envs) == 2


@pytest.mark.covers("D-2", "D-B14")
def test_nothing_is_started_before_it_is_needed_and_spaces_come_from_the_workers(make_manager: MakeManager) -> None:
    before = set(psutil.Process().children())  # the starter of an earlier pool lives on for some seconds
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(2))
    assert set(psutil.Process().children()) <= before
    assert manager.observation_space.shape == (3,)
    assert manager.action_space.n == 10
    assert manager.reward_space.shape == (1,)
    assert manager.closed
    manager.launch()
    assert all(pid != psutil.Process().pid for pid in manager.pid)


@pytest.mark.covers("D-2")
def test_an_env_that_knows_its_spaces_after_a_reset_begins_with_its_first_episode(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, [LateSpaces])
    assert manager.observation_space.shape == (3,)
    manager.launch()
    assert manager.ready_obs[0].tolist() == [0, 0, 0]
    assert manager.resets == [[{"stat": ""}]]


@pytest.mark.covers("D-B14")
def test_an_env_is_built_here_only_when_env_ref_is_asked_for(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 1)
    assert manager._reference is None
    assert manager.env_ref.pid == psutil.Process().pid
    assert manager.env_ref is manager._env_ref


class OwnSpace(SyncSubprocessEnvManager):
    """Replaces a space, and uses what DI-engine's managers have for their subclasses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._action_space = spaces.Discrete(2)

    def step(self, actions: Any) -> Any:
        with self._lock:
            assert self._waiting_env == {"step": set()}
            return super().step(actions)


def test_a_subclass_can_assign_a_space_and_use_the_lock(launched: MakeManager) -> None:
    manager = launched(OwnSpace, 1)
    assert manager.action_space == spaces.Discrete(2)
    assert manager._observation_space.shape == (3,)
    assert list(manager.step(manager.random_action())) == [0]


@pytest.mark.covers("D-3", "D-26")
def test_a_closed_manager_refuses_work_and_can_be_launched_again(cls: Any, make_manager: MakeManager) -> None:
    manager = make_manager(cls, ding_envs(2))
    for call in (manager.reset, lambda: manager.step({}), lambda: manager.identity):
        with pytest.raises(AssertionError, match="env manager is closed, please use the alive env manager"):
            call()
    manager.launch()
    with pytest.raises(AssertionError, match="please first close the env manager"):
        manager.launch()
    manager.close()
    manager.close()
    assert manager.closed
    assert set(manager._env_states.values()) == {EnvState.VOID}
    with pytest.raises(AssertionError, match="2 envs"):
        manager.launch(reset_param={0: {}})
    manager.launch(reset_param={0: {"stat": "again"}, 1: None})
    assert [param[-1] for param in manager.resets] == [{"stat": "again"}, {"stat": ""}]


@pytest.mark.covers("D-4", "G-16/cases")
def test_an_env_goes_through_the_states_of_di_engine(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(2, length=1), auto_reset=False, episode_num=2)
    states = manager._env_states
    assert " ".join(EnvState(number).name for number in range(7)) == "VOID INIT RUN RESET DONE ERROR NEED_RESET"
    assert dict(states) == {0: EnvState.VOID, 1: EnvState.VOID}
    manager.launch()
    assert dict(states) == {0: RUN, 1: RUN}
    manager.step({0: 1, 1: "abnormal"})
    assert dict(states) == {0: EnvState.NEED_RESET, 1: EnvState.ERROR}
    manager.reset({0: None, 1: None})
    manager.step({0: 1})
    assert dict(states) == {0: EnvState.DONE, 1: RUN}
    manager.close()
    assert dict(states) == {0: EnvState.VOID, 1: EnvState.VOID}
    with pytest.raises(EngineBug, match="VOID to RUN"):
        states.move(0, RUN)


@pytest.mark.covers("D-4", "D-34")
def test_an_env_is_in_reset_until_its_first_observation_is_here(
    launched: MakeManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(env_lifecycle, "LOG_EVERY_S", 0.02)
    with Gate() as gate, caplog.at_level(logging.WARNING, "stepmill.di_engine"):
        manager = launched(SyncSubprocessEnvManager, length=1, gate=gate)
        manager._reset_param[0] = {"stat": "gate"}
        timesteps = manager.step({0: 1})
        gate.wait_arrivals()
        assert timesteps[0].obs.tolist() == [0, 0, 1]
        assert manager._env_states[0] is EnvState.RESET
        assert list(manager.ready_obs) == [1]
        with pytest.raises(AssertionError, match="please check whether the requested env is in reset or done"):
            manager.step({0: 1})
        opener = threading.Timer(0.2, gate.open, [2])  # long enough for the log to name the wait
        opener.start()
        manager.reset({0: {}})
        opener.join()
    assert manager.ready_obs[0].tolist() == [0, 2, 0]
    assert "VEC_ENV_MANAGER: not all the envs finish resetting, sleep 1 times" in caplog.text


@pytest.mark.covers("D-6")
def test_ready_obs_waits_for_an_env_that_wants_an_action_and_tells_of_a_long_wait(
    launched: MakeManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(env_lifecycle, "LOG_EVERY_S", 0.02)
    with Gate() as gate, caplog.at_level(logging.WARNING, "stepmill.di_engine"):
        manager = launched(SyncSubprocessEnvManager, 1, length=1, gate=gate)
        manager._reset_param[0] = {"stat": "gate"}
        manager.step({0: 1})
        gate.wait_arrivals()
        opener = threading.Timer(0.2, gate.open)
        opener.start()
        assert manager.ready_obs[0].tolist() == [0, 1, 0]
        opener.join()
    assert "VEC_ENV_MANAGER: all the not done envs are resetting, sleep 1 times" in caplog.text
    assert manager.ready_obs_id == [0]
    assert manager.action_space.contains(manager.random_action()[0])


@pytest.mark.covers("D-B3")
def test_ready_obs_is_empty_when_no_env_can_want_an_action(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, length=1, episode_num=1)
    act(manager)
    assert manager.done
    assert manager.ready_obs == {}
    manager = launched(SyncSubprocessEnvManager, length=1, auto_reset=False)
    manager.step({0: 1, 1: "abnormal"})
    assert manager.ready_obs == {}


# ---- episodes and resets --------------------------------------------------------------------------------------------


@pytest.mark.covers("D-5", "D-9")
def test_every_env_has_as_many_episodes_as_it_may(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 3, length=2, episode_num=2)
    ended = dict.fromkeys(range(3), 0)
    count = 0
    while not manager.done:
        for env_id, timestep in act(manager).items():
            count += 1
            ended[env_id] += bool(timestep.done)
    assert ended == {0: 2, 1: 2, 2: 2}
    assert count == sum(len(actions) for actions in manager.actions) == 12
    assert [manager.env_state_done(env_id) for env_id in range(3)] == [True] * 3


@pytest.mark.covers("D-12")
def test_the_last_timestep_has_the_last_observation_and_ready_obs_the_first_of_the_next(
    cls: Any, launched: MakeManager
) -> None:
    manager = launched(cls, 1, length=2)
    act(manager)
    timestep = act(manager)[0]
    assert timestep.done is True
    assert timestep.obs.tolist() == [0, 0, 2]
    assert manager.ready_obs[0].tolist() == [0, 1, 0]


@pytest.mark.covers("D-14")
def test_without_auto_reset_the_caller_resets_one_env_by_itself(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, length=1, auto_reset=False)
    manager.step({0: 1})
    assert manager._env_states[0] is EnvState.NEED_RESET
    assert list(manager.ready_obs) == [1]
    assert manager.reset({0: {"stat": "mine"}}) is None
    assert manager.ready_obs[0].tolist() == [0, 1, 0]
    assert [len(resets) for resets in manager.resets] == [2, 1]


@pytest.mark.covers("D-15")
def test_arguments_of_a_reset_are_kept_for_automatic_ones(cls: Any, make_manager: MakeManager) -> None:
    manager = make_manager(cls, ding_envs(2, length=1))
    manager.launch({0: {"stat": "a", "level": 3}, 1: None})
    for _ in range(2):
        manager.step({0: 1})
        while 0 not in manager.ready_obs:
            pass
    manager.reset()
    assert manager.resets[0] == [{"stat": "a", "level": 3}] * 4
    assert manager.resets[1] == [{"stat": ""}] * 2


@pytest.mark.covers("D-15", "D-20")
def test_a_reset_drops_what_an_env_was_doing(launched: MakeManager) -> None:
    with Gate() as gate:
        manager = launched(AsyncSubprocessEnvManager, gate=gate, wait_num=1)
        assert list(manager.step({0: "gate", 1: 5})) == [1]
        gate.wait_arrivals()
        gate.open()
        manager.reset({0: {"stat": "fresh"}})
    assert manager.ready_obs[0].tolist() == [0, 1, 0]  # and not the reply to the step
    timesteps = manager.step({0: 7})
    assert list(timesteps) == [0]
    assert timesteps[0].reward.tolist() == [7]


@pytest.mark.covers("D-35")
@pytest.mark.parametrize("param", [{0: 3}, {0: [1]}, {9: {}}])
def test_arguments_of_a_reset_must_be_a_dict_for_an_env_that_is_there(launched: MakeManager, param: Any) -> None:
    manager = launched(SyncSubprocessEnvManager, 1)
    with pytest.raises(AssertionError, match=r"reset_param|no envs \[9\]"):
        manager.reset(param)
    assert manager.resets == [[{"stat": ""}]]


# ---- seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("D-16")
def test_seeds_are_sent_once_with_the_next_reset(cls: Any, make_manager: MakeManager) -> None:
    manager = make_manager(cls, ding_envs(3, length=1))
    manager.seed(10)
    manager.launch()
    manager.reset()
    assert manager.seeds == [[(10, "not given")], [(11, "not given")], [(12, "not given")]]
    manager.seed([7, 8, 9], dynamic_seed=False)
    manager.reset({1: None})
    assert [seeds[-1] for seeds in manager.seeds] == [(10, "not given"), (8, False), (12, "not given")]
    manager.seed({2: 5}, True)
    manager.reset()
    assert [seeds[-1] for seeds in manager.seeds] == [(7, True), (8, False), (5, True)]


@pytest.mark.covers("D-16", "D-39")
def test_seeds_are_not_sent_again_by_another_launch(cls: Any, make_manager: MakeManager) -> None:
    manager = make_manager(cls, ding_envs(3, length=1))
    manager.seed(5)
    manager.launch()
    assert manager.seeds == [[(5, "not given")], [(6, "not given")], [(7, "not given")]]
    manager.close()
    manager.launch()
    assert manager.seeds == [[], [], []]  # or the second launch would repeat the episodes of the first


@pytest.mark.covers("D-16")
def test_seeds_must_be_a_number_a_list_of_all_or_a_dict(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(2))
    with pytest.raises(AssertionError, match=r"len\(seed\) 3 != env_num 2"):
        manager.seed([1, 2, 3])
    with pytest.raises(TypeError, match="invalid seed arguments type"):
        manager.seed("1")
    manager.seed(4)
    first = manager.random_action
    manager.launch()
    drawn = [first()[0] for _ in range(5)]
    manager.seed(4)
    assert [manager.random_action()[0] for _ in range(5)] == drawn


@pytest.mark.covers("D-17")
def test_dynamic_seeds_give_every_episode_its_own_and_static_ones_the_same(make_manager: MakeManager) -> None:
    def starts(dynamic_seed: bool | None) -> list[list[float]]:
        manager = make_manager(SyncSubprocessEnvManager, [partial(gymnasium.make, "CartPole-v1")])
        manager.seed(3, dynamic_seed=dynamic_seed)
        manager.launch()
        found = [manager.ready_obs[0].tolist()]
        for _ in range(2):
            manager.reset()
            found.append(manager.ready_obs[0].tolist())
        return found

    dynamic, static = starts(None), starts(False)
    assert len({str(start) for start in dynamic}) == 3
    assert starts(True) == dynamic  # drawn from a generator that the seed fixes
    assert len({str(start) for start in static}) == 1
    draws = np.random.RandomState(3)
    env = gymnasium.make("CartPole-v1")
    assert [env.reset(seed=3 + 100 * int(draws.randint(1, 1000)))[0].tolist() for _ in range(3)] == dynamic


@pytest.mark.covers("D-B18")
def test_a_seed_that_an_env_refuses_is_an_error(cls: Any, make_manager: MakeManager) -> None:
    manager = make_manager(cls, ding_envs(2))
    manager.seed({1: 666})
    with pytest.raises((RuntimeError, ValueError), match="a bad seed"):
        manager.launch()
    assert manager.closed


class GlobalGenerator(DingEnv):
    """Seeds NumPy's global generator and draws from it in its resets, as DI-engine's envs do."""

    def seed(self, seed: int, dynamic_seed: object = True) -> None:
        np.random.seed(seed)  # noqa: NPY002

    def reset(self, stat: str = "", **kwargs: Any) -> Any:
        self.drawn = int(np.random.randint(1000))  # noqa: NPY002
        return super().reset(stat, **kwargs)


@pytest.mark.covers("D-17", "D-30")
def test_envs_of_one_process_are_all_seeded_before_the_first_reset(make_manager: MakeManager) -> None:
    manager = make_manager(BaseEnvManager, [GlobalGenerator] * 3)
    manager.seed(4)
    manager.launch()
    last = np.random.RandomState(6)
    assert manager.drawn == last.randint(1000, size=3).tolist()  # as in the original


@pytest.mark.covers("D-27")
def test_env_fns_travel_by_value_and_workers_are_named_after_their_env(launched: MakeManager) -> None:
    import multiprocessing

    class Local:
        def __init__(self) -> None:
            self.__dict__.update(ding_envs(1)[0]().__dict__)
            self.process_name = multiprocessing.current_process().name
            self.reset = lambda: np.zeros(3, np.float32)

        def close(self) -> None: ...

    manager = launched(SyncSubprocessEnvManager, [lambda: Local()] * 2, context="forkserver")
    assert [name.rpartition("_")[0] for name in manager.process_name] == [
        "subprocess_env_manager0",
        "subprocess_env_manager1",
    ]


@pytest.mark.covers("D-32", "D-B13")
def test_an_env_that_executes_an_action_is_active_and_not_ready(launched: MakeManager, gate: Gate) -> None:
    manager = launched(AsyncSubprocessEnvManager, 3, gate=gate, wait_num=1)
    manager.step({0: "gate", 1: 1})
    assert manager.ready_env == manager.ready_obs_id == list(manager.ready_obs) == [1, 2]
    assert manager.active_env == [0, 1, 2]
    with pytest.raises(AssertionError, match=r"envs \[0\] still execute an action"):
        manager.step({0: 1})
    gate.open()


@pytest.mark.covers("D-8")
def test_a_step_is_refused_with_the_states_of_the_envs_it_names(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, length=1, episode_num=1)
    manager.step({0: 1})
    with pytest.raises(AssertionError, match=r"current env state are: \{0: <EnvState.DONE: 4>, 1: <EnvState.RUN: 2>\}"):
        manager.step({0: 1, 1: 1})
    assert [len(actions) for actions in manager.actions] == [1, 0]
    timestep = manager.step({1: np.array([4])})[1]
    assert timestep._fields == ("obs", "reward", "done", "info")
    assert (timestep.reward.dtype, timestep.reward.tolist()) == (np.float32, [4])
    assert manager.actions[1] == [np.array([4])]


@pytest.mark.covers("D-3", "D-1")
@pytest.mark.parametrize(
    ("cfg", "text"),
    [({"retry_type": "pray"}, "retry_type='pray'"), ({"on_error": "cry"}, "on_error='cry'"),
     ({"reset_inplace": True, "auto_reset": False}, "reset_inplace is unavailable when auto_reset=False.")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(cfg: dict[str, Any], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        SyncSubprocessEnvManager(ding_envs(1), cfg)
