"""Properties: named values that reach envs beside the data, in order with the commands, and again after a restart."""

from __future__ import annotations

import os
import signal
from functools import partial

import gymnasium
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun, counting_envs


class Hooked(CountingEnv):
    """Has hooks of its own, and shows at which step they were called."""

    def __init__(self, identity: int = 0, length: int = 50):
        super().__init__(identity, length)
        self.heard: list[tuple[str, object, int]] = []
        self.known = {"builtin": 1.5}

    def set_property(self, name, value):
        if name == "bad":
            raise ValueError("no such thing")
        self.heard.append((name, value, self.num_steps))
        self.known[name] = value

    def get_properties(self):
        return self.known


class Wrapped(gymnasium.Wrapper):
    pass


def step_for_ever(pool):
    while True:
        pool.step([1] * pool.num_envs)


@pytest.mark.covers("U-7", "U-8")
def test_an_env_without_hooks_finds_properties_in_a_dict(pool_of):
    pool = pool_of([lambda: Wrapped(CountingEnv(0))] * 3)
    pool.properties.set("gravity", 9.81)
    pool.properties.set("mass", [1.0, 2.0, 3.0])
    pool.properties.set("mass", 7.0, env_ids=[1])
    assert pool.get_attr("properties") == tuple({"gravity": 9.81, "mass": mass} for mass in (1.0, 7.0, 3.0))
    assert pool.properties.get("mass") == (1.0, 7.0, 3.0)
    assert pool.properties.get("mass", env_ids=[2, 0]) == (3.0, 1.0)
    assert pool.properties.list() == ["gravity", "mass"]
    assert pool.properties.read(env_ids=[1]) == ({"gravity": 9.81, "mass": 7.0},)


@pytest.mark.covers("U-8", "U-9")
def test_hooks_are_called_through_wrappers(pool_of):
    pool = pool_of([lambda: Wrapped(Hooked())] * 2)
    pool.properties.set("level", 4)
    assert pool.properties.list() == ["builtin", "level"]
    assert pool.properties.get("builtin") == (1.5, 1.5)  # what the env says of itself is there, too
    assert pool.get_attr("heard") == ([("level", 4, 0)],) * 2


def test_a_copy_is_read_and_not_the_envs_own_dict(pool_of):
    pool = pool_of([Hooked])
    pool.properties.read()[0]["builtin"] = 0
    assert pool.properties.get("builtin") == (1.5,)


@pytest.mark.covers("U-8")
def test_properties_keep_their_place_among_the_commands(pool_of):
    pool = begun(pool_of([Hooked] * 2))
    for _ in range(3):
        pool.send([1, 1])
        pool.properties.set("p", 1)  # after the step just sent
        pool.recv(2)
    assert pool.get_attr("heard") == ([("p", 1, 1), ("p", 1, 2), ("p", 1, 3)],) * 2


def test_what_an_env_refuses_is_told_with_its_name(pool_of):
    pool = pool_of([Hooked, CountingEnv])
    with pytest.raises(stepmill.EnvError, match=r"env 0 raised ValueError in call: no such thing"):
        pool.properties.set("bad", 1)
    pool.properties.set("good", 1)


def test_mistakes_are_named(pool_of):
    class Odd(CountingEnv):
        properties = "many"

    pool = pool_of([Odd, CountingEnv])
    with pytest.raises(stepmill.EnvError, match=r"the attribute `properties` of .* is not a dict"):
        pool.properties.set("p", 1)
    with pytest.raises(stepmill.UsageError, match=r"envs \[1\] have no property 'q'"):
        pool.properties.get("q", env_ids=[1])
    with pytest.raises(stepmill.UsageError, match="the name of a property must be a string, not the int 3"):
        pool.properties.set(3, 1)
    with pytest.raises(stepmill.UsageError, match="got 3 values of 'p' for 2 envs"):
        pool.properties.set("p", [1, 2, 3])


@pytest.mark.covers("G-5", "U-7")
@pytest.mark.parametrize("where", ["fork"])
def test_properties_are_set_again_on_envs_that_are_built_anew(pool_of, where):
    pool = begun(pool_of(counting_envs(3), num_workers=3))
    pool.properties.set("a", [1, 2, 3])
    pool.properties.set("a", 5, env_ids=[1])
    pool.properties.set("b", "x", env_ids=[2])
    for worker in (1, 2):
        os.kill(pool.stats().workers[worker].pid, signal.SIGKILL)
        with pytest.raises(stepmill.WorkerDied):
            step_for_ever(pool)
        pool.reset(seed=0)
    assert pool.properties.read() == ({"a": 1}, {"a": 5}, {"a": 3, "b": "x"})


@pytest.mark.parametrize("where", ["fork"])
def test_a_replayed_episode_has_its_properties_and_kept_options(pool_of, where):
    class Sum(CountingEnv):
        """Rewards the property `bonus`, and the option `level` of the episode."""

        def reset(self, *, seed=None, options=None):
            self.level = (options or {}).get("level", 0)
            return super().reset(seed=seed, options=options)

        def step(self, action):
            obs, _, *rest = super().step(action)
            bonus = getattr(self, "properties", {}).get("bonus", 0)
            return (obs, float(bonus + 100 * self.level), *rest)

    pool = pool_of([partial(Sum, i, 4) for i in range(2)], num_workers=2, on_fault="replay", seeding="per_episode")
    pool.reset(seed=0, options={0: {"level": 1}, 1: {"level": 2}}, persist_options=True)
    for _ in range(6):  # into the second episode, whose reset was automatic
        pool.step([1, 1])
    pool.properties.set("bonus", 7)
    assert pool.step([1, 1]).reward.tolist() == [107, 207]
    os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
    batch = pool.step([1, 1])
    assert batch.reward.tolist() == [107, 207]
    assert batch.obs.tolist() == [[0, 0, 3], [1, 0, 3]]
    assert "fault" not in batch.info
