"""The front-end for actorcritic: what MultiEnv and SubprocessEnv promise when nothing fails."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gymnasium
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

import stepmill
from stepmill.frontends.multi_env import LifeCycleError, MultiEnv, SubprocessEnv, create_subprocess_envs
from stepmill.testing.gates import Gate
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.plain_envs import LENGTH, NewEnv, OldEnv, SlowToMake
from tests.harness.pools import keep_closed
from tests.harness.scripts import run_source

FORK = stepmill.PoolOptions(context="fork")


@pytest.fixture
def multi_of():
    def make(*env_fns, num_workers=None, **arguments):
        return MultiEnv(create_subprocess_envs(env_fns, options=FORK, num_workers=num_workers), **arguments)

    yield from keep_closed(make)


@pytest.fixture
def one_of():
    def make(env_fn, *, is_ready=True):
        env = SubprocessEnv(env_fn, options=FORK)
        return _started(env) if is_ready else env

    yield from keep_closed(make)


# ---- one env ----------------------------------------------------------------------------------------------------------


@pytest.mark.covers("M-1")
def test_create_subprocess_envs_has_all_constructors_run_before_it_waits_for_one():
    with Gate() as gate, ThreadPoolExecutor(1) as threads:
        makers = [partial(SlowToMake, gate.path, i) for i in range(3)]
        making = threads.submit(create_subprocess_envs, makers, options=FORK)
        gate.wait_arrivals(3)  # none has passed: they were begun together
        assert not making.done()
        gate.open(3)
        for env in making.result(HANG_GUARD_S):
            env.close()


@pytest.mark.covers("M-5", "M-13")
def test_a_subprocess_env_is_a_gymnasium_env_and_takes_wrappers():
    env = _started(SubprocessEnv(partial(gymnasium.make, "CartPole-v1", max_episode_steps=3), options=FORK))
    here = gymnasium.make("CartPole-v1", max_episode_steps=3)
    assert isinstance(env, gymnasium.Env)
    assert env.unwrapped is env
    assert (env.metadata, env.render_mode) == (here.metadata, here.render_mode)
    assert env.spec.id == "CartPole-v1"
    assert env.reward_range == (-float("inf"), float("inf"))
    with RecordEpisodeStatistics(env) as wrapped:
        wrapped.reset(seed=1)
        infos = [wrapped.step(0)[4] for _ in range(3)]
        assert infos[-1]["episode"]["l"] == 3


class Pair(OldEnv):
    """Its observation could be taken for a pair of an observation and an info."""

    def _observe(self):
        return [self.t, self.last_seed]


class ClaimsToBeNew(Pair, gymnasium.Env):
    """A subclass of Gymnasium's Env with old gym's values."""


@pytest.mark.covers("M-12", "M-5", "M-15/wrappers")
@pytest.mark.parametrize("env_fn", [Pair, ClaimsToBeNew])
def test_subprocess_envs_of_old_envs_work_in_wrappers(made, env_fn):
    multi_env = made(MultiEnv([gymnasium.Wrapper(env) for env in create_subprocess_envs([env_fn] * 2, options=FORK)]))
    assert multi_env.reset() == [[0, None]] * 2
    assert multi_env.step([1, 1]) == ([[1, None]] * 2, [1, 1], [False] * 2, [{"t": 1}] * 2)
    if env_fn is Pair:
        assert multi_env.reset(seed=[5, 6]) == [[0, 5], [0, 6]]


def _doubled(step):
    def step_twice(action):
        obs, reward, *rest = step(action)
        return obs, 2 * reward, *rest

    return step_twice


class Marked(SubprocessEnv):
    """Overrides what a MultiEnv calls."""

    closed = 0

    def reset(self, **kwargs):
        return {"marked": True, **super().reset(**kwargs)}

    def step(self, action):
        return _doubled(super().step)(action)

    def close(self):
        self.closed += 1
        super().close()


def _started(env):
    env.start()
    env.initialize()
    return env


@pytest.mark.covers("M-12")
def test_a_multi_env_calls_the_methods_that_a_subclass_or_an_object_overrides():
    envs = [_started(cls(OldEnv, options=FORK)) for cls in (Marked, SubprocessEnv, SubprocessEnv)]
    envs[1].step = _doubled(envs[1].step)
    with MultiEnv(envs) as multi_env:
        assert [obs.get("marked") for obs in multi_env.reset(kwargs=[{"start": 1}, None, None])] == [True, None, None]
        assert multi_env.step([3, 3, 3])[1] == [6, 6, 3]
        ends = [multi_env.step([1] * 3)[2] for _ in range(LENGTH - 1)]
        assert ends[-1] == [True] * 3
        first = multi_env.step([1] * 3)
        assert [obs["t"] for obs in first[0]] == [0] * 3
        assert first[0][0]["marked"]  # an automatic reset calls the override, too
    assert envs[0].closed == 1


@pytest.mark.covers("M-12")
def test_overrides_are_called_at_the_same_time_and_a_death_in_one_ends_its_episode():
    with Gate() as gate, ThreadPoolExecutor(1) as threads:
        envs = [_started(Marked(partial(OldEnv, i, gate=gate.path), options=FORK)) for i in range(2)]
        with MultiEnv(envs) as multi_env:
            multi_env.reset()
            stepping = threads.submit(multi_env.step, ["wait", "wait"])
            gate.wait_arrivals(2)
            gate.open(2)
            assert stepping.result(HANG_GUARD_S)[1] == ["waitwait"] * 2
            _, _, terminals, infos = multi_env.step(["kill", 1])
            assert terminals == [True, False]
            assert infos[0]["worker_restarted"]


WITH_GYM = """
import sys
import types
gym = types.ModuleType("gym")
gym.Env = type("Env", (), {})
sys.modules["gym"] = gym
from stepmill.frontends.multi_env import SubprocessEnv
assert issubclass(SubprocessEnv, gym.Env)
"""


@pytest.mark.covers("M-5")
def test_where_gym_was_imported_a_subprocess_env_is_its_env_too():
    done = run_source(WITH_GYM)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.covers("M-2", "M-B7/start")
def test_start_returns_before_the_env_is_made_and_both_steps_may_be_repeated(made, gate):
    env = made(SubprocessEnv(partial(SlowToMake, gate.path), options=FORK))
    env.start()
    gate.wait_arrivals()
    env.start()
    gate.open()
    env.initialize()
    env.initialize()
    assert env.reset()["t"] == 0


@pytest.mark.covers("M-3")
def test_each_use_out_of_turn_has_its_own_words(one_of):
    env = one_of(OldEnv, is_ready=False)
    uses = {
        "step()": lambda: env.step(1),
        "reset()": env.reset,
        "render()": env.render,
        "observation_space": lambda: env.observation_space,
        "action_space": lambda: env.action_space,
    }
    with pytest.raises(ValueError) as caught:
        env.initialize()
    assert str(caught.value) == "The subprocess is not started yet. Call 'start()' before 'initialize()'."
    for method, use in uses.items():
        with pytest.raises(ValueError) as caught:
            use()
        assert str(caught.value) == (
            f"The subprocess is not started yet. Call 'start()' and 'initialize()' before calling '{method}'."
        )
    env.start()
    for method, use in uses.items():
        with pytest.raises(ValueError) as caught:
            use()
        assert (
            str(caught.value)
            == f"The subprocess is not initialized yet. Call 'initialize()' before calling '{method}'."
        )
    env.close()
    for use in (*uses.values(), env.start, env.initialize):
        with pytest.raises(LifeCycleError) as caught:
            use()
        assert str(caught.value) == "The subprocess was closed already."


@pytest.mark.covers("M-4")
def test_spaces_are_read_while_the_env_is_busy(made, gate):
    env = made(_started(SubprocessEnv(partial(OldEnv, gate=gate.path), options=FORK)))
    env.reset()
    shared, index = env.pool_position
    shared.send(["wait"], [index], is_driven=False)
    gate.wait_arrivals()
    assert env.observation_space == "space of OldEnv 0"  # the env stands at the gate
    gate.open()
    assert shared.recv([index])[0][index][1][1] == "wait"


@pytest.mark.covers("M-11")
def test_actions_of_any_size_arrive_whatever_came_before(multi_of):
    envs = multi_of(OldEnv, OldEnv)
    envs.reset()
    for size in [0, 100_000, 3, *range(200, 260, 5), 1_000_000, 1]:
        actions = ["x" * size, ("y", size)]
        _, rewards, terminals, _ = envs.step(actions)
        if terminals[0]:
            envs.step(["", ""])  # which begins the next episode
        assert rewards == actions


@pytest.mark.covers("M-5", "M-11")
def test_an_env_answers_as_it_would_here(one_of):
    env, here = one_of(OldEnv), OldEnv()
    assert env.reset(level=[1, {"deep": None}]) == here.reset(level=[1, {"deep": None}])
    for action in (1, 2.5, 3, 4):  # past the end of the episode: there is no autoreset
        assert env.step(action) == here.step(action)
    assert env.render() == env.render(None) == here.render()
    assert env.render(mode="rgb_array") == [0, "rgb_array"]


class Decorated(OldEnv):
    """Its `render` has the signature that gym 0.25 gives to all of them."""

    def render(self, *args, **keywords):
        return super().render(*args, **keywords)


@pytest.mark.covers("M-5", "M-12")
def test_a_mode_reaches_a_render_of_any_signature(one_of):
    env = one_of(Decorated)
    assert (env.render(), env.render("rgb_array")) == ([0, "human"], [0, "rgb_array"])


@pytest.mark.covers("M-5")
def test_an_env_with_five_values_gives_five(one_of):
    env, here = one_of(NewEnv), NewEnv()
    assert env.reset(seed=4, options={"a": 1}) == here.reset(seed=4, options={"a": 1})
    assert env.step("cut") == here.step("cut")
    assert env.render("rgb_array") == [0, "no mode"]


# ---- many envs --------------------------------------------------------------------------------------------------------


@pytest.mark.covers("M-7", "G-16/cases")
def test_results_are_lists_in_the_order_of_the_envs(multi_of):
    multi_env = multi_of(*(partial(OldEnv, i) for i in range(3)))
    assert multi_env.observation_space == "space of OldEnv 0"
    assert multi_env.action_space == ("any", "python", "value")
    assert len(multi_env.envs) == 3
    assert [obs["who"] for obs in multi_env.reset()] == ["env 0", "env 1", "env 2"]
    results = multi_env.step([10, 20, 30])
    assert [type(column) for column in results] == [list] * 4
    observations, rewards, terminals, infos = results
    assert [obs["t"] for obs in observations] == [1, 1, 1]
    assert (rewards, terminals, infos) == ([10, 20, 30], [False] * 3, [{"t": 1}] * 3)


@pytest.mark.covers("M-7", "M-B8")
def test_envs_in_another_order_and_of_several_makers_keep_their_places():
    together = create_subprocess_envs([partial(OldEnv, i) for i in range(3)], options=FORK)
    alone = _started(SubprocessEnv(partial(OldEnv, 3), options=FORK))
    local = OldEnv(4)
    with MultiEnv([local, together[2], alone, together[0]]) as multi_env:
        assert [obs["who"] for obs in multi_env.reset()] == ["env 4", "env 2", "env 3", "env 0"]
        for _ in range(2):
            assert multi_env.step([1, 2, 3, 4])[1] == [1, 2, 3, 4]
    assert together[1].reset()["who"] == "env 1"  # not the MultiEnv's, and not closed by it
    together[1].close()


@pytest.mark.covers("M-8")
def test_an_env_whose_action_is_none_is_not_touched(multi_of, tmp_path):
    folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        folder.mkdir()
    multi_env = multi_of(*(partial(OldEnv, i, folder=folder) for i, folder in enumerate(folders)))
    multi_env.reset()
    observations, rewards, terminals, infos = multi_env.step([1, None, 3])
    assert (observations[1], rewards[1], terminals[1], infos[1]) == (None, None, None, None)
    assert rewards == [1, None, 3]
    assert not (folders[1] / "steps").exists()
    assert multi_env.step([None, None, None]) == ([None] * 3, [None] * 3, [None] * 3, [None] * 3)
    assert multi_env.step([1, 2, 3])[0][1]["t"] == 1


@pytest.mark.covers("M-9", "M-B2")
def test_the_first_observation_of_a_new_episode_is_seen_and_its_action_is_not_applied(multi_of):
    multi_env = multi_of(OldEnv, partial(OldEnv, 1))
    multi_env.reset()
    for _ in range(LENGTH):
        observations, _, terminals, _ = multi_env.step([1, 1])
    assert terminals == [True, True]
    assert [obs["t"] for obs in observations] == [LENGTH, LENGTH]  # the terminal observation is seen, too
    observations, rewards, terminals, infos = multi_env.step(["raise", "raise"])
    assert [(obs["episode"], obs["t"]) for obs in observations] == [(2, 0), (2, 0)]
    assert (rewards, terminals, infos) == ([0.0, 0.0], [False, False], [{}, {}])
    assert [obs["t"] for obs in multi_env.step([1, 1])[0]] == [1, 1]


@pytest.mark.covers("M-B8")
def test_a_time_limit_of_the_new_api_is_reported_in_either_api(multi_of):
    multi_env = multi_of(NewEnv, OldEnv)
    multi_env.reset()
    _, _, terminals, infos = multi_env.step(["cut", 1])
    assert terminals == [True, False]
    assert infos == [{"t": 1, "TimeLimit.truncated": True}, {"t": 1}]
    five = multi_of(NewEnv, NewEnv, step_api="gymnasium")
    observations, infos = five.reset(seed=7)
    assert [obs["told"][1] for obs in observations] == [7, 8]
    assert infos == [{"fresh": True}] * 2
    _, _, terminated, truncated, _ = five.step(["cut", 1])
    assert (terminated, truncated) == ([False, False], [True, False])
    assert five.step([1, 1])[4][0] == {"fresh": True}  # the reset's info


@pytest.mark.covers("M-11", "M-B8")
def test_some_envs_are_reset_each_with_a_seed_and_arguments_of_its_own(multi_of):
    multi_env = multi_of(*(partial(OldEnv, i) for i in range(3)))
    multi_env.reset()
    multi_env.step([1, 1, 1])
    observations = multi_env.reset(env_ids=[2, 0], seed=[5, None], kwargs=[{"level": "a"}, {"level": "b"}])
    assert [obs["who"] for obs in observations] == ["env 2", "env 0"]
    assert [obs["told"] for obs in observations] == [({"level": "a"}, 5), ({"level": "b"}, None)]
    assert [obs["t"] for obs in multi_env.step([1, 1, 1])[0]] == [1, 2, 1]


@pytest.mark.covers("M-B8")
def test_envs_share_as_many_processes_as_are_asked_for(multi_of):
    isolated = multi_of(*(partial(OldEnv, i) for i in range(4)))
    assert len({env.call("where") for env in isolated.envs}) == 4
    shared = multi_of(*(partial(OldEnv, i) for i in range(4)), num_workers=2)
    assert len({env.call("where") for env in shared.envs}) == 2
    assert [obs["who"] for obs in shared.reset()] == [f"env {i}" for i in range(4)]
    assert shared.step([1, 2, 3, 4])[1] == [1, 2, 3, 4]


@pytest.mark.covers("M-B8")
def test_many_envs_need_no_thread_each(multi_of):
    threads_before = leaks.Footprint.take().threads
    multi_env = multi_of(*(partial(OldEnv, i) for i in range(6)))
    multi_env.reset()
    multi_env.step([1] * 6)
    assert len(leaks.Footprint.take().threads - threads_before) < 3  # the reaper of the one pool


@pytest.mark.covers("M-B8")
def test_envs_with_other_spaces_are_refused_unless_that_is_wanted():
    envs = create_subprocess_envs([partial(OldEnv, 0), partial(OldEnv, 100)], options=FORK)
    with pytest.raises(stepmill.UsageError, match="env 1 has another observation space than env 0"):
        MultiEnv(envs)
    with MultiEnv(envs, check_spaces=False) as multi_env:
        assert len(multi_env.reset()) == 2


def test_nonsense_is_refused_and_changes_nothing(multi_of):
    with pytest.raises(stepmill.UsageError, match="at least one env"):
        MultiEnv([])
    with pytest.raises(stepmill.UsageError, match="env_fns\\[1\\] is a int"):
        create_subprocess_envs([OldEnv, 3])
    with pytest.raises(LifeCycleError, match="not started yet"):
        MultiEnv([SubprocessEnv(OldEnv)])
    multi_env = multi_of(OldEnv, partial(OldEnv, 1))
    with pytest.raises(stepmill.UsageError, match="are the same env"):
        MultiEnv([multi_env.envs[0]] * 2)
    multi_env.reset()
    with pytest.raises(stepmill.UsageError, match="got 3 actions for 2 envs"):
        multi_env.step([1, 2, 3])
    with pytest.raises(stepmill.UsageError, match="env 2 does not exist"):
        multi_env.reset(env_ids=[2])
    with pytest.raises(stepmill.UsageError, match="seed has 1 entries for 2 envs"):
        multi_env.reset(seed=[1])
    assert [obs["t"] for obs in multi_env.step([1, 1])[0]] == [1, 1]


@pytest.mark.covers("M-10", "M-B7/again")
def test_close_closes_each_env_once_and_may_be_repeated(tmp_path):
    envs = create_subprocess_envs([partial(OldEnv, i, folder=tmp_path) for i in range(3)], options=FORK)
    multi_env = MultiEnv(envs)
    multi_env.reset()
    pids = [env.call("where") for env in envs]
    envs[1].close()
    envs[1].close()
    multi_env.close()
    multi_env.close()
    envs[0].close()
    assert (tmp_path / "closed").read_bytes() == b"..."
    assert not leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S)
    with pytest.raises(LifeCycleError, match="closed already"):
        multi_env.envs[0].step(1)
    for call in (multi_env.reset, lambda: multi_env.step([1] * 3)):
        with pytest.raises(RuntimeError, match="closed already") as caught:
            call()
        assert isinstance(caught.value, LifeCycleError)


def test_an_env_that_is_started_and_forgotten_leaves_nothing(gate):
    env = SubprocessEnv(partial(SlowToMake, gate.path), options=FORK)
    env.start()
    gate.wait_arrivals()
    gate.open()
    del env


def test_gymnasium_envs_and_other_start_methods_work():
    from stepmill.testing import CountingEnv

    options = stepmill.PoolOptions(context="spawn")
    with MultiEnv(create_subprocess_envs([CountingEnv, partial(CountingEnv, 1)], options=options)) as multi_env:
        assert [obs.tolist() for obs in multi_env.reset(seed=3)] == [[0, 0, 0], [1, 0, 0]]
        assert multi_env.step([5, 6])[1] == [5.0, 6.0]
        assert multi_env.envs[0].call("locate")[0] != os.getpid()
