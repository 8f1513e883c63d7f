"""Stable-Baselines3's vector env over stepmill: it behaves as SB3's own classes, apart from intended differences."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import gymnasium
import numpy as np
import pytest
import tqdm
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnv, IdentityEnvMultiBinary
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecMonitor,
)

import stepmill
from stepmill import PoolOptions
from stepmill.frontends.sb3 import SB3VecEnv
from stepmill.spec.errors import EnvError, UsageError, WorkerDied
from tests.frontends.guides import run_guide
from tests.harness.pools import assert_equal, keep_closed

tqdm.tqdm.get_lock()  # starts multiprocessing's resource tracker, which stays, before a test counts

BACKENDS = ["serial", "thread", "process"]


class Talker(gymnasium.Env):
    """Counts its steps; says in its infos what it was reset with; ends after `length` steps."""

    observation_space = gymnasium.spaces.Dict(
        {"t": gymnasium.spaces.Box(0, 100, (1,), np.float32), "seen": gymnasium.spaces.Discrete(10)}
    )
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length=3, is_cut=False):
        self.length, self.is_cut, self.note = length, is_cut, "hello"
        self.lock = threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {"seed": seed, "options": options}

    def step(self, action):
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.t += 1
        is_over = self.t == self.length
        return self._obs(), 1.5, is_over and not self.is_cut, is_over and self.is_cut, {"t": self.t}

    def _obs(self):
        return {"t": np.array([self.t], np.float32), "seen": min(self.t, 9)}

    def fail(self):
        raise KeyError("no such thing")


def make(num, **arguments):
    return [lambda: Monitor(Talker(**arguments)) for _ in range(num)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def sb3_env_of(backend):
    def build(env_fns, **arguments):
        return SB3VecEnv(env_fns, backend=backend, num_workers=0 if backend == "serial" else 2, **arguments)

    yield from keep_closed(build)


def test_options_may_hold_arrays_and_numbers_as_keys(sb3_env_of):
    envs = sb3_env_of(make(2))
    goals = [{"goal": np.array([1.0, 2.0])}, {"goal": np.array([3.0, 4.0])}]
    envs.set_options(goals)
    envs.reset()
    for info, own in zip(envs.reset_infos, goals, strict=True):
        np.testing.assert_array_equal(info["options"]["goal"], own["goal"])
    envs.set_options({0: {"level": 1}})
    envs.reset()
    assert [info["options"] for info in envs.reset_infos] == [{0: {"level": 1}}] * 2


@pytest.mark.parametrize("is_cut", [False, True])
def test_steps_and_infos_are_those_of_the_librarys_own_vec_env(sb3_env_of, is_cut):
    ours, theirs = sb3_env_of(make(3, is_cut=is_cut)), DummyVecEnv(make(3, is_cut=is_cut))
    for envs in (ours, theirs):
        envs.seed(7)
        envs.set_options([{"level": 1}, {}, {"level": 2}])
    assert_equal(ours.reset(), theirs.reset())
    assert [info["seed"] for info in ours.reset_infos] == [7, 8, 9]
    assert [info["options"] for info in ours.reset_infos] == [{"level": 1}, None, {"level": 2}]
    for _ in range(8):
        (obs, reward, done, infos), wanted = (envs.step(np.array([0, 1, 0])) for envs in (ours, theirs))
        for info in (*infos, *wanted[3]):
            info.get("episode", {}).pop("t", None)  # seconds
        assert_equal((obs, reward.astype(np.float32), done), wanted[:3])
        np.testing.assert_equal(infos, wanted[3])
    assert ours.reset_infos == list(theirs.reset_infos)
    theirs.close()


class Nested(gymnasium.Env):
    """Rewards what its action says; the observation is the action's array."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        push, which = action.values() if isinstance(action, dict) else action
        return np.asarray(push, np.float32), float(which), False, False, {}


@pytest.mark.filterwarnings("ignore:The `render_mode` attribute is not defined")  # kernels have none
def test_each_env_of_a_kernel_has_its_infos_as_in_python():
    pytest.importorskip("numba")
    actions = np.random.default_rng(0).integers(0, 4, (20, 3))

    def play(backend):
        with contextlib.closing(SB3VecEnv([stepmill.kernels.find("FrozenLake-v1")] * 3, backend=backend)) as envs:
            envs.seed(0)
            envs.reset()
            found = [envs.reset_infos.copy()]
            for action in actions:
                found += [envs.step(action)[3], envs.reset_infos.copy()]
            return found

    compiled, python = play("kernel"), play("serial")
    np.testing.assert_equal(compiled, python)
    assert all("prob" in info for infos in compiled for info in infos)
    assert any("terminal_observation" in info for infos in compiled for info in infos)


PUSH = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
NESTS = {
    "dict": gymnasium.spaces.Dict({"push": PUSH, "which": gymnasium.spaces.Discrete(9)}),
    "tuple": gymnasium.spaces.Tuple([PUSH, gymnasium.spaces.Discrete(9)]),
}


@pytest.mark.parametrize("kind", NESTS)
@pytest.mark.parametrize("as_sequence", [list, tuple, lambda actions: np.array(actions, dtype=object)])
def test_actions_are_a_sequence_with_one_per_env_as_for_the_librarys_own(kind, as_sequence):
    space = NESTS[kind]
    space.seed(3)
    for num_envs in (2, 3):  # of 2 envs a tuple of 2 actions looks like a batch of the space's two parts
        actions = as_sequence([space.sample() for _ in range(num_envs)])
        results = []
        for cls in (DummyVecEnv, SB3VecEnv):
            envs = cls([lambda: Nested(space)] * num_envs)
            envs.reset()
            results.append(envs.step(actions)[:2])
            envs.close()
        for theirs, ours in zip(*results, strict=True):
            assert np.array_equal(theirs, ours)


def test_too_few_actions_are_refused(made):
    envs = made(SB3VecEnv([lambda: Nested(NESTS["dict"])] * 2, backend="serial"))
    envs.reset()
    with pytest.raises(UsageError, match="1 actions for 2 envs"):
        envs.step([NESTS["dict"].sample()])
    with pytest.raises(UsageError, match="does not have the structure of the action space: KeyError"):
        envs.step([{"push": np.zeros(2)}] * 2)


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_policies_train_on_actions_of_many_bits_which_are_floats(made, algorithm):
    envs = made(SB3VecEnv([lambda: IdentityEnvMultiBinary(4)] * 2, backend="serial"))
    assert algorithm("MlpPolicy", envs, n_steps=32, device="cpu").learn(64).num_timesteps >= 64
    with pytest.raises(UsageError, match="actions have numbers that int8 cannot hold"):
        envs.step(np.full((2, 4), 0.5, np.float32))


def test_a_serial_envs_own_space_is_seeded_with_the_action_space():
    def first_observations():
        envs = SB3VecEnv([lambda: IdentityEnv(1000)], backend="serial")
        envs.action_space.seed(8)
        seen = [envs.reset().item(), *(envs.step([0])[0].item() for _ in range(8))]
        envs.close()
        return seen

    assert first_observations() == first_observations()


def test_the_envs_are_at_hand_on_the_serial_backend_and_elsewhere_named_as_unreachable(sb3_env_of, backend):
    envs = sb3_env_of(make(2))
    with pytest.warns(UserWarning, match="already wrapped with a `Monitor`"):
        wrapped = VecMonitor(envs)
    if backend == "serial":
        assert [type(each) for each in wrapped.envs] == [Monitor, Monitor]
        envs.envs[1].unwrapped.note = "own"
        assert envs.get_attr("note") == ["hello", "own"]
        assert envs.envs[0].action_space is envs.action_space
        with pytest.raises(TypeError):  # the pool would not notice it
            envs.envs[0] = envs.envs[1]
    else:
        with pytest.raises(AttributeError, match=r"no attribute 'envs'.*get_attr\(name\).*backend='serial'"):
            envs.envs  # noqa: B018
        assert not hasattr(envs, "envs")


def test_step_async_and_step_wait_are_a_step_in_two_halves(sb3_env_of):
    envs = sb3_env_of(make(2))
    envs.reset()
    envs.step_async(np.array([0, 0]))
    obs, reward, done, infos = envs.step_wait()
    assert obs["t"].tolist() == [[1], [1]]
    assert reward.tolist() == [1.5, 1.5]
    assert not done.any()
    assert [info["t"] for info in infos] == [1, 1]
    with pytest.raises(UsageError, match="step_async"):
        envs.step_wait()


def test_a_reset_drops_the_step_that_is_under_way(sb3_env_of):
    envs = sb3_env_of(make(2))
    envs.reset()
    envs.step_async(np.array([0, 0]))
    assert envs.reset()["t"].tolist() == [[0], [0]]
    assert envs.step(np.array([0, 0]))[0]["t"].tolist() == [[1], [1]]


def test_attributes_are_reached_at_indices_and_what_is_not_there_is_an_error(sb3_env_of):
    envs = sb3_env_of(make(3))
    envs.set_attr("note", ["a", "list"], indices=1)
    assert envs.get_attr("note") == ["hello", ["a", "list"], "hello"]
    assert envs.get_attr("note", indices=range(2)) == ["hello", ["a", "list"]]
    assert envs.has_attr("lock")  # it cannot be pickled
    with pytest.raises(AttributeError, match="nothing"):
        envs.get_attr("nothing")
    for indices in (1.0, [0, 1.7], [True, False]):
        with pytest.raises(UsageError, match="env_ids="):
            envs.get_attr("note", indices=indices)
    with pytest.raises(EnvError, match="KeyError"):
        envs.env_method("fail")


def test_make_vec_env_takes_the_class_and_gives_the_same_training(tmp_path):
    curves = []
    for vec_env_cls, kwargs in (
        (DummyVecEnv, {}),
        (SB3VecEnv, {"backend": "process", "num_workers": 2}),
        (SB3VecEnv, {"backend": "serial", "num_workers": 0}),
    ):
        envs = make_vec_env("CartPole-v1", n_envs=4, seed=3, vec_env_cls=vec_env_cls, vec_env_kwargs=kwargs)
        try:
            model = PPO("MlpPolicy", envs, seed=3, n_steps=32, batch_size=64, n_epochs=2, device="cpu")
            model.learn(1024)
            curves.append([each["r"] for each in model.ep_info_buffer])
        finally:
            envs.close()
    assert len(curves[0]) > 20
    assert curves[1] == curves[0]
    assert curves[2] == curves[0]


def test_a_killed_worker_is_an_error_and_under_truncate_a_marked_end_of_the_episode(made):
    envs = made(SB3VecEnv(make(2), num_workers=2, options=PoolOptions(context="fork")))
    envs.reset()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step(np.array([0, 2]))
    envs = made(SB3VecEnv(make(2), num_workers=2, options=PoolOptions(context="fork", on_fault="truncate")))
    envs.reset()
    obs, reward, done, infos = envs.step(np.array([0, 2]))
    assert done.tolist() == [False, True]
    assert reward.tolist() == [1.5, 0.0]
    assert obs["t"].tolist() == [[1], [0]]
    assert infos[1]["fault"]["kind"] == "died"
    assert infos[1]["TimeLimit.truncated"]
    assert infos[1]["terminal_observation"]["t"].tolist() == [0]
    assert envs.step(np.array([0, 0]))[0]["t"].tolist() == [[2], [1]]


def test_misuse_is_refused(sb3_env_of):
    with pytest.raises(UsageError, match=r"SB3VecEnv needs autoreset_mode='SameStep', .*='Disabled'"):
        sb3_env_of(make(2), options=PoolOptions(autoreset_mode="Disabled"))
    with pytest.raises(UsageError, match="observation space"):
        sb3_env_of([lambda: Talker(), lambda: gymnasium.make("CartPole-v1")])
    envs = sb3_env_of(make(2))
    envs.close()
    envs.close()
    with pytest.raises(UsageError, match="closed"):
        envs.reset()


def test_the_guide_runs(tmp_path):
    run_guide("sb3", tmp_path)


def test_workers_import_neither_sb3_nor_torch_for_its_wrappers() -> None:
    from stable_baselines3.common.evaluation import evaluate_policy

    loaded = "[name for name in ('stable_baselines3', 'torch', 'pandas') if name in __import__('sys').modules]"
    with contextlib.closing(
        make_vec_env("CartPole-v1", 2, vec_env_cls=SB3VecEnv, vec_env_kwargs={"backend": "process"})
    ) as envs:
        model = PPO("MlpPolicy", envs, n_steps=8, batch_size=16, device="cpu").learn(16)
        evaluate_policy(model, envs, n_eval_episodes=2, warn=True)
        assert envs.env_is_wrapped(Monitor) == [True, True]
        assert envs._pool.call(lambda env: eval(loaded)) == ([], [])
