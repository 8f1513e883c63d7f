"""What TorchRL's batched envs offer beside stepping: attributes and methods of all envs, views, arguments per env, deaths."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs.utils import check_env_specs

import stepmill
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.spec.errors import SpecMismatch
from stepmill.testing import CountingEnv
from stepmill.testing.faulty import DyingEnv, Phase, RaisingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from tests.frontends.torchrl.makers import BACKENDS, act, counting, obs_of


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", BACKENDS)
def test_attributes_and_methods_fan_out_to_the_envs(made, where):
    env = made(counting(3, 9, where))
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


@pytest.mark.covers("T-12")
def test_an_indexed_view_is_a_live_env(made):
    env = made(counting(4, 3))
    env.reset()
    view = env[2:]
    check_env_specs(view)
    td = view.reset()
    assert [row[0] for row in obs_of(td)] == [2, 3]
    stepped = view.step(act(td, 5, 6))
    assert stepped["next", "reward"].flatten().tolist() == [5, 6]
    assert [row[2] for row in obs_of(stepped["next"])] == [1, 1]
    assert view.identity == [2, 3]
    assert env[[3, 1]].env_ids == (3, 1)
    assert (view.num_workers, env[:1].num_workers) == (2, 1)
    swapped = env[[3, 1]]
    td = swapped.step(act(swapped.reset(), 7, 8))
    assert [row[0] for row in obs_of(td["next"])] == [3, 1]
    assert td["next", "reward"].flatten().tolist() == [7, 8]
    assert repr(env[1]) == "EnvView(env_ids=[1], device=cpu)"


def test_a_view_repeats_actions_as_the_whole_env_does(made):
    env = made(counting(3, 3, frame_skip=2))
    env.reset()
    view = env[[2, 0]]
    td = view.step(act(view.reset(), 1, 10))
    assert obs_of(td["next"]) == [[2, 1, 2], [0, 1, 2]]
    assert td["next", "reward"].flatten().tolist() == [2, 20]
    td = view.step(act(td["next"], 1, 10))
    assert [row[2] for row in obs_of(td["next"])] == [4, 3]
    assert td["next", "reward"].flatten().tolist() == [2, 10]  # env 0 ended after one
    assert td["next", "done"].flatten().tolist() == [False, True]


@pytest.mark.covers("T-12")
def test_a_view_steps_the_envs_of_its_mask(made):
    env = made(counting(3, 9))
    env.reset()
    view = env[[2, 0]]
    td = act(view.reset(), 5, 6).set("_step", torch.tensor([False, True]))
    following = view.step(td)["next"]
    assert obs_of(following) == [[2, 1, 0], [0, 1, 1]]
    assert following["reward"].flatten().tolist() == [0, 6]


def test_a_reset_of_a_failed_env_takes_no_result_of_another(made):
    fns = [partial(RaisingEnv, phase=Phase.STEP, at=2), CountingEnv]
    env = made(StepmillEnv(fns, backend="serial", categorical_action_encoding=True))
    td = env.step(act(env.reset(), 1, 1))["next"]
    with pytest.raises(stepmill.EnvError):
        env.step(act(td.clone(), 1, 1))
    failed = td.clone().set("_reset", torch.tensor([[True], [False]]))
    assert obs_of(env.reset(failed, list_of_kwargs=[{"seed": 5}, {}])) == [[0, 0, 0], [0, 0, 1]]


@pytest.mark.covers("T-12")
def test_each_env_has_reset_arguments_of_its_own(made):
    env = made(StepmillEnv([stepmill.testing.SeedRecorder] * 3, backend="serial"))
    td = env.reset(list_of_kwargs=[{"seed": 5}, {}, {"seed": 8, "options": {"a": 1}}])
    assert [row[0] for row in obs_of(td)] == [5, -1, 8]
    with pytest.raises(stepmill.UsageError, match="2 entries for 3 envs"):
        env.reset(list_of_kwargs=[{}, {}])


class Bounded(gymnasium.Env):
    """Observations and pushes within bounds, and a choice of some; it checks what it is given."""

    def __init__(self, high, num, *, size=2):
        self.observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-high, high, (size,), np.float32)})
        self.action_space = gymnasium.spaces.Dict(
            {
                "push": gymnasium.spaces.Box(-high, high, (2,), np.float32),
                "pick": gymnasium.spaces.Discrete(num),
                "keys": gymnasium.spaces.MultiDiscrete([num, 3]),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"x": self.observation_space["x"].high}, {}

    def step(self, action):
        if action not in self.action_space:
            raise ValueError(f"{action} is not in {self.action_space}")
        return {"x": self.observation_space["x"].high}, 0.0, False, False, {}


@pytest.mark.covers("T-12")
def test_envs_of_different_bounds_and_numbers_of_choices_have_each_its_own_spec(made):
    fns = [partial(Bounded, 1, 3), partial(Bounded, 5, 2), partial(Bounded, 9, 7)]
    env = made(StepmillEnv(fns, backend="serial", categorical_action_encoding=True))
    check_env_specs(env)
    assert env.observation_spec["x"].space.high[:, 0].tolist() == [1, 5, 9]
    assert env.full_action_spec["action", "pick"].space.high.tolist() == [2, 1, 6]
    env.rollout(100)  # random actions are legal, each for its env
    check_env_specs(env[1:])
    assert env[2].full_action_spec["action", "keys"].space.high.tolist() == [[6, 2]]
    assert env[2].rand_action()["action", "pick"] <= 6


@pytest.mark.covers("T-12")
def test_envs_that_have_no_spec_in_common_are_refused_with_a_way_out():
    with pytest.raises(stepmill.UsageError, match=r"env 1 has the action space .* categorical_action_encoding=True"):
        StepmillEnv([partial(Bounded, 1, 3), partial(Bounded, 1, 2)], backend="serial")
    with pytest.raises(
        SpecMismatch, match=r"env 1 has another .* Make a StepmillEnv and a collector for each kind"
    ) as caught:
        StepmillEnv([partial(Bounded, 1, 3), partial(Bounded, 1, 3, size=4)], backend="serial")
    assert len(caught.value.specs) == 2


@pytest.mark.covers("T-12")
@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_deadline_is_taken_from_the_environment_where_options_set_none(where, monkeypatch):
    monkeypatch.setenv("BATCHED_PIPE_TIMEOUT", "0.5")
    with Gate() as gate:
        fns = [CountingEnv, partial(GateEnv, gate.path)]
        env = StepmillEnv(fns, **{**BACKENDS[where], "categorical_action_encoding": True})
        assert env.pool.options.step_timeout_s == env.pool.options.reset_timeout_s == 0.5
        td = env.reset()
        with pytest.raises(RuntimeError, match=r"Failed to run all workers within the time limit\.") as caught:
            env.step(act(td, 1, GATED_ACTION))
        assert isinstance(caught.value, stepmill.EnvTimeout)
        assert caught.value.env_id == 1
        gate.close()
        env.close()


@pytest.mark.covers("T-12")
def test_the_environments_deadline_gives_way_to_options_and_to_backends_without_deadlines(monkeypatch):
    monkeypatch.setenv("BATCHED_PIPE_TIMEOUT", "7")
    for chosen, limits in (
        ({"backend": "thread", "options": stepmill.PoolOptions(step_timeout_s=3.0)}, (3.0, None)),
        ({"backend": "serial"}, (None, None)),
        ({"backend": "thread"}, (7.0, 7.0)),
    ):
        env = StepmillEnv([CountingEnv], **chosen)
        assert (env.pool.options.step_timeout_s, env.pool.options.reset_timeout_s) == limits
        env.close()
    for text in ("soon", "-1"):
        monkeypatch.setenv("BATCHED_PIPE_TIMEOUT", text)
        with pytest.raises(stepmill.UsageError):
            StepmillEnv([CountingEnv] * 2, backend="thread")


@pytest.mark.covers("T-12")
def test_a_dead_worker_is_named_as_torchrls_users_know_it(made):
    fns = [CountingEnv, lambda: DyingEnv(at=2)]
    env = made(StepmillEnv(fns, **{**BACKENDS["process"], "categorical_action_encoding": True}))
    td = env.step(act(env.reset(), 1, 1))
    with pytest.raises(RuntimeError, match=r"Cannot proceed, worker 1 dead\.") as caught:
        env.step(act(td["next"].exclude("reward"), 1, 1))
    assert isinstance(caught.value, stepmill.WorkerDied)
    assert caught.value.env_ids == (1,)
    assert env.reset()["done"].sum() == 0
