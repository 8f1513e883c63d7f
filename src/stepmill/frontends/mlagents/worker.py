"""A manager's worker: one Unity env with its side channels, in a process of its own.

    command   step    (actions by behaviour, parameters, calls)
              reset   options {"parameters": …, "calls": …} or {"leave": seconds}
    answer    ("step", results, stats, news | None)
              ("failed", failure)                      the env raised; it is of no use any more

An exception is an answer like any other, so that it reaches the learner as itself. Whether the env is built anew is
decided there: a worker that is told to leave closes its env and ends its process, which frees ports and files for sure.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepmill import timers
from stepmill.envs.unity import (
    PAYLOAD_BYTES,
    Generation,
    UnityEnv,
    behavior_names,
    generation_of,
    read_results,
    read_spec,
    set_agent_actions,
)
from stepmill.frontends.mlagents import channels
from stepmill.frontends.mlagents.failures import pack
from stepmill.frontends.mlagents.optional_imports import load
from stepmill.frontends.mlagents.players import find_players
from stepmill.frontends.mlagents.specs import pack_spec

logger = logging.getLogger("stepmill.mlagents")

EnvFactory = Callable[..., Any]
"""`env_factory(worker_id, side_channels)`, or with a keyword `seed`, returns a BaseEnv."""

ChannelFactory = Callable[[int], Sequence[Any]]


@dataclass(frozen=True)
class WorkerMaker:
    """An env_fn for `Pool`: everything that a worker needs to make its env.

    Attributes:
        env_factory: makes the env.
        worker_id: of this worker.
        engine: what is queued on the engine's channel before the env is made.
        seed: of this worker's global generators, and handed to an env_factory that takes it; None is neither.
        channel_factory: makes channels of the user's own.
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
    """A worker's side channels: mlagents_envs' own where it is installed, since their bytes depend on its version."""

    def __init__(self, maker: WorkerMaker) -> None:
        self.floats = _make("float_properties_channel", channels.FloatPropertiesChannel)
        self.engine = _make("engine_configuration_channel", channels.EngineConfigurationChannel)
        self.parameters = _make("environment_parameters_channel", channels.EnvironmentParametersChannel)
        self.stats = _make("stats_side_channel", channels.StatsSideChannel)
        _configure(self.engine, maker.engine)
        own = () if maker.channel_factory is None else maker.channel_factory(maker.worker_id)
        self.all: list[Any] = [self.floats, self.engine, self.parameters, self.stats, *own]

    def find(self, channel_id: object) -> Any:
        """Return the channel of an id, or of the class of that name."""
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
    """What the engine's loop steps for a manager."""

    def __init__(self, maker: WorkerMaker) -> None:
        self.env: Any = None
        self.payload_bytes = maker.payload_bytes
        self.generation = Generation.BEHAVIORS
        self._told: tuple[list[str], dict[str, float]] = ([], {})
        self._sent: dict[str, float] = {}  # what was set on the parameters' channel, which cannot be asked
        self._failure: dict[str, Any] | None = None
        try:
            self.channels = Channels(maker)
            self.env = _make_env(maker, self.channels.all)
            self.generation = generation_of(self.env)
        except Exception as exc:  # told by the first reset, as itself
            self._failure = pack(exc, "construct")

    # ---- what the loop calls ----------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, object]]:
        """Reset the env, after what was sent along; or leave."""
        order: Mapping[str, Any] = options or {}
        if "leave" in order:
            self._leave(order["leave"])
        self._prepare("reset", order.get("parameters", {}), order.get("calls", ()))
        return self._answer("reset", {}), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, object]]:
        """Step the env, after what was sent along."""
        actions, parameters, calls = action
        self._prepare("step", parameters, calls)
        return self._answer("step", actions), 0.0, False, False, {}

    def _prepare(self, phase: str, parameters: Mapping[str, Any], calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        if self._failure is not None:
            return
        try:
            for name, value in parameters.items():
                self.set_parameter(name, value)
            for method, args in calls:
                getattr(self, method)(*args)
        except Exception as exc:
            self._failure = pack(exc, phase)

    def _answer(self, phase: str, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        if self._failure is not None:
            return "failed", self._failure
        try:
            with timers.timed(f"env.{phase}"):
                self._do(phase, actions)
            results = read_results(self.env, self.generation)
            return "step", results, self._stats(), self._news(list(results))
        except Exception as exc:
            self._failure = pack(exc, phase)
            return "failed", self._failure

    def _do(self, phase: str, actions: Mapping[str, Any]) -> None:
        if phase == "step":
            set_agent_actions(self.env, actions)
            self.env.step()
        else:
            self.env.reset()

    def _stats(self) -> dict[str, list[tuple[float, int]]]:
        stats = self.channels.stats.get_and_reset_stats()
        return {name: [(value, method.value) for value, method in values] for name, values in stats.items()}

    def _news(self, names: list[str]) -> dict[str, Any] | None:
        """Return what the learner is told only when it changes, so that it never has to ask a worker that is at work."""
        properties = {**self._sent, **self.channels.floats.get_property_dict_copy()}
        if (names, properties) == self._told:
            return None
        self._told = (names, properties)
        return self.news()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def news(self) -> dict[str, Any]:
        """Return specs of behaviours, packed, float properties, and players; the first two only if there is an env."""
        specs, properties = {}, {}
        if self._failure is None:
            names = behavior_names(self.env, self.generation)
            specs = {name: pack_spec(read_spec(self.env, self.generation, name)) for name in names}
            properties = {**self._sent, **self.channels.floats.get_property_dict_copy()}
        return {"specs": specs, "properties": properties, "players": find_players()}

    def set_parameter(self, name: str, value: Any) -> None:
        """Queue a parameter: a number as what the env's generation has for it, or a sampler."""
        if not isinstance(value, float):
            value.apply(name, self.channels.parameters)
        elif self.generation is Generation.GROUPS:
            self.channels.floats.set_property(name, value)
        else:
            self.channels.parameters.set_float_parameter(name, value)
            self._sent[name] = value

    def call_channel(self, channel: object, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a side channel, which is named by its id or its class."""
        return getattr(self.channels.find(channel), method)(*args, **kwargs)

    def start_training(self, behavior_name: str, settings: Any) -> None:
        """Tell every channel that wants to know that training of a behaviour has begun."""
        for channel in self.channels.all:
            tell = getattr(channel, "training_started", None)
            if callable(tell):
                tell(behavior_name, settings)

    def library_timers(self) -> dict[str, Any] | None:
        """Return the timer tree of mlagents_envs, if the env has brought it along."""
        library = sys.modules.get("mlagents_envs.timers")
        tree: dict[str, Any] | None = None if library is None else library.get_timer_tree()
        return tree

    # ---- the end ----------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """Close the env, as a call: the manager gives it more time than the end of a pool would."""
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


def _make_env(maker: WorkerMaker, side_channels: list[Any]) -> Any:
    if maker.seed is None:
        return maker.env_factory(maker.worker_id, side_channels)
    random.seed(maker.seed)
    np.random.seed(maker.seed % 2**32)  # noqa: NPY002 - what envs of that age draw from
    if _takes_seed(maker.env_factory):
        return maker.env_factory(maker.worker_id, side_channels, seed=maker.seed)
    return maker.env_factory(maker.worker_id, side_channels)


def _takes_seed(factory: EnvFactory) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    return "seed" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
