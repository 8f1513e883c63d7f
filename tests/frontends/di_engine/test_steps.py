"""DI-engine's managers: which timesteps a step returns, and when; resets in place; tree arrays; managers by name."""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from stepmill.frontends import di_engine
from stepmill.frontends.di_engine import (
    AsyncSubprocessEnvManager,
    BaseEnvManager,
    BaseEnvManagerV2,
    EnvState,
    GymVectorEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
    managers,
    trees,
)
from stepmill.spec.errors import UsageError
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import TreeEnv, ding_envs, opened_later
from tests.frontends.di_engine.test_managers import act

LONG_S = 60.0


@pytest.fixture(autouse=True)
def without_treetensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_library", lambda: None)


# ---- wait_num and step_wait_timeout ---------------------------------------------------------------------------------


@pytest.mark.covers("D-9", "D-B1")
@pytest.mark.parametrize("timeout", [None, 0.01])
def test_a_step_returns_with_wait_num_timesteps_while_other_envs_step(
    launched: MakeManager, gate: Gate, timeout: float | None
) -> None:
    manager = launched(AsyncSubprocessEnvManager, 4, gate=gate, wait_num=2, step_wait_timeout=timeout)
    timesteps = manager.step({0: "gate", 1: 1, 2: 2, 3: "gate"})
    assert sorted(timesteps) == [1, 2]
    assert list(manager.ready_obs) == [1, 2]
    gate.open(2)


@pytest.mark.covers("D-9", "D-39")
def test_a_step_never_returns_less_than_wait_num_timesteps(launched: MakeManager, gate: Gate) -> None:
    manager = launched(AsyncSubprocessEnvManager, 3, length=9, gate=gate)
    with opened_later(gate, 2):
        timesteps = manager.step({0: "gate", 1: 1, 2: "gate"})  # step_wait_timeout passes with one timestep
    assert len(timesteps) >= 2


@pytest.mark.covers("D-9", "D-39")
def test_a_step_waits_for_more_than_wait_num_until_step_wait_timeout(launched: MakeManager, gate: Gate) -> None:
    manager = launched(AsyncSubprocessEnvManager, 3, gate=gate, wait_num=1, step_wait_timeout=LONG_S)
    with opened_later(gate, 2):
        timesteps = manager.step({0: "gate", 1: 1, 2: "gate"})
    assert sorted(timesteps) == [0, 1, 2]


@pytest.mark.covers("D-9", "D-B1", "D-39")
def test_a_step_returns_what_is_there_at_its_deadline(launched: MakeManager, gate: Gate) -> None:
    manager = launched(AsyncSubprocessEnvManager, 3, gate=gate, wait_num=3, step_deadline=1.0)
    began = time.monotonic()
    timesteps = manager.step({0: "gate", 1: 1, 2: "gate"})  # the original waits for three without end
    assert list(timesteps) == [1]
    assert time.monotonic() - began >= 1.0
    gate.open(2)


@pytest.mark.covers("D-9")
def test_late_timesteps_come_with_a_later_step(launched: MakeManager, gate: Gate) -> None:
    manager = launched(AsyncSubprocessEnvManager, 3, length=9, gate=gate, wait_num=1)
    first = manager.step({0: "gate", 1: 1, 2: 2})
    assert 0 not in first
    seen = dict(first)
    gate.open()
    while 0 not in seen:
        seen.update(manager.step(dict.fromkeys(manager.ready_obs, 3)))
    assert seen[0].obs.tolist() == [0, 0, 1]


@pytest.mark.covers("D-9")
def test_a_step_never_returns_ended_episodes_alone_while_others_are_at_work(launched: MakeManager, gate: Gate) -> None:
    fns = [*ding_envs(1, length=1), *ding_envs(2, length=9, gate=str(gate.path))[1:]]
    manager = launched(AsyncSubprocessEnvManager, fns, wait_num=1, step_wait_timeout=0.05, auto_reset=False)
    with opened_later(gate):
        timesteps = manager.step({0: 1, 1: "gate"})  # 0 is done: without 1 there would be no observation to go on with
    assert sorted(timesteps) == [0, 1]
    assert list(manager.ready_obs) == [1]


@pytest.mark.covers("D-B1")
def test_a_step_returns_at_most_max_get_and_keeps_the_rest(launched: MakeManager) -> None:
    manager = launched(AsyncSubprocessEnvManager, 4, wait_num=4, step_wait_timeout=None, max_get=3)
    first = manager.step({0: 1, 1: 1, 2: 1, 3: 1})
    assert len(first) == 3
    (kept,) = set(range(4)) - set(first)
    assert manager.ready_env == sorted(first)
    assert list(manager.step({})) == [kept]


@pytest.mark.covers("D-10", "D-B1")
def test_wait_takes_its_number_and_its_deadline_at_their_word() -> None:
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(3)), strict=True)
    with pytest.raises(AssertionError, match="please indicate proper wait_num: <wait_num: 4, rest_conn_num: 3>"):
        AsyncSubprocessEnvManager.wait(list(ours), 4, None)
    theirs[2].send("answer")
    began = time.monotonic()
    assert AsyncSubprocessEnvManager.wait(list(ours), 1, LONG_S) == ([ours[2]], [2])  # the original lingers
    assert AsyncSubprocessEnvManager.wait(list(ours), 1, None) == ([ours[2]], [2])  # the original waits for all
    assert AsyncSubprocessEnvManager.wait(list(ours), 2, 0.05) == ([ours[2]], [2])  # the original has no bound
    assert time.monotonic() - began < LONG_S / 2
    for connection in (*ours, *theirs):
        connection.close()


@pytest.mark.covers("D-11")
def test_a_synchronous_step_returns_the_envs_named_in_their_order(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 4)
    timesteps = manager.step({3: 1, 0: 2, 2: 3})
    assert list(timesteps) == [3, 0, 2]
    assert [timestep.reward.tolist() for timestep in timesteps.values()] == [[1], [2], [3]]
    assert manager.ready_obs[1].tolist() == [1, 0, 0]


# ---- reset in place -------------------------------------------------------------------------------------------------


@pytest.mark.covers("D-13", "D-B9")
def test_reset_in_place_returns_the_first_observation_and_keeps_the_last(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, ding_envs(2, length=2), reset_inplace=True, episode_num=3)
    manager.launch({0: {"stat": "mine"}, 1: None})
    act(manager)
    timestep = act(manager)[0]
    assert timestep.done is True
    assert timestep.obs.tolist() == [0, 1, 0]
    assert timestep.info["final_obs"].tolist() == [0, 0, 2]  # dropped by the original
    assert manager._env_states[0] is EnvState.RUN
    assert manager.ready_obs[0].tolist() == [0, 1, 0]
    assert manager.resets[0] == [{"stat": "mine"}] * 2  # the original resets without arguments
    while not manager.done:
        act(manager)
    assert manager._env_episode_count == {0: 3, 1: 3}


@pytest.mark.covers("D-13")
def test_in_place_the_same_seeds_give_the_same_interaction(make_manager: MakeManager) -> None:
    def play() -> list[Any]:
        manager = make_manager(SyncSubprocessEnvManager, [_cartpole] * 2, reset_inplace=True)
        manager.seed(5)
        manager.launch()
        return [(list(step), [t.obs.tolist() for t in step.values()]) for step in (act(manager, 1) for _ in range(30))]

    assert play() == play()


def _cartpole() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


# ---- Gymnasium's envs -----------------------------------------------------------------------------------------------


def test_a_gymnasium_env_gives_di_engine_s_timesteps(make_manager: MakeManager) -> None:
    manager = make_manager(SyncSubprocessEnvManager, [_cartpole], episode_num=1)
    manager.seed(0)
    manager.launch()
    total = 0.0
    while not manager.done:
        timestep = manager.step({0: np.array([1])})[0]
        total += timestep.reward.item()
    assert (timestep.reward.dtype, timestep.reward.shape) == (np.float32, (1,))
    assert timestep.info["eval_episode_return"] == total
    assert timestep.obs.dtype == np.float32


@pytest.mark.covers("D-27", "D-11")
def test_envs_can_share_processes(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 4, num_workers=2)
    assert len(set(manager.pid)) == 2
    assert [timestep.obs.tolist() for timestep in act(manager).values()] == [[i, 0, 1] for i in range(4)]


# ---- tree arrays ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[BaseEnvManagerV2, SubprocessEnvManagerV2])
def v2(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.covers("D-28/stacked", "D-28/timesteps", "D-28/actions")
def test_v2_observations_are_stacked_in_the_order_of_their_ids(v2: Any, launched: MakeManager) -> None:
    manager = launched(v2, [partial(TreeEnv, i) for i in range(3)])
    obs = manager.ready_obs
    assert obs.pose.place.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert obs["pose"]["turn"].shape == (3,)
    timesteps = manager.step(np.array([1, 2, 3]))
    assert [int(timestep.env_id) for timestep in timesteps] == [0, 1, 2]
    assert timesteps[1].obs.pose.place.tolist() == [1, 1]
    assert timesteps[1].reward.tolist() == [1.5, 2]
    assert not timesteps[1].done


@pytest.mark.covers("D-28/timesteps", "D-B13")
def test_v2_infos_have_identifiers_as_keys_and_omit_strings(
    v2: Any, launched: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager = launched(v2, 1, length=9)
    info = manager.step(["info"])[0].info
    assert (int(info._1st), float(info.a_b)) == (1, 2.0)
    assert "name" not in info
    assert "info keys ['name'] are omitted" in caplog.text
    caplog.clear()
    manager.step(["info"])
    assert caplog.text == ""  # once is enough


@pytest.mark.covers("D-28/actions", "D-B13")
def test_v2_refuses_another_number_of_actions_than_of_envs(v2: Any, launched: MakeManager) -> None:
    manager = launched(v2, 3)
    with pytest.raises(UsageError, match=r"got 2 actions for 3 envs; .* \[0, 1, 2\]"):
        manager.step([1, 2])
    assert len(manager.step({1: 4})) == 1


@pytest.mark.covers("D-28/stacked", "D-B3")
def test_v2_observations_are_empty_when_no_env_needs_an_action(v2: Any, launched: MakeManager) -> None:
    manager = launched(v2, length=1, episode_num=1)
    manager.step([1, 1])
    assert manager.done
    assert len(manager.ready_obs) == 0


def test_actions_of_a_tree_are_split_into_rows() -> None:
    rows = trees.rows_of_tree(trees.Tree(a=np.arange(2), b=trees.Tree(c=np.ones((2, 3)))))
    assert [int(row.a) for row in rows] == [0, 1]
    assert rows[1].b.c.shape == (3,)
    with pytest.raises(AttributeError, match="this tree has no 'd'"):
        _ = rows[0].d


# ---- in line --------------------------------------------------------------------------------------------------------


@pytest.mark.covers("D-30")
def test_in_line_a_step_is_tried_max_retry_times_and_the_others_lose_nothing(launched: MakeManager) -> None:
    manager = launched(BaseEnvManager, 3, max_retry=3)
    with pytest.raises(
        RuntimeError, match=r"Env 1 step has exceeded max retries\(3\), and the latest exception is"
    ) as caught:
        manager.step({0: 1, 1: "error", 2: 2})
    assert manager._envs[1].actions == ["error"] * 3
    assert sorted(caught.value.timesteps) == [0, 2]
    assert not manager.closed
    assert manager._env_states == {0: EnvState.RUN, 1: EnvState.ERROR, 2: EnvState.RUN}
    assert manager.ready_obs[2].tolist() == [2, 0, 1]
    manager.reset({1: None})
    assert act(manager)[1].obs.tolist() == [1, 1, 1]


@pytest.mark.covers("D-30")
def test_in_line_a_step_that_fails_once_is_not_noticed(launched: MakeManager) -> None:
    manager = launched(BaseEnvManager, 1, max_retry=2)
    assert manager.step({0: "once"})[0].obs.tolist() == [0, 0, 2]


@pytest.mark.covers("D-30", "D-19")
def test_in_line_an_alarm_ends_a_step_and_a_reset_that_hang(launched: MakeManager) -> None:
    manager = launched(BaseEnvManager, 1, step_timeout=0.1, reset_timeout=0.1)
    with pytest.raises(RuntimeError, match=r"the env's step took longer than 0.1 s"):
        manager.step({0: "sleep"})
    with pytest.raises(RuntimeError, match=r"the env's reset took longer than 0.1 s"):
        manager.reset({0: {"stat": "sleep"}})
    assert manager.closed


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("D-29/names")
@pytest.mark.parametrize(
    ("name", "cls"),
    [("base", BaseEnvManager), ("base_v2", BaseEnvManagerV2), ("async_subprocess", AsyncSubprocessEnvManager),
     ("subprocess", SyncSubprocessEnvManager), ("subprocess_v2", SubprocessEnvManagerV2),
     ("gym_vector", GymVectorEnvManager)],
)  # fmt: skip
def test_managers_are_made_by_their_names_and_the_config_is_not_changed(name: str, cls: Any) -> None:
    cfg = {"type": name, "episode_num": 4, "import_names": ["stepmill.frontends.di_engine"]}
    manager = di_engine.create_env_manager(cfg, ding_envs(1))
    assert type(manager) is cls
    assert manager._episode_num == 4
    assert cfg == {"type": name, "episode_num": 4, "import_names": ["stepmill.frontends.di_engine"]}
    assert di_engine.get_env_manager_cls(cfg) is cls


@pytest.mark.covers("D-29/names")
def test_a_gym_vector_manager_begins_with_a_reset(make_manager: MakeManager) -> None:
    manager = make_manager(GymVectorEnvManager, [_cartpole] * 2, episode_num=1)
    manager.reset()
    while not manager.done:
        timesteps = act(manager, np.array([1]))
    assert all("eval_episode_return" in timestep.info for timestep in timesteps.values() if timestep.done)


@pytest.mark.covers("D-29/names")
def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"there is no manager 'ray'; use one of .*'subprocess'"):
        di_engine.create_env_manager({"type": "ray"}, ding_envs(1))


@pytest.mark.covers("D-29/registry")
def test_a_di_engine_that_cannot_be_imported_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(managers, "has_ding", lambda: True)
    monkeypatch.setitem(sys.modules, "ding", None)
    monkeypatch.setitem(sys.modules, "ding.envs", None)
    managers.register_if_there()
    assert "DI-engine cannot be imported, so its registry is not changed" in caplog.text
