"""Envs whose results are functions of their whole history, and fail on demand; the model calls the same functions."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pettingzoo import ParallelEnv

import stepmill
from stepmill.kernels.rng import WORDS, Rng, seed_words

STEP, BAD, KILL, RAISE, HANG, SCRIBBLE, UNREADABLE = range(7)
"""The lowest three bits of an action. Those of FAILURES make the env fail; if the next bit is 1 only once, in whatever process.

SCRIBBLE: native code of the env overwrites memory of other workers. UNREADABLE: the info has a value that cannot be unpickled.
"""
FAILURES = (BAD, KILL, RAISE, HANG, SCRIBBLE)
ONCE = 8
HANG_S = 600.0
IDENTITY, SEED, COUNT, CLOCK, MIX, LEVEL, BUMPS = range(7)
"""The columns of an observation."""
NUM_COLUMNS = 7
AGENTS = ("left", "right")
_MODULUS = 2**31
Obs = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where an env is in an episode.

    Attributes:
        obs: object, seed, number of resets since that seed, step, mix of all actions, level, bumps.
        length: number of steps of the episode.
        total: sum of the rewards.
    """

    obs: Obs
    length: int
    total: float = 0.0

    @property
    def clock(self) -> int:
        return self.obs[CLOCK]

    @property
    def reward(self) -> float:
        """The reward of the step that led here."""
        return self.obs[MIX] % 4096 + 0.25 * self.clock

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether the episode is terminated, and truncated."""
        is_over = self.clock >= self.length
        return is_over and self.length % 2 == 0, is_over and self.length % 2 == 1

    @property
    def info(self) -> dict[str, Any]:
        """The info of the step that led here."""
        odd = {"odd": f"step {self.clock}"} if self.clock % 2 else {}
        return {"mix": self.obs[MIX], "where": {"clock": self.clock}, **odd}


def first_place(
    identity: int, seed: int, count: int, bonus: int, level: int, bumps: int = 0, length: int | None = None
) -> Place:
    """Return where an episode begins; its length is drawn unless it is given."""
    mix = (seed * 7919 + count * 104729 + identity * 31 + bonus) % _MODULUS
    return Place((identity, seed, count, 0, mix, level, bumps), length or 1 + mix % 6)


def next_place(place: Place, action: int, level: int, bumps: int = 0) -> Place:
    """Return where a step leads."""
    identity, seed, count, clock, mix, _, _ = place.obs
    moved = replace(place, obs=(identity, seed, count, clock + 1, (mix * 31 + action + level) % _MODULUS, level, bumps))
    return replace(moved, total=place.total + moved.reward)


def fail(verb: int, hang_s: float = HANG_S) -> None:
    """Kill the process, raise, scribble or hang. A hang ends after `hang_s`, because threads cannot be killed."""
    if verb == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == RAISE:
        raise ValueError("this env raises, as its action says")
    if verb == SCRIBBLE:
        scribble()
    if verb == HANG:
        time.sleep(hang_s)


def scribble() -> None:
    """Write zeros to the parts of the slab that belong to other workers, as a stray pointer could."""
    faulthandler.disable()  # it would print a page to stderr
    with open("/proc/self/maps", encoding="utf-8") as file:
        parts = [line.split()[:2] for line in file if "memfd:stepmill-slab" in line]
    for addresses, permissions in parts:
        start, stop = (int(address, 16) for address in addresses.split("-"))
        if "w" not in permissions:
            ctypes.memset(start, 0, stop - start)
    raise RuntimeError("this process can write to the whole slab, or was not ended for a write that is not allowed")


class Unreadable:
    """A value that can be pickled and that raises when it is unpickled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _refuse, (self._number,)


def _refuse(number: int) -> None:
    kinds: tuple[type[BaseException], ...] = (ValueError, SystemExit, KeyboardInterrupt)
    raise kinds[number % len(kinds)]("this value cannot be read")


class HistoryEnv(gymnasium.Env[Any, Any]):
    """Its places are those of the functions above. `length`: of all episodes; None: each has its own."""

    observation_space = gymnasium.spaces.Box(-(2**62), 2**62, (NUM_COLUMNS,), np.int64)
    action_space = gymnasium.spaces.Discrete(1 << 40)

    def __init__(self, identity: int, folder: str, length: int | None = None, hang_s: float = HANG_S) -> None:
        self.identity, self._folder = identity, Path(folder)
        self._length, self._hang_s = length, hang_s
        self.level = self._bumps = 0
        self._seed, self._count = -1, 0
        self.place = first_place(identity, -1, 0, 0, 0, 0, length)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        options = options or {}
        if self._fails(options.get("fault", STEP)):
            return np.zeros(NUM_COLUMNS + 1, np.int64), {}
        self._seed, self._count = (self._seed, self._count + 1) if seed is None else (seed, 0)
        bonus = options.get("bonus", 0)
        self.place = first_place(self.identity, self._seed, self._count, bonus, self.level, self._bumps, self._length)
        return self.peek(), {"given": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._fails(int(action)):
            return self.peek()[:1], 0.0, False, False, {}
        self.place = next_place(self.place, int(action), self.level, self._bumps)
        page = {"page": Unreadable(self.place.clock)} if action % ONCE == UNREADABLE else {}
        return self.peek(), self.place.reward, *self.place.ends, {**self.place.info, **page}

    def peek(self) -> Any:
        """Return the newest observation."""
        return np.array(self.place.obs, np.int64)

    def bump(self) -> tuple[int, int]:
        """Count a call; return the identity and the count. A reset does not change the count."""
        self._bumps += 1
        return self.identity, self._bumps

    def stumble(self) -> None:
        """Raise."""
        raise ValueError("this call fails")

    def render(self) -> Any:
        return self.peek()

    def _fails(self, action: int) -> bool:
        """Fail if the action says so; return whether the output must be a bad one."""
        verb = action % ONCE
        if verb not in FAILURES or ((action & ONCE) and not self._take(action)):
            return False
        fail(verb, self._hang_s)
        return True

    def _take(self, action: int) -> bool:
        try:
            (self._folder / f"{self.identity}-{action}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class HistoryAgents(ParallelEnv):  # type: ignore[misc,type-arg]  # pettingzoo has no types
    """Two agents that do the same: the second one's numbers are one more. Both take the first one's action."""

    metadata = {"name": "history"}

    def __init__(self, identity: int, folder: str) -> None:
        self.env = HistoryEnv(identity, folder)
        self.possible_agents = list(AGENTS)
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        return self.env.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = self.env.reset(seed=seed, options=options)
        self.agents = list(AGENTS)
        return self._each(obs), {AGENTS[0]: info}

    def step(self, actions: dict[str, Any]) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(actions[AGENTS[0]])
        self.agents = [] if terminated or truncated else list(AGENTS)
        ends = dict.fromkeys(AGENTS, terminated), dict.fromkeys(AGENTS, truncated)
        return self._each(obs), self._each(reward), *ends, {AGENTS[0]: info}

    def render(self) -> Any:
        return self.env.render()

    @property
    def level(self) -> int:
        return self.env.level

    @level.setter
    def level(self, value: int) -> None:
        self.env.level = value

    def peek(self) -> Any:
        return self.env.peek()

    def stumble(self) -> None:
        self.env.stumble()

    def _each(self, value: Any) -> dict[str, Any]:
        return {agent: value + number for number, agent in enumerate(AGENTS)}


@stepmill.kernel(
    observation_space=HistoryEnv.observation_space,
    action_space=HistoryEnv.action_space,
    state=np.dtype([("tag", "i8"), ("clock", "i8"), ("mix", "i8")]),
    infos=np.dtype([("mix", "i8")]),
)
class history_kernel:  # noqa: N801
    """The same as a kernel, which knows neither its number nor its seed: obs has a number that is drawn in their place."""

    def reset(self: Any, rng: Any, obs: Any, info: Any) -> None:
        self.tag = rng.integers(0, 2147483648)
        self.clock = 0
        self.mix = self.tag
        obs[0] = -1
        obs[1] = self.tag
        obs[2] = -1
        obs[3] = 0
        obs[4] = self.mix
        obs[5] = 0
        obs[6] = 0

    def step(self: Any, action: Any, rng: Any, obs: Any, info: Any) -> tuple[float, bool, bool]:
        if action % 8 != 0:
            raise ValueError("this env raises, as its action says")
        self.clock += 1
        self.mix = (self.mix * 31 + action) % 2147483648
        length = 1 + self.tag % 6
        obs[0] = -1
        obs[1] = self.tag
        obs[2] = -1
        obs[3] = self.clock
        obs[4] = self.mix
        obs[5] = 0
        obs[6] = 0
        info.mix = self.mix
        is_over = self.clock >= length
        return self.mix % 4096 + 0.25 * self.clock, is_over and length % 2 == 0, is_over and length % 2 == 1


def first_of_kernel(seed: int, count: int) -> Place:
    """Return where episode `count` since a seed begins in the kernel."""
    words = np.zeros(WORDS, np.uint64)
    seed_words(words, seed)
    rng = Rng(words)
    tag = [rng.integers(0, _MODULUS) for _ in range(count + 1)][-1]
    return Place((-1, tag, -1, 0, tag, 0, 0), 1 + tag % 6)


def env_fns(kind: str, num_objects: int, mode: str, folder: str) -> list[Callable[[], Any]]:
    """Return the env functions of a pool of "single", "batched" (two rows each), "agents" or "kernel" envs."""
    if kind == "kernel":
        return [history_kernel] * num_objects
    if kind == "batched":
        rows = [[partial(HistoryEnv, 2 * number + row, folder) for row in range(2)] for number in range(num_objects)]
        return [partial(SyncVectorEnv, own, autoreset_mode=AutoresetMode(mode)) for own in rows]
    make = HistoryAgents if kind == "agents" else HistoryEnv
    return [partial(make, number, folder) for number in range(num_objects)]
