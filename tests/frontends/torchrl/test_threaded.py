"""`MultiThreadedEnv` and `MultiThreadedEnvWrapper` over real EnvPool pools, and over Python envs."""

from __future__ import annotations

import copy
from functools import partial

import envpool
import numpy as np
import pytest
import torch
from torchrl.data import Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.utils import check_env_specs

import stepmill
from stepmill.frontends.torchrl import MultiThreadedEnv, MultiThreadedEnvWrapper
from stepmill.testing import CountingEnv

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*precision lowered by casting:UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
TASKS = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "CheetahRun-v1", "FrozenLake-v1", "Pong-v5"]
THREADS = {"num_threads": 2}


def make_pool(task_id="CartPole-v1", num_envs=4, **kwargs):
    return envpool.make(task_id, env_type="gymnasium", num_envs=num_envs, num_threads=2, **kwargs)


def cartpoles(num=2, *, seed=None, **keywords):
    """Return EnvPool's CartPole envs."""
    kwargs = THREADS if seed is None else {**THREADS, "seed": seed}
    return MultiThreadedEnv(num, "CartPole-v1", create_env_kwargs=kwargs, **keywords)


@pytest.mark.covers("T-B9")
@pytest.mark.parametrize("task_id", TASKS)
@pytest.mark.parametrize("is_categorical", [True, False])
def test_torchrls_own_checker_passes_on_every_task(made, task_id, is_categorical):
    env = made(MultiThreadedEnv(3, task_id, create_env_kwargs=THREADS, categorical_action_encoding=is_categorical))
    check_env_specs(env, break_when_any_done="both", seed=3)


def make_stepmill_pool():
    return stepmill.Pool([CountingEnv] * 4, backend="serial", autoreset_mode="Disabled")


@pytest.mark.covers("T-1", "T-13", "T-B1")
@pytest.mark.parametrize("make", [make_pool, partial(make_pool, batch_size=2), make_stepmill_pool])
def test_an_existing_pool_is_wrapped_synchronous_or_not(made, make):
    env = made(MultiThreadedEnvWrapper(make()))
    check_env_specs(env)
    assert env.batch_size == (4,)
    assert repr(env) == "MultiThreadedEnvWrapper(num_workers=4, device=cpu)"


@pytest.mark.covers("T-1", "T-10")
def test_a_task_is_made_by_name_with_arguments_that_stay_the_callers(made):
    kwargs = {"num_threads": 2, "frame_skip": 4}
    before = copy.deepcopy(kwargs)
    env = made(MultiThreadedEnv(2, "ALE/Pong-v5", create_env_kwargs=kwargs, device="cpu", disable_env_checker=True))
    assert isinstance(env, EnvBase)
    assert kwargs == before
    assert repr(env) == "MultiThreadedEnv(env=Pong-v5, num_workers=2, device=cpu)"
    assert env.rollout(3, break_when_any_done=False)["observation"].shape == (2, 3, 4, 84, 84)
    assert (env.config["num_envs"], env.config["max_num_players"]) == (2, 1)
    assert env.create_env_kwargs == kwargs


@pytest.mark.covers("T-2")
def test_wrong_arguments_have_the_errors_that_users_know(monkeypatch):
    assert MultiThreadedEnvWrapper.lib is envpool
    with pytest.raises(TypeError, match=r"^Could not find environment key 'env' in kwargs\.$"):
        MultiThreadedEnvWrapper()
    with pytest.raises(TypeError, match=r"^env is not of type 'envpool\.python\.envpool\.EnvPoolMixin'\.$"):
        MultiThreadedEnvWrapper(env=5)
    for name, kwargs in (("num_workers", {"env_name": "CartPole-v1"}), ("env_name", {"num_workers": 2})):
        with pytest.raises(TypeError, match=f"^Expected '{name}' to be part of kwargs$") as caught:
            MultiThreadedEnv(**kwargs)
        assert isinstance(caught.value, stepmill.UsageError)
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    text = (
        r"envpool python package or one of its dependencies \(gym, treevalue\) were not found\. .*stepmill\[envpool\]"
    )
    with pytest.raises(ImportError, match=text) as missing:
        MultiThreadedEnv(2, "CartPole-v1")
    assert isinstance(missing.value, stepmill.MissingExtraError)


@pytest.mark.covers("T-3")
def test_specs_are_batched_and_on_the_device(made):
    env = made(cartpoles(3))
    assert env.observation_spec["observation"].shape == (3, 4)
    assert env.action_spec.shape == (3,)
    assert env.reward_spec.shape == (3,)
    assert isinstance(env.reward_spec, Unbounded)
    assert set(env.full_done_spec.keys()) == {"done", "terminated", "truncated"}
    for key in ("done", "terminated", "truncated"):
        assert env.full_done_spec[key].shape == (3,)
        assert env.full_done_spec[key].dtype is torch.bool
    assert env.observation_spec.device == torch.device("cpu")


@pytest.mark.covers("T-11", "T-B3")
def test_an_episode_that_ended_is_reset_once_and_no_step_is_lost_on_it(made):
    env = made(cartpoles(4, seed=1))
    theirs = make_pool(seed=1)
    obs, _ = theirs.reset()
    td = env.reset()
    assert torch.equal(td["observation"], torch.from_numpy(obs))
    for _ in range(60):
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.tensor([1, 0, 1, 0])))
        obs, _, terminated, truncated, _ = theirs.step(np.array([1, 0, 1, 0]))
        assert torch.equal(stepped["next", "observation"], torch.from_numpy(obs))
        assert (stepped["next", "reward"] == 1).all()
        assert stepped["next", "terminated"].tolist() == terminated.tolist()
        assert not td["done"].any()
        ended = np.flatnonzero(terminated | truncated).astype(np.int32)
        if ended.size:
            theirs._reset(ended)
            fresh = theirs.recv(reset=True)[0]
            assert torch.equal(td["observation"][ended.tolist()], torch.from_numpy(fresh))


@pytest.mark.covers("T-5/four", "T-5/five", "T-5/others")
def test_steps_of_four_and_of_five_values_are_taken_and_no_others():
    for values in (4, 5, 3):
        given = make_pool()
        given.__class__ = type("Patched", (type(given),), {"recv": _shortened(values)})
        env = MultiThreadedEnvWrapper(given, categorical_action_encoding=True)
        if values == 3:
            with pytest.raises(TypeError, match=r"The output of step had 3 elements, but only 4 or 5 are supported\."):
                env.reset()
        else:
            following = env.step(env.reset().set("action", torch.tensor([1, 0, 1, 0])))["next"]
            assert following["truncated"].tolist() == [False, values == 4, False, False]
            assert torch.equal(following["done"], following["terminated"] | following["truncated"])
        env.close()


def _shortened(values):
    def recv(self, reset=False, return_info=True):
        obs, reward, terminated, truncated, info = envpool.python.envpool.EnvPoolMixin.recv(self, reset, return_info)
        if values == 5:
            return obs, reward, terminated, truncated, info
        if values == 4:
            return obs, reward, terminated | truncated, {**info, "TimeLimit.truncated": info["env_id"] == 1}
        return obs, reward, info

    return recv


@pytest.mark.covers("T-8", "T-B7")
def test_seeds_are_those_of_the_envs(made):
    env = made(cartpoles(4))
    env.set_seed(5)
    first = env.reset()["observation"].clone()
    env.set_seed([8, 7, 6, 5])
    assert torch.equal(env.reset()["observation"][[3, 2, 1, 0]], first)
    assert torch.equal(env.reset(seed=5)["observation"], first)


@pytest.mark.covers("T-B5")
def test_infos_are_there_for_who_asks(made):
    specs = {"elapsed_step": Unbounded((), dtype=torch.int32)}
    env = made(cartpoles(3, info_specs=specs))
    assert env.rand_step(env.reset())["next", "info", "elapsed_step"].tolist() == [1, 1, 1]


@pytest.mark.covers("T-8")
def test_a_seed_for_a_wrapped_pool_is_ignored_and_said_so(made, monkeypatch):
    logged = []
    monkeypatch.setattr("stepmill.frontends.torchrl.threaded.logger.info", lambda text, *_: logged.append(text))
    env = made(MultiThreadedEnvWrapper(make_pool(seed=3)))
    env.set_seed(9)
    assert torch.equal(env.reset()["observation"], torch.from_numpy(make_pool(seed=3).reset()[0]))
    assert "ignores seed" in logged[0]


@pytest.mark.covers("T-B6")
def test_every_keyword_argument_works(made):
    env = made(cartpoles(seed=2, categorical_action_encoding=False, frame_skip=3, allow_done_after_reset=True))
    assert type(env) is MultiThreadedEnv
    assert env.action_spec.shape == (2, 2)
    theirs = make_pool(num_envs=2, seed=2)
    theirs.reset()
    stepped = env.step(env.reset().set("action", torch.tensor([[0, 1], [1, 0]])))
    for _ in range(3):
        obs = theirs.step(np.array([1, 0]))[0]
    assert torch.equal(stepped["next", "observation"], torch.from_numpy(obs))
    assert stepped["next", "reward"].tolist() == [3, 3]


@pytest.mark.covers("T-17")
def test_integer_actions_are_the_default(made):
    env = made(cartpoles(2))
    assert env.step(env.reset().set("action", torch.tensor([0, 1])))["next", "reward"].tolist() == [1, 1]
    with pytest.raises(
        stepmill.UsageError, match=r"shape \(2, 2\) instead of \(2,\).*categorical_action_encoding=False"
    ):
        env.step(env.reset().set("action", torch.tensor([[0, 1], [1, 0]])))


@pytest.mark.covers("T-17")
def test_attributes_are_those_of_the_pool(made):
    given = make_pool(num_envs=3)
    env = made(MultiThreadedEnvWrapper(given))
    assert env._env is given
    assert env.spec is given.spec
    assert env.action_space == given.action_space
    assert (env.config["num_envs"], env.frame_skip) == (3, 1)
    with pytest.raises(AttributeError, match="'absent'"):
        env.absent  # noqa: B018
    with_python = made(MultiThreadedEnv(2, CountingEnv, backend="serial"))
    assert not hasattr(with_python, "_env")


@pytest.mark.covers("T-B8")
def test_actions_of_other_dtypes_and_strides_are_cast(made):
    env = made(MultiThreadedEnv(2, "Pendulum-v1", create_env_kwargs={**THREADS, "seed": 2}))
    wide = torch.tensor([[0.5, 9.0], [-0.5, 9.0]], dtype=torch.float64)
    strided = env.step(env.reset(seed=2).set("action", wide[:, :1]))["next", "observation"]
    plain = env.step(env.reset(seed=2).set("action", torch.tensor([[0.5], [-0.5]])))["next", "observation"]
    assert torch.equal(strided, plain)
    discrete = made(cartpoles(2))
    for action in (
        torch.tensor([1, 0]),
        torch.tensor([[1, 7], [0, 7]])[:, :1],
        torch.tensor([1, 0], dtype=torch.int8),
        torch.tensor([1.0, 0.0]),
    ):
        assert discrete.step(discrete.reset().set("action", action))["next", "reward"].tolist() == [1, 1]
    with pytest.raises(stepmill.UsageError, match="numbers that int64 cannot hold"):
        discrete.step(discrete.reset().set("action", torch.tensor([0.5, 1.0])))


@pytest.mark.covers("T-B1")
@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_the_same_class_runs_python_envs(made, backend):
    options = stepmill.PoolOptions(context="fork") if backend == "process" else None
    env = made(MultiThreadedEnv(3, "CartPole-v1", backend=backend, options=options, categorical_action_encoding=True))
    check_env_specs(env)
    assert repr(env) == "MultiThreadedEnv(env=CartPole-v1, num_workers=3, device=cpu)"
    env = made(MultiThreadedEnv(2, CountingEnv, create_env_kwargs={"length": 9}, backend=backend, options=options))
    assert env.length == [9, 9]


@pytest.mark.covers("T-1", "T-15")
def test_a_pool_that_was_made_for_gym_is_wrapped_as_in_torchrls_example(made):
    pool = envpool.make("CartPole-v1", env_type="gym", num_envs=4, gym_reset_return_info=True)
    env = made(MultiThreadedEnvWrapper(pool))
    assert env.config["num_envs"] == env.num_workers == 4
    env.reset()
    assert env.rand_step()["next", "observation"].shape == (4, 4)
    assert env.rollout(3, break_when_any_done=False).shape == (4, 3)
    with pytest.raises(AttributeError, match="create_env_kwargs"):
        _ = env.create_env_kwargs


@pytest.mark.covers("T-4", "T-14", "T-15")
def test_obs_is_the_newest_observation_of_each_env(made):
    env = made(cartpoles(3))
    assert env.obs["observation"].tolist() == [[0.0] * 4] * 3
    first = env.reset()["observation"]
    assert torch.equal(env.obs["observation"], first)
    stepped = env.rand_step()["next", "observation"]
    assert torch.equal(env.obs["observation"], stepped)
    assert env.obs.batch_size == (3,)
    assert not torch.equal(first, stepped)


@pytest.mark.covers("T-15")
def test_config_of_another_backend_is_that_of_the_envs(made):
    env = made(MultiThreadedEnv(2, CountingEnv, create_env_kwargs=[{"length": 3}, {"length": 4}], backend="serial"))
    with pytest.raises(AttributeError, match="config"):
        _ = env.config
    assert env.create_env_kwargs == [{"length": 3}, {"length": 4}]
