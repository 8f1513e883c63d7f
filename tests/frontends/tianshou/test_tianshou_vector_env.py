"""Tianshou's vector env over stepmill: its contract, its async mode, and its Collectors."""

from __future__ import annotations

import contextlib
from functools import partial

import gymnasium
import numpy as np
import pytest
from tianshou.algorithm.algorithm_base import Policy
from tianshou.data import AsyncCollector, Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv

import stepmill
from stepmill import PoolOptions
from stepmill.frontends.tianshou import StepmillVectorEnv
from stepmill.spec.errors import UsageError
from stepmill.testing import CountingEnv
from stepmill.testing.faulty import RaisingEnv
from stepmill.testing.gates import GATED_ACTION, GateEnv
from tests.frontends.guides import run_guide
from tests.harness.pools import assert_equal, keep_closed

BACKENDS = ["serial", "thread", "process"]


class Counter(gymnasium.Env):
    """Counts its steps and ends after three."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, is_dict=False):
        box = gymnasium.spaces.Box(0, 100, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"t": box}) if is_dict else box
        self.is_dict, self.note = is_dict, "hello"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.offset = 0, int(self.np_random.integers(50))
        return self._obs(), {"seed": seed, "options": options}

    def step(self, action):
        self.t += 1
        return self._obs(), float(action), self.t == 3, False, {"t": self.t}

    def _obs(self):
        obs = np.array([self.t, self.offset], np.float32)
        return {"t": obs} if self.is_dict else obs

    def render(self):
        return f"frame {self.t}"


@pytest.fixture(params=BACKENDS)
def envs_of(request):
    def build(env_fns, **arguments):
        return StepmillVectorEnv(
            env_fns, backend=request.param, num_workers=0 if request.param == "serial" else 2, **arguments
        )

    yield from keep_closed(build)


def same(ours, theirs):
    """Compare results to the last bit. Tianshou's env_ids are NumPy scalars."""
    for results in (ours, theirs):
        for info in results[-1]:
            info.update({key: int(value) for key, value in info.items() if key == "env_id"})
    assert_equal(ours, theirs)


@pytest.mark.parametrize("is_dict", [False, True])
def test_steps_and_resets_are_those_of_the_librarys_own_vector_env(envs_of, is_dict):
    fns = [lambda: Counter(is_dict)] * 4
    both = [envs_of(fns), DummyVectorEnv(fns)]
    assert [each.seed(3) for each in both] == [[[3], [4], [5], [6]]] * 2
    same(*[each.reset(seed=9, options={"a": 1}) for each in both])
    for ids, actions in ((None, [0, 1, 0, 1]), ([2, 0], [1, 1]), (np.array([3]), [0]), ([3, 0, 2, 1], [0, 1, 2, 1])):
        same(*[each.step(np.array(actions), ids) for each in both])
    same(*[each.reset([1, 3], seed=5) for each in both])
    both[1].close()


class Team(Counter):
    """Rewards each of its two agents, in a list."""

    def step(self, action):
        return self._obs(), [int(action), self.offset], False, False, {}


class DeclaredTeam(Team):
    reward_space = gymnasium.spaces.Box(0, 50, (2,), np.float64)


def test_rewards_may_be_lists_if_the_env_declares_their_space(envs_of):
    both = [envs_of([DeclaredTeam] * 3), DummyVectorEnv([Team] * 3)]
    for each in both:
        each.reset(seed=4)
    rewards = [each.step(np.array([0, 1, 0]))[1] for each in both]
    assert rewards[0].shape == (3, 2)
    np.testing.assert_array_equal(*rewards)
    both[1].close()


def test_each_env_of_a_kernel_has_its_infos_as_in_python():
    pytest.importorskip("numba")

    def play(backend):
        with contextlib.closing(StepmillVectorEnv([stepmill.kernels.find("Taxi-v4")] * 3, backend=backend)) as envs:
            return [envs.reset(seed=3)[1].tolist(), envs.step(np.array([0, 1]), [0, 2])[-1].tolist()]

    compiled = play("kernel")
    np.testing.assert_equal(compiled, play("serial"))
    assert [sorted(info) for info in compiled[1]] == [["action_mask", "env_id", "prob"]] * 2


def test_attributes_are_read_and_set_by_id(envs_of):
    envs = envs_of([Counter] * 3)
    assert len(envs) == 3
    assert envs.action_space == [gymnasium.spaces.Discrete(3)] * 3
    envs.set_env_attr("note", ["x"], 1)
    assert envs.get_env_attr("note") == ["hello", ["x"], "hello"]
    assert envs.get_env_attr("note", 1) == [["x"]]
    envs.reset()
    assert envs.render() == ["frame 0"] * 3


def test_methods_of_a_closed_env_are_refused():
    envs = StepmillVectorEnv([Counter], backend="serial")
    envs.close()
    assert envs.is_closed
    with pytest.raises(AssertionError, match="close"):
        envs.reset()


def test_async_steps_return_the_envs_that_are_done_and_keep_the_rest(made, gate):
    fns = [partial(GateEnv, gate.path)] * 4
    envs = made(
        StepmillVectorEnv(fns, wait_num=3, backend="process", num_workers=4, options=PoolOptions(context="fork"))
    )
    envs.reset()
    *_, infos = envs.step(np.array([GATED_ACTION, 0, 0, 0]))
    assert sorted(info["env_id"] for info in infos) == [1, 2, 3]
    assert envs.waiting_id == [0]
    assert envs.ready_id == [info["env_id"] for info in infos]
    with pytest.raises(AssertionError, match="0"):
        envs.step(np.zeros(1, np.int64), [0])
    with pytest.raises(RuntimeError, match=r"\[0\]"):
        envs.render()
    gate.open()
    *_, infos = envs.step(None)
    assert [info["env_id"] for info in infos] == [0]
    assert envs.ready_id[-1] == 0
    *_, infos = envs.step(np.zeros(4, np.int64), [3, 1, 0, 2])
    assert envs.ready_id == [info["env_id"] for info in infos]


def test_a_timeout_returns_with_fewer_but_with_one(made, gate):
    fns = [partial(GateEnv, gate.path)] * 2
    envs = made(
        StepmillVectorEnv(fns, timeout=0.05, backend="process", num_workers=2, options=PoolOptions(context="fork"))
    )
    envs.reset()
    *_, infos = envs.step(np.array([GATED_ACTION, 0]))
    assert [info["env_id"] for info in infos] == [1]
    gate.open()
    *_, infos = envs.step(None)
    assert [info["env_id"] for info in infos] == [0]


class Zeros(Policy):
    """Gives action 0 to every env."""

    def forward(self, batch, state=None, **kwargs):
        zeros = np.zeros(len(batch.obs), np.int64)
        # Without policy and state Tianshou 2.0.1 AsyncCollector fails on its own vector envs, too.
        return Batch(act=zeros, policy=Batch(zero=zeros), state=Batch(zero=zeros))


@pytest.mark.parametrize("is_dict", [False, True])
def test_collectors_collect_the_same_from_ours_and_from_the_librarys(envs_of, is_dict):
    fns = [lambda: Counter(is_dict)] * 3
    collected = []
    for envs in (envs_of(fns), DummyVectorEnv(fns)):
        envs.seed(1)
        buffer = VectorReplayBuffer(300, 3)
        collector = Collector(Zeros(action_space=gymnasium.spaces.Discrete(2)), envs, buffer)
        collector.reset(gym_reset_kwargs={"seed": 4})
        stats = collector.collect(n_step=30)
        times = buffer.obs.t if is_dict else buffer.obs
        collected.append((stats.n_collected_episodes, stats.lens.tolist(), np.asarray(times)[:, 0].tolist()))
    assert collected[0] == collected[1]
    assert collected[0][1] == [3] * 9
    envs.close()


@pytest.mark.filterwarnings("ignore:Using async setting may collect extra transitions")
def test_the_async_collector_collects(envs_of):
    envs = envs_of([Counter] * 3, wait_num=2)
    collector = AsyncCollector(Zeros(action_space=gymnasium.spaces.Discrete(2)), envs, VectorReplayBuffer(300, 3))
    collector.reset()
    assert collector.collect(n_step=30).n_collected_steps >= 30
    collector.reset()


@pytest.mark.parametrize("ids", [[1.7], 1.0, [True, False], np.array([1.0])], ids=repr)
def test_ids_are_whole_numbers(envs_of, ids):
    envs = envs_of([Counter] * 2)
    for call in (
        lambda: envs.step(np.array([0]), ids),
        lambda: envs.reset(ids),
        lambda: envs.get_env_attr("spec", ids),
    ):
        with pytest.raises(UsageError, match="env_ids="):
            call()


def test_a_reset_returns_the_envs_in_the_order_of_its_ids(envs_of):
    fns = [partial(CountingEnv, each) for each in range(4)]
    both = [envs_of(fns), DummyVectorEnv(fns)]
    for ids in ([2, 0], np.array([3, 1, 2])):
        same(*[each.reset(ids) for each in both])
    both[1].close()


class OwnSpace(Counter):
    def __init__(self):
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(3)


def test_each_env_has_an_action_space_with_a_generator_of_its_own(envs_of):
    both = [envs_of([OwnSpace] * 4), DummyVectorEnv([OwnSpace] * 4)]
    for each in both:
        each.seed(7)
    drawn = [[[space.sample() for _ in range(20)] for space in each.action_space] for each in both]
    assert drawn[0] == drawn[1]
    both[1].close()


def test_misuse_is_refused(envs_of):
    with pytest.raises(AssertionError, match="wait_num"):
        envs_of([Counter] * 2, wait_num=3)
    with pytest.raises(AssertionError, match="timeout"):
        envs_of([Counter] * 2, timeout=0)
    envs = envs_of([Counter] * 2)
    with pytest.raises(ValueError, match="action"):
        envs.step(None)
    with pytest.raises(UsageError, match="nonsense"):
        envs.reset(nonsense=1)


def test_the_guide_runs(tmp_path):
    run_guide("tianshou", tmp_path)


def test_a_function_in_place_of_a_list_is_refused_with_what_to_write():
    with pytest.raises(UsageError, match=r"env_fns is a function; give a list .*\[make_env\] \* 8"):
        StepmillVectorEnv(lambda: None)


def test_a_step_of_an_env_after_its_fault_returns_no_rows_of_the_step_before(envs_of):
    envs = envs_of([CountingEnv, RaisingEnv, CountingEnv])
    envs.reset()
    with pytest.raises(stepmill.EnvError, match="a deliberate failure"):
        envs.step(np.array([5, 9, 7]))
    envs.reset(1)
    assert envs.step(np.array([2]), [1])[1].tolist() == [2.0]
    envs.reset([0, 2])
    assert envs.step(np.array([1, 2, 3]))[1].tolist() == [1.0, 2.0, 3.0]
