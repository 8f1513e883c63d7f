"""The worker of the engine, which runs one Unity env with its side channels in a process.

    command   step    (actions by behaviour, parameters, calls)
              reset   options {"parameters": …, "calls": …} or {"leave": seconds}
    result    ("step", results, stats, description | None)
              ("failed", failure)                      the env raised, and is not used again

An exception is sent as a result, so that the learner can raise it unchanged. The learner decides whether the env is
rebuilt. The command "leave" makes the worker close its env and end its process, which frees ports and files.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepmill import timers
from stepmill.envs.unity import (
    PAYLOAD_BYTES,
    Generation,
    UnityEnv,
    generation_of,
    read_results,
    read_specs,
    set_agent_actions,
)
from stepmill.frontends.mlagents import channels
from stepmill.frontends.mlagents.failures import load, pack
from stepmill.spec.errors import UsageError
from stepmill.worker.process_stat import read_stat

logger = logging.getLogger("stepmill.mlagents")

EnvFactory = Callable[..., Any]
"""`env_factory(worker_id, side_channels)`, or with a keyword `seed`, returns a BaseEnv."""

ChannelFactory = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class WorkerMaker:
    """An env_fn for `Pool` that builds a UnityWorker.

    Attributes:
        env_factory: the function that builds the env.
        worker_id: the id of the worker, which is passed to the factories.
        engine: the settings that are queued on the engine's channel before the env is built.
        seed: the seed of this worker's global generators, and of an env_factory that takes it; None means no seed.
        channel_factory: the function that makes the user's side channels.
        payload_bytes: the space in shared memory for the agents of one step.
    """

    env_factory: EnvFactory
    worker_id: int
    engine: channels.EngineConfig
    seed: int | None = None
    channel_factory: ChannelFactory | None = None
    payload_bytes: int = PAYLOAD_BYTES

    def __call__(self) -> UnityWorker:
        return UnityWorker(self)


class Channels:
    """A worker's side channels. They are mlagents_envs' if it is installed, because their bytes depend on its version."""

    def __init__(self, maker: WorkerMaker) -> None:
        self.floats = _make("float_properties_channel", channels.FloatPropertiesChannel)
        self.engine = _make("engine_configuration_channel", channels.EngineConfigurationChannel)
        self.parameters = _make("environment_parameters_channel", channels.EnvironmentParametersChannel)
        self.stats = _make("stats_side_channel", channels.StatsSideChannel)
        self.sent: dict[str, float] = {}  # numbers sent on the parameters' channel, which cannot be read back
        _configure(self.engine, maker.engine)
        own = () if maker.channel_factory is None else maker.channel_factory(maker.worker_id)
        self.all: list[Any] = [*self._of_the_library(), *own]

    def _of_the_library(self) -> list[Any]:
        """Return the channels that ML-Agents passes to factories. Some versions pass fewer, in another order."""
        if load("side_channel.environment_parameters_channel", "EnvironmentParametersChannel") is not None:
            return [self.parameters, self.engine, self.stats]
        if load("side_channel.engine_configuration_channel", "EngineConfigurationChannel") is not None:
            return [self.floats, self.engine]
        return [self.parameters, self.engine, self.stats, self.floats]

    def set_parameter(self, name: str, value: Any, generation: Generation) -> None:
        """Queue a float or a sampler, on the channel of the env's generation if the env has it.

        Raises:
            UsageError: the value is a sampler, and the env is of the first generation's library.
        """
        has_parameters = self.parameters in self.all
        if not isinstance(value, float):
            if not has_parameters:
                raise UsageError(f"env parameter {name!r} is a sampler, which mlagents-envs 0.15 lacks; give a number")
            value.apply(name, self.parameters)
        elif self.floats in self.all and (generation is Generation.GROUPS or not has_parameters):
            self.floats.set_property(name, value)
        else:
            self.parameters.set_float_parameter(name, value)
            self.sent[name] = value

    @property
    def properties(self) -> dict[str, float]:
        """The float properties by name: those that were sent, and those that the env has set, which count more."""
        return {**self.sent, **self.floats.get_property_dict_copy()}

    def find(self, channel_id: object) -> Any:
        """Return the channel with this id or class name."""
        for channel in self.all:
            if channel.channel_id == channel_id or type(channel).__name__ == channel_id:
                return channel
        raise KeyError(
            f"there is no side channel {channel_id}; there are {[str(each.channel_id) for each in self.all]}"
        )


def _make(module: str, ours: type[Any]) -> Any:
    return (load(f"side_channel.{module}", ours.__name__) or ours)()


def _configure(channel: Any, engine: channels.EngineConfig) -> None:
    known = inspect.signature(channel.set_configuration_parameters).parameters
    given = {name: value for name, value in engine._asdict().items() if value is not None and name in known}
    channel.set_configuration_parameters(**given)


class UnityWorker(UnityEnv):
    """The env that the engine's loop steps for a manager.

    Attributes:
        failure: the packed exception that the env raised; None while the env works.
    """

    def __init__(self, maker: WorkerMaker) -> None:
        self.env: Any = None
        self.payload_bytes = maker.payload_bytes
        self.generation = Generation.BEHAVIORS
        self.failure: dict[str, Any] | None = None
        self._described: tuple[list[str], dict[str, float]] = ([], {})  # the names and properties that the learner has
        try:
            self.channels = Channels(maker)
            self.env = _build_env(maker, self.channels.all)
            self.generation = generation_of(self.env)
        except Exception as exc:  # the first reset raises it in the learner
            self.failure = pack(exc, "construct")

    # ---- methods that the loop calls --------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, object]]:
        """Apply parameters and calls, and reset the env. With the option "leave", end the process instead."""
        command: Mapping[str, Any] = options or {}
        if "leave" in command:
            self._leave(command["leave"])
        self.prepare("reset", command.get("parameters", {}), command.get("calls", ()))
        return self._run("reset", {}), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, object]]:
        """Apply parameters and calls, and step the env."""
        actions, parameters, calls = action
        self.prepare("step", parameters, calls)
        return self._run("step", actions), 0.0, False, False, {}

    def prepare(self, phase: str, parameters: Mapping[str, Any], calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Set parameters and call methods, unless the env has failed. An exception becomes the env's failure."""
        if self.failure is not None:
            return
        try:
            for name, value in parameters.items():
                self.channels.set_parameter(name, value, self.generation)
            for method, args in calls:
                getattr(self, method)(*args)
        except Exception as exc:
            self.failure = pack(exc, phase)

    def _run(self, phase: str, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        if self.failure is not None:
            return "failed", self.failure
        try:
            with timers.timed(f"env.{phase}"):
                set_agent_actions(self.env, actions)
                getattr(self.env, phase)()
            results = read_results(self.env, self.generation)
            return "step", results, self._read_stats(), self._describe_changes(list(results))
        except (Exception, KeyboardInterrupt) as exc:
            self.failure = pack(exc, phase)
            return "failed", self.failure

    def _read_stats(self) -> dict[str, list[tuple[float, int]]]:
        stats = self.channels.stats.get_and_reset_stats()
        return {name: [(value, method.value) for value, method in values] for name, values in stats.items()}

    def _describe_changes(self, names: list[str]) -> dict[str, Any] | None:
        """Return `describe()` if behaviours or properties have changed, so that the learner need not ask a busy worker."""
        properties = self.channels.properties
        if (names, properties) == self._described:
            return None
        self._described = (names, properties)
        return self.describe()

    # ---- methods that the learner calls -----------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the specs of behaviours, the float properties and the players, or without an env only the players."""
        specs, properties = {}, {}
        if self.failure is None:
            properties = self.channels.properties
            # An env may have no specs before its first reset. If it cannot read them then, that reset raises the exception.
            with contextlib.nullcontext() if self._described[0] else contextlib.suppress(Exception):
                specs = read_specs(self.env, self.generation)
        return {"specs": specs, "properties": properties, "players": find_players()}

    def call_channel(self, channel: object, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the side channel with this id or class name."""
        return getattr(self.channels.find(channel), method)(*args, **kwargs)

    def start_training(self, behavior_name: str, settings: Any) -> None:
        """Call `training_started` of each channel that has it."""
        for channel in self.channels.all:
            training_started = getattr(channel, "training_started", None)
            if callable(training_started):
                training_started(behavior_name, settings)

    def library_timers(self) -> dict[str, Any] | None:
        """Return the timer tree of mlagents_envs, if the env has loaded it."""
        library = sys.modules.get("mlagents_envs.timers")
        tree: dict[str, Any] | None = None if library is None else library.get_timer_tree()
        return tree

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close_env(self) -> None:
        """Close the env. This is a call, because the manager allows more time for it than the end of a pool does."""
        self.close()

    def _leave(self, grace_s: float) -> None:
        """Close the env, and end the process in `grace_s` seconds at the latest."""
        guard = threading.Timer(grace_s, os._exit, (1,))
        guard.daemon = True
        guard.start()
        try:
            self.close()
        except BaseException:
            logger.warning("an env raised while it was closed after a failure", exc_info=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def close(self) -> None:
        """Close the env, once."""
        env, self.env = self.env, None
        if env is not None:
            env.close()


def _build_env(maker: WorkerMaker, side_channels: list[Any]) -> Any:
    if maker.seed is None:
        return maker.env_factory(maker.worker_id, side_channels)
    random.seed(maker.seed)
    np.random.seed(maker.seed % 2**32)  # noqa: NPY002 - older envs use NumPy's global generator
    if _takes_seed(maker.env_factory):
        return maker.env_factory(maker.worker_id, side_channels, seed=maker.seed)
    return maker.env_factory(maker.worker_id, side_channels)


def _takes_seed(factory: EnvFactory) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    return "seed" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


# ---- players -----------------------------------------------------------------------------------------------------------

Player = tuple[int, int]
"""A process that an env has started: its pid, and its start time in the kernel's ticks, since pids are reused."""


def find_players() -> list[Player]:
    """Return the child processes of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        stat = _read_stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and stat[0] == os.getpid():
            found.append((int(entry.name), stat[1]))
    return found


def end_players(players: Iterable[Player]) -> None:
    """Kill players that are still running. A hung player would outlive a worker that was killed."""
    for pid, start_time in players:
        with contextlib.suppress(OSError):  # the player has ended
            _kill(pid, start_time)


def _kill(pid: int, start_time: int) -> None:
    pidfd = os.pidfd_open(pid)  # from here on the pid cannot be reused
    try:
        stat = _read_stat(pid)
        if stat is not None and stat[1] == start_time:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _read_stat(pid: int) -> tuple[int, int] | None:
    """Return the parent and the start time of a process, or None if it has ended."""
    try:
        fields = read_stat(f"/proc/{pid}")
    except OSError:
        return None
    return int(fields[1]), int(fields[19])
