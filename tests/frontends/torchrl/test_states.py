"""What envs keep beyond an episode, saved and loaded; and what they are made with, changed while they run."""

from __future__ import annotations

import io
import os
import signal
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from torchrl.collectors import Collector

import stepmill
from stepmill.frontends.torchrl import AsyncStepmillEnv, MultiThreadedEnv, StepmillEnv
from stepmill.testing import CountingEnv
from tests.frontends.torchrl.makers import BACKENDS

DIE, FAIL_ONCE = 99, 98

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")


class Keeping(CountingEnv):
    """Has a level, which it adds to rewards and saves; a step raises, or ends the process, on command."""

    def __init__(self, identity: int = 0, length: int = 50, *, level: int = 0, tags: Any = ()) -> None:
        super().__init__(identity, length)
        self.level = level
        self.tags = tags
        self.has_failed = False

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["level"] < 0:
            raise ValueError("no level below 0")
        self.level = state["level"]

    def step(self, action: np.int64) -> Any:
        if action == DIE:
            os._exit(17)
        if action == FAIL_ONCE and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("told to")
        obs, reward, *rest = super().step(action)
        return obs, float(reward) + 1000 * self.level, *rest


class Wide(Keeping):
    def __init__(self, identity: int = 0, *, width: int = 100) -> None:
        super().__init__(identity)
        self.action_space = gymnasium.spaces.Discrete(width)


def keeping(num: int, where: str = "serial", cls: Any = StepmillEnv, **kwargs: Any) -> Any:
    fns = [partial(Keeping, env_id) for env_id in range(num)]
    return cls(fns, **{**BACKENDS[where], "categorical_action_encoding": True, **kwargs})


def under(on_fault: str) -> Any:
    return stepmill.PoolOptions(context="fork", on_fault=on_fault, seeding="per_episode")


def normalized() -> Any:
    return NormalizeReward(NormalizeObservation(gymnasium.make("CartPole-v1")))


def act(env: Any, td: Any, *actions: int) -> Any:
    return env.step(td.set("action", torch.tensor(actions)))["next"]


def levels(env: Any) -> list[int]:
    """What the envs show: by their rewards, after a reset of all."""
    td = env.reset()
    rewards = act(env, td, *[1] * td.batch_size[0])["reward"].flatten()
    return [int(reward) // 1000 for reward in rewards]


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_what_envs_keep_is_saved_by_worker_and_loaded_again(made, where):
    env = made(keeping(3, where))
    env.load_state_dict({f"worker{i}": {"Keeping": {"level": 4 + i}} for i in range(3)})
    assert levels(env) == [4, 5, 6]
    saved = env.state_dict()
    assert saved == {f"worker{i}": {"Keeping": {"level": 4 + i}} for i in range(3)}

    other = made(keeping(3, where, cls=AsyncStepmillEnv))
    other.load_state_dict(saved)
    assert levels(other) == [4, 5, 6]
    other.load_state_dict(saved["worker1"])  # the state of one, for all
    assert levels(other) == [5, 5, 5]
    other.load_state_dict({})
    assert levels(other) == [5, 5, 5]


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_running_statistics_of_wrappers_are_saved_as_tensors(made, where):
    options = {**BACKENDS[where], "categorical_action_encoding": True}
    env = StepmillEnv([normalized] * 2, **options)
    env.rollout(20, break_when_any_done=False)
    buffer = io.BytesIO()
    torch.save(env.state_dict(), buffer)
    env.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert set(saved["worker1"]) == {"NormalizeReward.return_rms", "NormalizeObservation.obs_rms"}
    assert float(saved["worker0"]["NormalizeObservation.obs_rms"]["count"]) > 20

    other = made(StepmillEnv([normalized] * 2, **options))
    other.load_state_dict(saved)
    for name, part in other.state_dict()["worker1"].items():
        for key, value in part.items():
            assert torch.equal(value, saved["worker1"][name][key]), (name, key)
    other.rollout(5)  # they go on from there
    again = other.state_dict()["worker0"]["NormalizeObservation.obs_rms"]
    assert again["count"] > saved["worker0"]["NormalizeObservation.obs_rms"]["count"]


@pytest.mark.covers("T-12")
def test_what_was_saved_or_loaded_is_nobody_elses():
    env = StepmillEnv([normalized] * 2, backend="serial", categorical_action_encoding=True)
    env.rollout(5)
    saved = env.state_dict()
    copied = saved["worker0"]["NormalizeObservation.obs_rms"]["mean"].clone()
    env.load_state_dict(saved["worker0"])
    saved["worker0"]["NormalizeObservation.obs_rms"]["mean"].fill_(7)
    env.close()
    env.reset()  # opened again: given what was loaded, not what it was changed into
    means = [row["NormalizeObservation.obs_rms"]["mean"] for row in env.state_dict().values()]
    assert (means[0] - copied).abs().max() < 1
    first, second = env.pool.get_attr("obs_rms")
    assert not np.shares_memory(first.mean, second.mean)
    env.close()


@pytest.mark.covers("T-12", "G-5")
@pytest.mark.parametrize("on_fault", ["truncate", "replay"])
def test_a_worker_that_is_started_again_is_given_what_was_loaded(made, on_fault):
    env = made(keeping(2, "process", options=under(on_fault)))
    env.load_state_dict({"Keeping": {"level": 3}})
    td = env.reset()
    env.load_state_dict({"worker0": {"Keeping": {"level": 7}}}, strict=False)  # in the middle of an episode
    assert act(env, td, 1, 1)["reward"].flatten().tolist() == [7001, 3001]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # under replay it dies again, which causes a warning
        assert act(env, td, DIE, 1)["truncated"].flatten().tolist() == [True, False]
    assert levels(env) == [7, 3]


@pytest.mark.covers("T-12", "G-5")
def test_an_episode_that_is_played_again_knows_what_was_loaded_in_its_middle(made):
    env = made(keeping(2, "process", options=under("replay")))
    td = env.reset()
    act(env, td, 1, 1)
    env.load_state_dict({"Keeping": {"level": 7}})
    before = act(env, td, 1, 1)
    env.state_dict()
    os.kill(env.pool.stats().workers[0].pid, signal.SIGKILL)
    after = act(env, td, 1, 1)
    assert after["reward"].flatten().tolist() == before["reward"].flatten().tolist() == [7001, 7001]
    assert not after["truncated"].any()
    assert [row[2] for row in after["observation"].tolist()] == [3, 3]


@pytest.mark.covers("T-12")
def test_reading_a_state_leaves_no_mark_so_that_an_episode_can_be_played_again_without_processes(made):
    options = stepmill.PoolOptions(on_fault="replay", seeding="per_episode")
    env = made(keeping(2, "thread", options=options))
    env.load_state_dict({"Keeping": {"level": 2}})
    td = env.reset(seed=0)
    act(env, td, 1, 1)
    assert env.state_dict()["worker1"] == {"Keeping": {"level": 2}}
    assert env.level == [2, 2]
    after = act(env, td, 1, FAIL_ONCE)
    assert not after["truncated"].any()
    assert [row[2] for row in after["observation"].tolist()] == [2, 2]


@pytest.mark.covers("T-12")
def test_a_state_that_does_not_fit_is_refused_before_any_env_is_given_it(made):
    env = made(keeping(2))
    for state, words in (
        ({"worker0": {"Keeping": {"level": 1}}}, r"missing \['worker1'\]"),
        ({"worker0": {"Keeping": {"level": 1}}, "worker1": {"Other": {}}}, r"env 1: missing \['Keeping'\], unexpected"),
        ({"worker0": 3, "worker1": {}}, "not a int"),
    ):
        with pytest.raises(stepmill.UsageError, match=words):
            env.load_state_dict(state)
    with pytest.raises(TypeError):
        env.load_state_dict(None)
    assert levels(env) == [0, 0]
    env.load_state_dict({"worker1": {"Keeping": {"level": 1}, "Other": 3}, "worker0": {}}, strict=False)
    assert levels(env) == [0, 1]
    with pytest.raises(stepmill.EnvError, match="no level below 0"):
        env.load_state_dict({"Keeping": {"level": -1}})


class Bonus(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Saves a number of its own."""

    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def bonus() -> Any:
    return Bonus(Keeping())


def numbers(env: Any, num: int) -> list[tuple[int, int]]:
    return list(env.pool.get_attr(lambda one: (one.number, one.env.level), env_ids=range(num)))


@pytest.mark.covers("T-12")
def test_parts_that_were_loaded_at_different_times_are_all_given_to_envs_that_are_built_anew():
    env = StepmillEnv(
        [bonus] * 2, categorical_action_encoding=True, **{**BACKENDS["process"], "options": under("truncate")}
    )
    env.load_state_dict({"Bonus": {"number": 1}, "Keeping": {"level": 2}})
    td = env.reset()
    env.load_state_dict({"worker0": {}, "worker1": {"Bonus": {"number": 5}}}, strict=False)
    assert numbers(env, 2) == [(1, 2), (5, 2)]
    act(env, td, 1, DIE)  # its worker is started again
    env.reset()
    assert numbers(env, 2) == [(1, 2), (5, 2)]
    env.close()
    env.reset()
    assert numbers(env, 2) == [(1, 2), (5, 2)]
    env.load_state_dict({"Bonus": {"number": 7}}, strict=False)
    env.close()
    env.reset()
    assert numbers(env, 2) == [(7, 2), (7, 2)]
    env.load_state_dict({"worker1": {"Bonus": {"number": 8}}}, strict=False)  # of one of them alone
    assert numbers(env, 2) == [(7, 2), (8, 2)]
    env.close()


@pytest.mark.covers("T-12")
def test_spares_are_given_again_what_was_loaded_for_all():
    options = stepmill.PoolOptions(resets={"spare_envs": 1})
    env = StepmillEnv([bonus] * 3, backend="thread", categorical_action_encoding=True, options=options)
    env.reset()
    env.load_state_dict({"Bonus": {"number": 1}, "Keeping": {"level": 2}})
    before = numbers(env, 3)
    env.close()
    env.reset()
    assert numbers(env, 3) == before == [(1, 2)] * 3
    env.close()


@pytest.mark.covers("T-12")
def test_a_view_saves_and_loads_its_own_envs(made):
    env = made(keeping(4))
    env.load_state_dict({f"worker{i}": {"Keeping": {"level": i}} for i in range(4)})
    assert env[2:].state_dict() == {"worker0": {"Keeping": {"level": 2}}, "worker1": {"Keeping": {"level": 3}}}
    env[[3, 0]].load_state_dict(env[1:3].state_dict())
    assert levels(env) == [2, 1, 2, 1]


@pytest.mark.covers("T-12")
def test_collectors_and_modules_can_save_an_env_that_keeps_something(made):
    env = made(keeping(2))
    collector = Collector(env, None, frames_per_batch=4, total_frames=8)
    saved = collector.state_dict()
    collector.load_state_dict(saved, strict=False)  # without a policy to load
    collector.shutdown(close_env=False)
    holder = torch.nn.Module()
    holder.env = env
    assert holder.state_dict() == {}


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_new_keyword_arguments_hold_from_the_next_reset_of_all_envs(where):
    env = keeping(3, where, create_env_kwargs={"level": 2})
    assert levels(env) == [2, 2, 2]
    td = env.reset()
    env.update_kwargs({"level": 3})
    assert [int(r) // 1000 for r in act(env, td, 1, 1, 1)["reward"].flatten()] == [2, 2, 2]  # what runs, runs on
    env[:2].reset()
    assert env.level == [2, 2, 2]
    assert levels(env) == [3, 3, 3]
    env.update_kwargs([{"level": 4}, {}, {"length": 9}])
    assert levels(env) == [4, 3, 3]
    assert env.length == [50, 50, 9]
    env.close()
    assert levels(env) == [4, 3, 3]
    env.close()


@pytest.mark.covers("T-12")
def test_envs_that_all_end_at_once_begin_again_with_the_new_arguments(made):
    env = made(keeping(2, create_env_kwargs={"length": 2}))
    td = env.reset()
    env.update_kwargs({"level": 5})
    rewards = []
    for _ in range(3):
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.tensor([1, 1])))
        rewards.append(stepped["next", "reward"].flatten().tolist())
    assert rewards == [[1, 1], [1, 1], [5001, 5001]]
    assert [row[2] for row in td["observation"].tolist()] == [1, 1]


@pytest.mark.covers("T-12", "G-5")
def test_a_worker_that_is_started_again_makes_its_envs_with_the_new_arguments(made):
    env = made(keeping(2, "process", options=under("truncate")))
    env.update_kwargs({"level": 6})
    td = env.reset()
    assert act(env, td, DIE, 1)["truncated"].flatten().tolist() == [True, False]
    assert levels(env) == [6, 6]
    env.load_state_dict({"Keeping": {"level": 8}})
    env.update_kwargs({"length": 9})
    assert levels(env) == [8, 8]  # what was loaded is given to the new envs, too


def test_workers_need_no_torch_for_any_of_it(made):
    env = made(StepmillEnv([CountingEnv] * 2, backend="process", num_workers=1, create_env_kwargs={"length": 4}))
    env.load_state_dict(env.state_dict())
    assert env.length == [4, 4]
    assert env.pool.get_attr(_has_torch, env_ids=[0]) == (False,)


_has_torch = eval("lambda env: 'torch' in __import__('sys').modules")  # of no module: this one would load torch there


@pytest.mark.covers("T-12")
def test_arguments_are_copied_for_each_env_and_never_changed(made):
    mine = {"tags": ["a"]}
    env = made(keeping(2, create_env_kwargs=mine))
    env.pool.call(lambda env: env.unwrapped.tags.append("b"), env_ids=[0])
    assert env.tags == [["a", "b"], ["a"]]
    env.update_kwargs({"level": 1})
    env.reset()
    assert env.tags == [["a"], ["a"]]
    assert mine == {"tags": ["a"]}


@pytest.mark.covers("T-12")
def test_arguments_that_make_no_such_env_are_refused_and_can_be_put_right(made):
    env = made(StepmillEnv([Wide] * 2, backend="serial", categorical_action_encoding=True))
    with pytest.raises(stepmill.UsageError, match="got 1 and 2"):
        env.update_kwargs([{}])
    env.update_kwargs({"width": 50})
    with pytest.raises(stepmill.UsageError, match="make a new env"):
        env.reset()
    env.update_kwargs({"width": 100, "nonsense": 1})
    with pytest.raises(stepmill.EnvError, match="nonsense"):
        env.reset()
    given = stepmill.Pool([CountingEnv], backend="serial", options=stepmill.PoolOptions(autoreset_mode="Disabled"))
    env = made(StepmillEnv(given))
    with pytest.raises(stepmill.UsageError, match="make a new pool"):
        env.update_kwargs({"length": 3})


@pytest.mark.covers("T-12", "T-1")
def test_envs_by_name_take_new_arguments_too(made):
    env = made(MultiThreadedEnv(2, CountingEnv, create_env_kwargs=[{"length": 3}, {"length": 4}], backend="serial"))
    env.reset()
    assert env.length == [3, 4]
    env.update_kwargs({"length": 8})
    env.reset()
    assert env.length == [8, 8]
    env = made(MultiThreadedEnv(2, "CartPole-v1", create_env_kwargs={"num_threads": 1, "seed": 1}))
    first = env.reset()["observation"]
    env.update_kwargs({"seed": 5})
    second = env.reset()["observation"]
    assert not torch.equal(first, second)
    env.update_kwargs({"seed": 1})
    assert torch.equal(env.reset()["observation"], first)
    assert env.state_dict() == {"worker0": {}, "worker1": {}}
    with pytest.raises(stepmill.UsageError, match="one mapping"):
        env.update_kwargs([{"seed": 5}, {"seed": 6}])
