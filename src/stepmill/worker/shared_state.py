"""Finds that a step or reset of an env changes what other envs of the same process see, and logs this once.

    make_loop(…, shares=…) ──► StateWatch ──► WatchedEnv, in place of each env, until it has had NUM_COMMANDS commands

The loop calls the methods `step` and `reset` that `WatchedEnv` has. They read the state of the process before and after those of the
env. After its last watched command the loop is given the env's own methods, so that later commands cost nothing.

A change alone is no sign of trouble: modules are imported, caches are filled, and flags are set once. A name counts if it is changed
twice, and a generator if two envs use it.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import random
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from stepmill.worker.signals import read_handler

NUM_COMMANDS = 8  # of each env
MAX_ENVS = 16  # of the worker; more make the watch longer, and hardly better
MAX_ARRAY_BYTES = 4096
_MT19937_BYTES = 4 * 625  # 624 words, and the place among them
_GENERATOR = "generator of"
_SIGNALS = {each.name: int(each) for each in signal.Signals}
_SIMPLE = (int, float, str, bool, tuple, type(None))

State: TypeAlias = dict[str, Mapping[Any, object]]  # by kind, and in it by name


class Shares(enum.Enum):
    """Which state of the process a loop watches."""

    NOTHING = enum.auto()
    ALL = enum.auto()
    PATHS_AND_VARIABLES = enum.auto()  # other threads also draw from generators, and set globals

    @classmethod
    def of(cls, num_envs: int, *, is_watched: bool, has_threads: bool = False) -> Shares:
        """Return what to watch in one thread of a process with this many envs. `has_threads`: other threads run some of them."""
        if not is_watched or num_envs < 2:
            return cls.NOTHING
        return cls.PATHS_AND_VARIABLES if has_threads else cls.ALL


class StateWatch:
    """Watches the envs of one loop, in the thread of the loop."""

    def __init__(self, env_ids: Sequence[int], envs: Sequence[object], inner: Sequence[object], shares: Shares) -> None:
        """Watch `envs`. `inner` has the env inside the wrappers of each."""
        self.envs: list[object] = [*envs]
        self.refresh: Callable[[], object] = lambda: None  # lets the loop read `step` and `reset` of its envs again
        self._shares = shares
        self._changed_by: dict[tuple[str, str | bytes], list[int]] = defaultdict(list)
        self._watched: list[WatchedEnv] = []
        spaces = [_namespaces(env) for env in inner]
        num_users = Counter(space for own in spaces for space in own)
        for at, env_id in enumerate(env_ids[:MAX_ENVS]):
            shared = {space: names for space, names in spaces[at].items() if num_users[space] > 1}
            self._watched.append(WatchedEnv(env_id, envs[at], self, shared))
            self.envs[at] = self._watched[-1]

    def read(self, spaces: Mapping[str, Mapping[str, object]]) -> State:
        """Return the state of the process, with the simple values of these namespaces."""
        state: State = {"environment variable": dict(getattr(os.environ, "_data", {}))}  # os.environ itself takes 60 us
        try:
            state["working directory"] = {"": os.getcwd()}
        except OSError:  # it was deleted
            state["working directory"] = {}
        if self._shares is Shares.ALL:
            state["handler of"] = {name: read_handler(number) for name, number in _SIGNALS.items()}
            state[_GENERATOR] = _read_generators()
            for space, names in spaces.items():
                state[f"global variable {space}"] = {name: _simple(value) for name, value in names.items()}
        return state

    def compare(self, before: State, after: State, env_id: int) -> None:
        """Note what an env has changed, and log the first change that matters."""
        for kind, name in _changes(before, after):
            env_ids = self._changed_by[kind, name]
            env_ids.append(env_id)
            users = {*env_ids}
            if len(users if kind == _GENERATOR else env_ids) > 1:
                self._log(kind, name, sorted(users))
                return

    def _log(self, kind: str, name: str | bytes, env_ids: Sequence[int]) -> None:
        who = f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {env_ids}"
        logging.getLogger("stepmill").warning(
            "stepmill: steps or resets of %s change the %s, which the envs of a process share, so that the results of one may depend "
            "on the others; give each env its own process with backend='process', envs_per_worker=1 (any value of "
            "envs_per_worker ends this warning)",
            who, f"{kind}{'.' if kind.startswith('global') else ' '}{os.fsdecode(name)}".strip(),
        )  # fmt: skip
        for env in self._watched:
            env.num_left = 0
        self.refresh()


class WatchedEnv:
    """An env for the loop."""

    def __init__(self, env_id: int, env: Any, watch: StateWatch, spaces: Mapping[str, Mapping[str, object]]) -> None:
        self.num_left = NUM_COMMANDS
        self._env_id, self._env, self._watch, self._spaces = env_id, env, watch, spaces

    @property
    def step(self) -> Callable[..., object]:
        """The method that the loop calls."""
        return self._watch_method(self._env.step)

    @property
    def reset(self) -> Callable[..., object]:
        """The method that the loop calls."""
        return self._watch_method(self._env.reset)

    def _watch_method(self, method: Callable[..., object]) -> Callable[..., object]:
        if not self.num_left:
            return method

        def call(*args: object, **kwargs: object) -> object:
            before = self._watch.read(self._spaces)
            result = method(*args, **kwargs)
            self.num_left = max(0, self.num_left - 1)
            self._watch.compare(before, self._watch.read(self._spaces), self._env_id)
            if not self.num_left:
                self._watch.refresh()
            return result

        return call


def _namespaces(env: object) -> dict[str, Mapping[str, object]]:
    """Return the names of the module of an env's class, and those of the classes of this module that it has, by the names of these."""
    kind = type(env)
    found: dict[str, Mapping[str, object]] = {
        cls.__qualname__: vars(cls) for cls in kind.__mro__ if cls.__module__ == kind.__module__
    }
    for method in (getattr(kind, "reset", None), getattr(kind, "step", None)):
        # A class that was pickled by value is in no module, but its functions have the globals.
        names = getattr(method, "__globals__", None)
        if names is not None:
            found[str(names.get("__name__"))] = names
    return found


def _read_generators() -> dict[str, object]:
    found: dict[str, object] = {"random": random.getstate()}
    # np.random.get_bit_generator() needs NumPy 1.24.
    numpys: object = getattr(getattr(np.random.get_state, "__self__", None), "_bit_generator", None)
    if isinstance(numpys, np.random.MT19937):  # get_state takes 90 us
        found["numpy.random"] = ctypes.string_at(numpys.ctypes.state_address, _MT19937_BYTES)
    read_torch = getattr(sys.modules.get("torch"), "get_rng_state", None)
    if read_torch is not None:
        found["torch"] = read_torch().numpy().tobytes()
    return found


def _changes(before: State, after: State) -> Iterator[tuple[str, str | bytes]]:
    for kind, old in before.items():
        new = after[kind]
        if not _differ(old, new):
            continue
        for name in old.keys() | new.keys():
            is_import = kind == _GENERATOR and name not in old  # of torch
            if not is_import and _differ(old.get(name), new.get(name)):
                yield kind, name


def _simple(value: object) -> object:
    if isinstance(value, np.ndarray) and value.nbytes <= MAX_ARRAY_BYTES and not value.dtype.hasobject:
        return value.tobytes()
    return value if type(value) in _SIMPLE else None


def _differ(old: object, new: object) -> bool:
    try:
        return bool(old != new)
    except Exception:  # a comparison of the user's class
        return False
