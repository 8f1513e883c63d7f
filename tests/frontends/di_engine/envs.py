"""Envs in the shape of DI-engine's, without DI-engine: every result is known beforehand, and they fail on command."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.testing.faulty import OddSignatureError
from stepmill.testing.gates import Gate, wait_at

_serials = itertools.count()


class Timestep(NamedTuple):
    """What a step returns."""

    obs: Any
    reward: Any
    done: Any
    info: Any


class Cursed:
    """Pickles, and raises when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _raise, ()


def _raise() -> None:
    raise RuntimeError("torn")


class DingEnv:
    """Counts: obs float32 [3] = (identity, episode, t), reward the action as float32 (1,); done at step `length`.

    What `reset(stat=...)` and `step(action)` do by name:
        "error" raises · "odd" raises an exception with a constructor of its own · "once" raises every other time ·
        "even" raises in the second reset of the env, the fourth, and so on ·
        "die" kills the process · "gate" waits at the gate · "sleep" hangs ·
        "abnormal" marks the timestep · "torn" has an info that cannot be loaded · "info" has one of many types.
    """

    def __init__(self, identity: int = 0, length: int = 3, gate: str = "", **fields: Any) -> None:
        self.identity = identity
        self.length = length
        self.observation_space: Any = spaces.Box(-1, 2**20, (3,), np.float32)
        self.action_space = spaces.Discrete(10)
        self.reward_space = spaces.Box(-1, 9, (1,), np.float32)
        self.serial = (os.getpid(), next(_serials))  # tells one env object from another
        self.pid = os.getpid()
        self.seeds: list[tuple[int, object]] = []
        self.resets: list[object] = []
        self.actions: list[object] = []
        self.is_closed = False
        self.replay_path = ""
        self.figure_path = ""
        self._gate = gate
        self._episode = -1
        self._t = 0
        self._had_error = True
        self.__dict__.update(fields)

    # ---- DI-engine's interface

    def seed(self, seed: int, dynamic_seed: object = "not given") -> None:
        if seed == 666:
            raise ValueError("a bad seed")
        self.seeds.append((seed, dynamic_seed))

    def reset(self, stat: str = "", **kwargs: Any) -> Any:
        self.resets.append({"stat": stat, **kwargs})
        if self.is_closed:
            raise RuntimeError("reset of a closed env")
        self._act(stat)
        self._episode += 1
        self._t = 0
        return self._obs()

    def step(self, action: Any) -> Timestep:
        self.actions.append(action)
        self._t += 1
        name = action if isinstance(action, str) else ""
        if name == "abnormal":
            return Timestep(None, None, True, {"abnormal": True})
        self._act(name)
        info: Any = {}
        if name == "torn":
            info = {"cursed": Cursed()}
        if name == "info":
            info = {"1st": 1, "a.b": np.float32(2), "name": "text", "list": [1, "x"]}
        reward = np.array([0 if name else np.asarray(action).reshape(-1)[0]], np.float32)
        return Timestep(self._obs(), reward, self._t >= self.length, info)

    def close(self) -> None:
        self.is_closed = True

    def enable_save_replay(self, replay_path: str) -> None:
        self.replay_path = replay_path

    def enable_save_figure(self, figure_path: str) -> None:
        self.figure_path = figure_path

    def reward_shaping(self, transitions: list[Any]) -> list[Any]:
        return [self.identity, *transitions]

    def render(self, mode: str = "rgb_array") -> NDArray[np.uint8]:
        return np.full((2, 2, 3), self.identity + (100 if mode == "depth_array" else 0), np.uint8)

    # ---- beside it

    def user_defined(self) -> int:
        return self.identity

    def _obs(self) -> NDArray[np.float32]:
        return np.array([self.identity, self._episode, self._t], np.float32)

    def _act(self, name: str) -> None:
        if name == "error":
            raise RuntimeError(f"env {self.identity} fails on purpose")
        if name == "odd":
            raise OddSignatureError(7, detail="odd")
        if name == "even" and len(self.resets) % 2 == 0:
            raise RuntimeError("every other reset fails")
        if name == "once":
            self._had_error = not self._had_error
            if not self._had_error:
                raise RuntimeError("the first time it fails")
        if name == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "gate":
            wait_at(self._gate)
        if name == "sleep":
            time.sleep(1000)


class LateSpaces(DingEnv):
    """Knows its spaces only after a reset, as many of DI-engine's envs do."""

    def __init__(self, identity: int = 0, length: int = 3) -> None:
        super().__init__(identity, length)
        self._box = self.observation_space
        del self.observation_space

    def reset(self, stat: str = "", **kwargs: Any) -> Any:
        self.observation_space = self._box
        return super().reset(stat, **kwargs)


class TreeEnv(DingEnv):
    """Observations are a dict, of any depth; rewards have several numbers."""

    def __init__(self, identity: int = 0, length: int = 3) -> None:
        super().__init__(identity, length)
        self.observation_space = spaces.Dict(
            {
                "pose": spaces.Dict({"place": spaces.Box(-9, 99, (2,), np.float16), "turn": spaces.Discrete(9)}),
                "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 255, (2, 2), np.uint8))),
            }
        )

    def _obs(self) -> Any:
        place = np.array([self.identity, self._t], np.float16)
        pair = (np.array([1, 0], np.int8), np.full((2, 2), self._t, np.uint8))
        return {"pose": {"place": place, "turn": np.int64(self._t)}, "pair": pair}

    def step(self, action: Any) -> Timestep:
        return super().step(action)._replace(reward=np.array([1.5, self._t + 1], np.float32))


class ObjectEnv(DingEnv):
    """Observations, rewards and infos are objects that no space describes."""

    def __init__(self, identity: int = 0, length: int = 3) -> None:
        super().__init__(identity, length)
        self.observation_space = None

    def _obs(self) -> Any:
        return {"words": ["t", self._t], "set": {self.identity}}

    def step(self, action: Any) -> Timestep:
        return super().step(action)._replace(reward=7, info=[{"agent": 0}, {"agent": 1}])


def ding_envs(num_envs: int, length: int = 3, **fields: Any) -> list[Callable[[], DingEnv]]:
    """Return env_fns of envs 0 … num_envs-1."""
    return [partial(DingEnv, i, length, **fields) for i in range(num_envs)]


@contextlib.contextmanager
def opened_later(gate: Gate, count: int = 1) -> Iterator[None]:
    """Open a gate for `count` envs a while after they have come to it, from another process: this one may only wait."""
    process = multiprocessing.get_context("fork").Process(target=_open_later, args=(gate, count))
    process.start()
    yield
    process.join()


def _open_later(gate: Gate, count: int) -> None:
    gate.wait_arrivals(count)
    time.sleep(0.2)  # so that a deadline passes first
    gate.open(count)
