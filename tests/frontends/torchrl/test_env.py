"""`StepmillEnv` on every backend: what TorchRL asks of an env, and what its own batched envs offer beside it."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import Unbounded
from torchrl.envs.utils import check_env_specs

import stepmill
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.testing import CountingEnv
from stepmill.testing.faulty import RaisingEnv
from tests.frontends.torchrl.makers import BACKENDS, Nested, act, counting, obs_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.covers("T-B9")
@pytest.mark.parametrize("where", BACKENDS)
@pytest.mark.parametrize("is_categorical", [True, False])
def test_torchrls_own_checker_passes(where, is_categorical):
    for fns in ([Nested] * 3, [CountingEnv] * 3):
        env = StepmillEnv(fns, **BACKENDS[where], categorical_action_encoding=is_categorical)
        check_env_specs(env, break_when_any_done="both", seed=3)
        env.close()


@pytest.mark.parametrize("where", BACKENDS)
def test_a_rollout_has_the_last_observation_of_an_episode_and_the_first_of_the_next(made, where):
    env = made(counting(2, 3, where))
    td = env.rollout(7, break_when_any_done=False)
    assert td.batch_size == (2, 7)
    assert td["next", "observation"][0, :, 1:].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3], [2, 1]]
    assert td["observation"][0, :, 1:].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert td["next", "terminated"][0].flatten().tolist() == [False, False, True, False, False, True, False]
    assert td["next", "observation"][1, :, 1:].tolist() == [[0, 1], [0, 2], [0, 3], [0, 4], [1, 1], [1, 2], [1, 3]]


@pytest.mark.covers("T-11", "T-B3")
@pytest.mark.parametrize("where", BACKENDS)
def test_step_and_maybe_reset_resets_once_and_clears_the_flags(made, where):
    env = made(counting(3, 2, where))
    td = env.reset()
    for _ in range(2):
        stepped, td = env.step_and_maybe_reset(act(td, 1, 1, 1))
    assert stepped["next", "done"].flatten().tolist() == [True, False, False]
    assert obs_of(stepped["next"]) == [[0, 0, 2], [1, 0, 2], [2, 0, 2]]
    assert obs_of(td) == [[0, 1, 0], [1, 0, 2], [2, 0, 2]]
    assert not td["done"].any()
    assert env.num_resets == [2, 1, 1]
    stepped, td = env.step_and_maybe_reset(act(td, 5, 6, 7))
    assert stepped["next", "reward"].flatten().tolist() == [5, 6, 7]  # no step is spent on a reset


@pytest.mark.covers("T-B3")
def test_a_masked_reset_after_the_end_resets_once_and_a_step_without_one_is_refused(made):
    env = made(counting(2, 1))
    td = env.reset()
    td = env.step(act(td, 1, 1))
    with pytest.raises(stepmill.UsageError, match=r"episodes of envs \[0\] are over"):
        env.step(act(td["next"].exclude("reward"), 1, 1))
    mask = td["next", "done"].clone()
    again = env.reset(td["next"].exclude("reward").set("_reset", mask))
    assert obs_of(again) == [[0, 1, 0], [1, 0, 1]]
    assert env.num_resets == [2, 1]


@pytest.mark.covers("T-4", "T-B4")
@pytest.mark.parametrize("where", BACKENDS)
def test_a_partial_reset_leaves_other_rows_and_whatever_was_returned_alone(made, where):
    env = made(counting(3, 1, where))
    td = env.reset()
    stepped = env.step(act(td, 1, 1, 1)).clone(False)
    kept = stepped["next"]
    again = env.reset(TensorDict({"_reset": torch.tensor([True, False, False])}, [3]))
    assert obs_of(again) == [[0, 1, 0], [1, 0, 1], [2, 0, 1]]
    assert not again["done"].any()
    assert "reward" not in set(again.keys())
    again = env.reset(stepped["next"].exclude("reward").set("_reset", torch.tensor([True, True, False])))
    assert obs_of(again) == [[0, 2, 0], [1, 1, 0], [2, 0, 1]]
    assert obs_of(kept) == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]  # the terminal observation is still there
    assert kept["done"].flatten().tolist() == [True, False, False]


@pytest.mark.covers("T-B4")
def test_a_partial_reset_keeps_the_flags_of_those_it_does_not_reset(made):
    env = made(counting(2, 1))
    td = env.reset()
    td = act(td, 1, 1)
    env.step(td)
    env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [2]))
    td = env.step(act(td.exclude("next"), 1, 1))
    again = env.reset(TensorDict({"_reset": torch.tensor([True, False])}, [2]))
    assert again["done"].flatten().tolist() == [False, True]


@pytest.mark.covers("T-14")
@pytest.mark.parametrize("where", BACKENDS)
def test_before_any_full_reset_rows_that_were_not_reset_hold_zeros(made, where):
    env = made(counting(3, 3, where))
    td = env.reset(TensorDict({"_reset": torch.tensor([False, True, False])}, [3]))
    zero = env.observation_spec.zero()
    assert obs_of(td) == [obs_of(zero)[0], [1, 0, 0], obs_of(zero)[2]]


@pytest.mark.covers("T-7", "T-B2")
def test_observations_and_actions_of_any_depth_keep_their_keys(made):
    env = made(StepmillEnv([Nested] * 2, backend="serial", categorical_action_encoding=True))
    leaves = {("a", "x"), ("a", "y"), ("b", "x"), ("b", "c", "x"), ("pair", "0"), ("pair", "1")}
    assert set(env.observation_spec.keys(True, True)) == leaves
    td = env.rand_action(env.reset())
    td["action", "turn"] = torch.tensor([2, 6])
    td["action", "keys"] = torch.tensor([[2, 3], [0, 1]])
    following = env.step(td)["next"]
    assert following["b", "x"].flatten().tolist() == [2, 6]
    assert following["b", "c", "x"].tolist() == [2, 6]
    assert following["pair", "1"].tolist() == [[2, 3], [0, 1]]
    torch.testing.assert_close(following["a", "x"], td["action", "push", "0"])
    assert following["pair", "0"].tolist() == td["action", "push", "1"].tolist()
    assert following["a", "y"].tolist() == [11, 11]


@pytest.mark.covers("T-B6")
def test_one_hot_actions_reach_the_env_as_their_numbers(made):
    env = made(StepmillEnv([Nested] * 2, backend="serial"))
    td = env.rand_action(env.reset())
    td["action", "turn"] = torch.eye(5)[[1, 3]]  # of floats, as a policy gives them
    td["action", "keys"] = torch.tensor([[0, 1, 0, 0, 0, 0, 1], [1, 0, 0, 1, 0, 0, 0]])
    following = env.step(td)["next"]
    assert following["b", "c", "x"].tolist() == [3, 5]
    assert following["pair", "1"].tolist() == [[1, 3], [0, 0]]
    td = env.rand_action(env.reset())
    td["action", "turn"] = torch.tensor([[1, 0], [0, 1]])
    with pytest.raises(stepmill.UsageError, match="one-hot action has shape"):
        env.step(td)


@pytest.mark.covers("T-8", "T-B7")
@pytest.mark.parametrize("where", BACKENDS)
def test_seeds_per_env_and_per_reset_build_nothing_anew(made, where):
    env = made(StepmillEnv([stepmill.testing.SeedRecorder] * 3, **BACKENDS[where]))
    pids = [worker.pid for worker in env.stats().workers]
    following = env.set_seed(10)
    assert isinstance(following, int)
    assert obs_of(env.reset())[0][0] == 10
    assert [row[0] for row in obs_of(env.reset())] == [-1, -1, -1]
    env.set_seed([7, 9, 8])
    mask = TensorDict({"_reset": torch.tensor([False, True, False])}, [3])
    assert obs_of(env.reset(mask))[1][0] == 9
    assert [row[0] for row in obs_of(env.reset())] == [7, -1, 8]
    assert [row[0] for row in obs_of(env.reset(seed=30))] == [30, 31, 32]
    assert [worker.pid for worker in env.stats().workers] == pids


@pytest.mark.covers("T-8")
def test_the_same_seed_gives_the_same_rollout_and_another_another():
    def rollout(seed):
        env = StepmillEnv([lambda: gymnasium.make("CartPole-v1")] * 2, backend="serial")
        env.set_seed(seed)
        torch.manual_seed(0)
        td = env.rollout(20, break_when_any_done=False)
        env.close()
        return td["next", "observation"]

    assert torch.equal(rollout(4), rollout(4))
    assert not torch.equal(rollout(4), rollout(5))


@pytest.mark.covers("T-6")
def test_a_wrong_batch_size_is_an_error_and_results_need_no_gradient(made):
    env = made(counting(3, 9))
    with pytest.raises(RuntimeError):
        env.step(TensorDict({"action": torch.tensor([1, 2])}, [2]))
    first = env.step(TensorDict({"action": torch.tensor([1, 2, 3])}, [3]))["next"]  # it begins with a reset
    assert obs_of(first) == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    weight = torch.ones(3, requires_grad=True)
    spaced = made(StepmillEnv([Nested] * 3, backend="serial", categorical_action_encoding=True))
    td = spaced.rand_action(spaced.reset())
    td["action", "push", "0"] = td["action", "push", "0"] * weight[:, None]
    following = spaced.step(td)["next"]
    assert not following["a", "x"].requires_grad
    assert not following.is_shared()


@pytest.mark.covers("T-9/reopen")
def test_closing_and_resetting_opens_it_again():
    env = counting(2, 9, "process")
    env.reset()
    env.close()
    env.close()
    assert env.is_closed
    with pytest.raises(stepmill.UsageError, match="is closed"):
        env.step(TensorDict({"action": torch.tensor([1, 2])}, [2]))
    assert obs_of(env.reset()) == [[0, 0, 0], [1, 0, 0]]
    assert not env.is_closed
    env.close()
    env.start()
    assert not env.is_closed
    assert env.identity == [0, 1]
    env.close()


@pytest.mark.covers("T-9/device", "T-9/steps")
@pytest.mark.parametrize("is_open_before", [True, False])
def test_moving_to_a_device_moves_specs_and_data(is_open_before):
    # Specs without bounds, which TorchRL can move to the one other device that every machine has.
    env = StepmillEnv([stepmill.testing.ImageEnv] * 2, backend="serial", categorical_action_encoding=True)
    if is_open_before:
        assert env.rollout(2).device == torch.device("cpu")
    assert env.to("cpu") is env
    env = env.to("meta")
    for spec in (env.observation_spec, env.action_spec, env.reward_spec, env.done_spec):
        assert spec.device == torch.device("meta")
    td = env._reset()  # without TorchRL's checks of flags, which such a device has not
    assert td.device == torch.device("meta")
    assert td["observation"].device.type == "meta"
    stepped = env._step(TensorDict({"action": torch.tensor([0, 0])}, [2]))  # the action's values are on the CPU
    assert {value.device.type for value in stepped.values()} == {"meta"}
    env = env.to("cpu")
    stepped = env.step(TensorDict({"action": torch.tensor([0, 0])}, [2]))["next"]
    assert {value.device.type for value in stepped.values()} == {"cpu"}
    clock = 6 if is_open_before else 3  # both steps were taken
    assert stepped["observation"][:, 0, 0, 0].tolist() == [stepmill.testing.ImageEnv.colour(0, clock)] * 2
    env.close()


@pytest.mark.covers("T-10")
def test_rand_step_and_the_representation(made):
    env = made(counting(2, 9))
    td = env.rand_step(env.reset())
    assert td["next", "observation"].shape == (2, 3)
    assert env.rand_step()["next", "done"].shape == (2, 1)
    assert repr(env) == "StepmillEnv(num_workers=2, device=cpu)"


@pytest.mark.covers("T-B6")
@pytest.mark.parametrize("where", BACKENDS)
def test_frame_skip_repeats_the_action_until_the_end(made, where):
    env = made(counting(2, 3, where, frame_skip=2))
    assert type(env) is StepmillEnv
    td = env.reset()
    stepped, td = env.step_and_maybe_reset(act(td, 1, 10))
    assert obs_of(stepped["next"]) == [[0, 0, 2], [1, 0, 2]]
    assert stepped["next", "reward"].flatten().tolist() == [2, 20]
    stepped, td = env.step_and_maybe_reset(act(td, 1, 10))
    assert obs_of(stepped["next"]) == [[0, 0, 3], [1, 0, 4]]
    assert stepped["next", "reward"].flatten().tolist() == [1, 20]  # env 0 ended after one
    assert obs_of(td) == [[0, 1, 0], [1, 1, 0]]


def test_a_partial_step_leaves_other_envs_where_they_are(made):
    env = made(counting(3, 9))
    td = act(env.reset(), 1, 2, 3).set("_step", torch.tensor([True, False, True]))
    following = env.step(td)["next"]
    assert obs_of(following) == [[0, 0, 1], [1, 0, 0], [2, 0, 1]]
    assert following["reward"].flatten().tolist() == [1, 0, 3]


@pytest.mark.parametrize("where", BACKENDS)
def test_an_env_that_raises_is_named_and_a_reset_goes_on(made, where):
    env = made(StepmillEnv([CountingEnv, RaisingEnv], **BACKENDS[where], categorical_action_encoding=True))
    td = act(env.reset(), 1, 1)
    with pytest.raises(stepmill.EnvError) as caught:
        env.step(td)
    assert caught.value.env_id == 1
    td = env.reset()
    assert env.step(act(td, 1, 1))["next", "reward"].flatten().tolist() == [1, 1]


def test_infos_of_a_fixed_shape_come_along_too(made):
    pytest.importorskip("numba")
    taxis = [stepmill.kernels.find("Taxi-v4")] * 2
    env = made(StepmillEnv(taxis, backend="kernel", info_specs={"prob": Unbounded((), dtype=torch.float64)}))
    assert env.reset()["info", "prob"].tolist() == [1, 1]
    assert env.rand_step(env.reset())["next", "info", "prob"].tolist() == [1, 1]


@pytest.mark.covers("T-B5")
@pytest.mark.parametrize("where", BACKENDS)
def test_infos_come_along_where_they_are_asked_for(made, where):
    env = made(counting(3, 2, where, info_specs={"t": Unbounded((), dtype=torch.int64)}))
    check_env_specs(env, break_when_any_done="both")
    td = env.reset()
    for _ in range(2):
        stepped, td = env.step_and_maybe_reset(act(td, 1, 1, 1))
    assert stepped["next", "info", "t"].tolist() == [2, 2, 2]
    assert td["info", "t"].tolist() == [2, 2, 2]  # CountingEnv's reset has no such info
    view = env[1:]
    assert view.step(act(td[1:].clone(), 1, 1))["next", "info", "t"].tolist() == [3, 3]


def test_envs_from_a_pool_of_ones_own():
    pool = stepmill.Pool([CountingEnv] * 2, backend="serial", options=stepmill.PoolOptions(autoreset_mode="Disabled"))
    env = StepmillEnv(pool, categorical_action_encoding=True)
    check_env_specs(env)
    env.close()
    with pytest.raises(stepmill.UsageError, match="make a new pool"):
        env.reset()
    with pytest.raises(stepmill.UsageError, match="autoreset_mode='Disabled'"):
        StepmillEnv(stepmill.Pool([CountingEnv], backend="serial"))


def test_what_cannot_be_a_tensor_is_refused_by_name():
    class Talks(CountingEnv):
        def __init__(self, space):
            super().__init__()
            self.observation_space = space

    text, reward = gymnasium.spaces.Text(5), gymnasium.spaces.Dict(reward=gymnasium.spaces.Discrete(2))
    with pytest.raises(stepmill.UsageError, match=r"observation is a Text"):
        StepmillEnv([lambda: Talks(text)], backend="serial")
    with pytest.raises(stepmill.UsageError, match=r"keys \['reward'\], which TorchRL reserves"):
        StepmillEnv([lambda: Talks(reward)], backend="serial")
    with pytest.raises(stepmill.UsageError, match="TorchRL needs autoreset_mode='Disabled'"):
        StepmillEnv([CountingEnv], backend="serial", options=stepmill.PoolOptions(autoreset_mode="SameStep"))
    with pytest.raises(stepmill.UsageError, match="frame_skip must be an integer"):
        counting(frame_skip=0)


@pytest.mark.covers("T-11")
@pytest.mark.parametrize("where", BACKENDS)
def test_it_works_in_torchrls_collectors(made, where):
    env = made(counting(2, 3, where))
    collector = Collector(env, None, frames_per_batch=20, total_frames=60)
    frames = [td["next", "observation"][0, :, 2].tolist() for td in collector]
    assert [len(each) for each in frames] == [10, 10, 10]
    assert frames[0] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    collector.shutdown()


def test_large_observations_are_lent_and_outlive_the_env():
    env = StepmillEnv([stepmill.testing.ImageEnv] * 4, backend="serial", categorical_action_encoding=True)
    td = env.reset()
    kept = [env.step(act(td.clone(), 0, 0, 0, 0))["next", "observation"] for _ in range(3)]
    assert env.stats().leased_slots == 3
    copies = [each.clone() for each in kept]
    env.step(act(td.clone(), 0, 0, 0, 0))
    env.close()
    assert all(torch.equal(each, copy) for each, copy in zip(kept, copies, strict=True))
    assert not np.array_equal(kept[0].numpy(), kept[1].numpy())
