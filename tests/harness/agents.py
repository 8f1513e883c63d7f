"""Envs of the engine's own API with rewards of any shape, agents, and infos of fixed shape; their adapter is in this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepmill import envs
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import DictNode, Leaf, LeafKind

F64, F32, I64 = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.int64)
ACTION = Leaf(I64, (), LeafKind.DISCRETE)


def describe(env: Any, like: EnvSpec | None) -> EnvSpec:
    return like if like is not None and like == env.spec else env.spec


def adapt(env: Any) -> Any:
    return env


class Native:
    """An env that says itself what it is. Found by the door through the table, as foreign envs are."""

    spec: EnvSpec


envs.ADAPTERS[f"{__name__}.Native"] = __name__


class VectorReward(Native):
    """Rewards (t, action): the reward's shape and dtype are the test's. Episodes of `length` steps."""

    def __init__(self, length: int = 3, dtype: np.dtype[Any] = F64, shape: tuple[int, ...] = (2,)) -> None:
        self.spec = EnvSpec(observation=Leaf(I64, ()), action=ACTION, reward=Leaf(dtype, shape))
        self.length = length
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.int64(0), {}

    def step(self, action):
        self.t += 1
        reward = np.resize(np.array([self.t, action]), self.spec.reward.shape).astype(self.spec.reward.dtype)
        return np.int64(self.t), reward, self.t == self.length, False, {}


@dataclass
class Fate:
    """What becomes of an agent: at step `at` it is terminated, or else truncated."""

    at: int
    is_terminated: bool = True


THREE_FATES = (Fate(1), Fate(2, is_terminated=False), Fate(3))


class Agents(Native):
    """A agents with fates of their own. Observation [A] = t for who lives, 0 for the dead. Reward of a = action + a."""

    def __init__(self, fates=THREE_FATES, *, is_open=False) -> None:
        self.fates = fates
        names = tuple(f"agent_{a}" for a in range(len(fates)))
        self.spec = EnvSpec(
            observation=Leaf(I64, (len(fates),)), action=Leaf(I64, (len(fates),)), agents=names, is_open=is_open
        )
        self.t = 0
        self.num_resets = 0

    def alive(self):
        return np.array([self.t < fate.at for fate in self.fates])

    def observe(self, alive):
        return np.where(alive, self.t, 0)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.num_resets += 1
        return self.observe(self.alive()), {}

    def step(self, action):
        before = self.alive()
        self.t += 1
        reward = np.where(before, action + np.arange(len(self.fates)), 0)
        ends = [self.t == fate.at for fate in self.fates]
        terminated = [end and fate.is_terminated for end, fate in zip(ends, self.fates, strict=True)]
        truncated = [end and not fate.is_terminated for end, fate in zip(ends, self.fates, strict=True)]
        return self.observe(before), reward, terminated, truncated, {"t": self.t}


class Guests(Agents):
    """Agents that come and go: slot a is taken in steps t with (t + a) % 3 != 0, as the env itself says."""

    def __init__(self, num_slots: int = 3) -> None:
        super().__init__((Fate(10**6),) * num_slots, is_open=True)

    def alive(self):
        return np.array([(self.t + a) % 3 != 0 for a in range(len(self.fates))])

    def reset(self, *, seed=None, options=None):
        return (*super().reset(seed=seed, options=options), self.alive())

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        left = [(self.t + a) % 3 == 0 for a in range(len(self.fates))]
        return obs, reward, left, [False] * len(left), info, self.alive()


class FixedInfo(Native):
    """Says of its info what has a fixed shape: a number, an array, and a dict of them. `loose` parts come as ever."""

    def __init__(self, identity: int = 0, length: int = 2) -> None:
        info = DictNode(
            (("discount", Leaf(F32, ())), ("place", Leaf(F64, (2,))), ("nest", DictNode((("count", Leaf(I64, ())),))))
        )
        self.spec = EnvSpec(observation=Leaf(I64, ()), action=ACTION, info=info)
        self.identity = identity
        self.length = length
        self.t = 0
        self.last: dict[str, Any] = {}

    def info(self):
        self.last = {
            "discount": np.float32(0.5),
            "place": [self.identity, self.t],
            "nest": {"count": self.t},
            "loose": self.t,
        }
        if self.identity == 1:
            del self.last["loose"], self.last["place"]
        return self.last

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.int64(0), self.info()

    def step(self, action):
        self.t += 1
        if action == 9:
            return np.int64(0), 0.0, False, False, {"place": [1, 2, 3]}
        return np.int64(self.t), 1.0, self.t == self.length, False, self.info()

    def keys(self):
        """Keys of the info last returned: the engine must not take any away."""
        return list(self.last)
