"""What TorchRL's batched envs offer beside stepping: attributes and methods of all envs, views, arguments per env, deaths."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs.utils import check_env_specs

import stepmill
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.testing import CountingEnv
from stepmill.testing.faulty import DyingEnv
from tests.frontends.torchrl.makers import BACKENDS, counting


def act(env, td, *actions):
    return td.set("action", torch.tensor(actions))


def obs_of(td):
    return td["observation"].tolist()


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_attributes_and_methods_fan_out_to_the_envs(where):
    env = counting(3, 9, where)
    env.reset()
    assert list(env.identity) == [0, 1, 2]
    assert env.identity == [0, 1, 2]
    assert env.identity[1] == 1
    assert env.add(1.0, right=2.0) == [3.0, 4.0, 5.0]
    assert env.action_space.n == [100, 100, 100]
    assert len(env.identity) == 3
    assert not hasattr(env, "no_such_thing")
    with pytest.raises(AttributeError, match="neither StepmillEnv nor its envs"):
        env.no_such_thing  # noqa: B018
    env.close()


@pytest.mark.covers("T-12")
def test_an_indexed_view_is_a_live_env():
    env = counting(4, 3)
    env.reset()
    view = env[2:]
    check_env_specs(view)
    td = view.reset()
    assert [row[0] for row in obs_of(td)] == [2, 3]
    stepped = view.step(act(view, td, 5, 6))
    assert stepped["next", "reward"].flatten().tolist() == [5, 6]
    assert [row[2] for row in obs_of(stepped["next"])] == [1, 1]
    assert view.identity == [2, 3]
    assert env[[3, 1]].env_ids == (3, 1)
    swapped = env[[3, 1]]
    td = swapped.step(act(swapped, swapped.reset(), 7, 8))
    assert [row[0] for row in obs_of(td["next"])] == [3, 1]
    assert td["next", "reward"].flatten().tolist() == [7, 8]
    assert repr(env[1]) == "EnvView(env_ids=[1], device=cpu)"
    env.close()


@pytest.mark.covers("T-12")
def test_each_env_has_reset_arguments_of_its_own():
    env = StepmillEnv([stepmill.testing.SeedRecorder] * 3, backend="serial")
    td = env.reset(list_of_kwargs=[{"seed": 5}, {}, {"seed": 8, "options": {"a": 1}}])
    assert [row[0] for row in obs_of(td)] == [5, -1, 8]
    with pytest.raises(stepmill.UsageError, match="2 entries for 3 envs"):
        env.reset(list_of_kwargs=[{}, {}])
    env.close()


@pytest.mark.covers("T-12")
def test_a_dead_worker_is_named_as_torchrls_users_know_it():
    fns = [CountingEnv, lambda: DyingEnv(at=2)]
    env = StepmillEnv(fns, **{**BACKENDS["process"], "categorical_action_encoding": True})
    td = env.step(act(env, env.reset(), 1, 1))
    with pytest.raises(RuntimeError, match=r"Cannot proceed, worker 1 dead\.") as caught:
        env.step(act(env, td["next"].exclude("reward"), 1, 1))
    assert isinstance(caught.value, stepmill.WorkerDied)
    assert caught.value.env_ids == (1,)
    assert env.reset()["done"].sum() == 0
    env.close()
