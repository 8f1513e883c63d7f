"""`ParallelEnv`: the arguments, seeds and class of TorchRL's; what subclasses may not override."""

from __future__ import annotations

import pickle
from functools import partial

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
import torchrl.envs
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, set_gym_backend

from stepmill.frontends.torchrl import AsyncStepmillEnv, MultiThreadedEnv, ParallelEnv, StepmillEnv
from stepmill.spec.errors import UsageError

make = partial(gymnasium.make, "CartPole-v1")


@pytest.mark.covers("T-17")
def test_parallel_env_takes_torchrls_arguments():
    env = ParallelEnv(2, make, mp_start_method="fork", num_sub_threads=2, auto_wrap_envs=True, envs_per_worker=1)
    assert isinstance(env, torchrl.envs.ParallelEnv)
    assert (env.num_workers, env.batch_size, env.create_env_fn) == (2, (2,), [make] * 2)
    assert (env.pool.options.context, env.pool.options.envs_per_worker) == ("fork", 1)
    env.close()
    for other in (
        ParallelEnv(create_env_fn=[make] * 2, num_workers=2, backend="serial"),
        ParallelEnv.make_parallel(make, num_envs=2, backend="serial"),
        ParallelEnv.make_parallel(2, make, backend="serial"),
    ):
        assert other.rollout(3).batch_size == (2, 3)
        other.close()


@pytest.mark.covers("T-17")
def test_a_pickled_env_is_closed_and_its_copy_has_the_present_arguments_and_device(made):
    class Limited(ParallelEnv):
        def __init__(self, num_steps):
            function = lambda **kwargs: gymnasium.make("CartPole-v1", **kwargs)  # noqa: E731
            super().__init__(2, function, backend="serial", create_env_kwargs={"max_episode_steps": num_steps})

    env = Limited(9)
    env.update_kwargs([{"max_episode_steps": 3}, {"max_episode_steps": 4}])
    env.to("cpu:1")
    copied = pickle.loads(cloudpickle.dumps(env))
    assert (type(copied).__name__, env.is_closed, copied.is_closed, str(copied.device)) == (
        "Limited",
        True,
        False,
        "cpu:1",
    )
    again = made(pickle.loads(cloudpickle.dumps(copied.to("cpu"))))
    truncated = again.rollout(4, break_when_any_done=False)["next", "truncated"]
    assert truncated.squeeze(-1).tolist() == [[False, False, True, False], [False, False, False, True]]


@pytest.mark.covers("T-17")
def test_arguments_that_do_not_fit_are_refused_by_name():
    with pytest.raises(RuntimeError, match=r"len\(create_env_fn\) and num_workers mismatch, got 1 and 2"):
        ParallelEnv(2, [make])
    with pytest.raises(TypeError, match="env_fns is an int"):
        ParallelEnv(2, 3)
    with pytest.raises(UsageError, match="pin_memory=True of ParallelEnv is not supported"):
        ParallelEnv(2, make, pin_memory=True)
    for arguments, keywords in (((2, make), {}), ((), {"num_workers": 2, "create_env_fn": make})):
        with pytest.raises(TypeError, match=r"StepmillEnv\(\[create_env_fn\] \* num_workers\).*ParallelEnv"):
            StepmillEnv(*arguments, **keywords)


@pytest.mark.covers("T-17")
def test_seeds_of_parallel_env_are_torchrls(made):
    set_gym_backend("gymnasium").set()
    env = made(ParallelEnv(3, lambda: GymEnv("CartPole-v1"), backend="serial"))
    for is_static in (False, True):
        seed, expected = 7, []
        for single in (GymEnv("CartPole-v1") for _ in range(3)):
            seed = single.set_seed(seed, static_seed=is_static)
            expected.append(single.reset()["observation"])
        assert env.set_seed(7, static_seed=is_static) == seed
        assert env.set_seed(np.int64(7), static_seed=is_static) == seed
        assert torch.equal(env.reset()["observation"], torch.stack(expected))
    assert env.set_seed([1, 2, 3], static_seed=True) == 3
    assert env.set_seed(None) is None
    with pytest.raises(UsageError, match="-1"):
        env.set_seed(-1)


@pytest.mark.covers("T-17")
def test_a_collector_saves_the_state_of_a_parallel_env():
    env = ParallelEnv(2, lambda: gymnasium.wrappers.NormalizeReward(make()), backend="serial")
    collector = Collector(env, frames_per_batch=4, total_frames=8, create_env_kwargs={})
    assert list(collector.state_dict()["env_state_dict"]) == ["worker0", "worker1"]
    collector.shutdown()


@pytest.mark.covers("T-17")
@pytest.mark.parametrize(
    ("cls", "name"), [(ParallelEnv, "_start_workers"), (MultiThreadedEnv, "_build_env"), (AsyncStepmillEnv, "_setup")]
)
def test_overrides_of_methods_that_are_not_called_are_refused(cls, name):
    sub = type("Own", (cls,), {name: lambda self: None})
    with pytest.raises(TypeError, match=f"Own overrides {name}"):
        sub(2, make)
