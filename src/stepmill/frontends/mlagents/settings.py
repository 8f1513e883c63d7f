"""The settings of a manager: options, engine settings, restart quotas, and parameters of the env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, TypedDict

import numpy as np

from stepmill.envs.unity import PAYLOAD_BYTES
from stepmill.frontends.mlagents.channels import EngineConfig, check_resolution
from stepmill.spec.errors import UsageError
from stepmill.spec.options import Context
from stepmill.spec.records import refuse_unknown

NO_LIMIT = -1


@dataclass(frozen=True)
class RestartLimits:
    """How often each worker may be restarted after a crash. -1 means no limit.

    Attributes:
        max_lifetime_restarts: the limit while the manager exists.
        restarts_rate_limit_n: the limit within any `restarts_rate_limit_period_s` seconds.
    """

    max_lifetime_restarts: int = 10
    restarts_rate_limit_n: int = 1
    restarts_rate_limit_period_s: float = 60.0


class OnCrash(str, Enum):
    """The effect of a worker's crash on the others."""

    GO_ON = "go_on"  #: Only the episodes of the crashed worker end, as interrupted.
    RESET_ALL = "reset_all"  #: All episodes are dropped and all envs reset, as in the original.


class ManagerKeywords(TypedDict, total=False):
    """The fields of `ManagerOptions` as keyword arguments."""

    restarts: RestartLimits | None
    on_crash: OnCrash | Literal["go_on", "reset_all"]
    is_deterministic: bool
    seed: int | None
    channel_factory: Callable[[int], Sequence[Any]] | None
    context: Context | Literal["forkserver", "fork", "spawn"]
    step_timeout_s: float | None
    reset_timeout_s: float | None
    start_timeout_s: float
    leave_timeout_s: float
    drain_timeout_s: float
    close_timeout_s: float
    payload_bytes: int
    timers_every: int


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """Options that say how a manager runs its workers. SubprocessEnvManager also takes each option by keyword.

    Attributes:
        restarts: the quotas of restarts; None takes those of the run options, or the defaults.
        on_crash: the effect of a crash on the other workers.
        is_deterministic: whether a step waits for all workers and returns results in their order, so that runs with the
            same seeds are equal. Otherwise a step returns as soon as one worker has a result.
        seed: worker i seeds its global generators with seed + i, and passes this number to an env_factory that takes
            `seed`.
        channel_factory: `channel_factory(worker_id)` returns the user's side channels. The workers call it.
        context: how worker processes start.
        step_timeout_s, reset_timeout_s: a worker whose env takes longer, in seconds, is ended, which counts as a crash.
            None means no limit. The env may have its own timeouts.
        start_timeout_s: the time limit for building all envs, in seconds.
        leave_timeout_s: how many seconds closing an env that has failed may take before its process is ended.
        drain_timeout_s: how many seconds a reset waits for steps to finish.
        close_timeout_s: how many seconds `close` waits for envs to be closed before their processes are ended.
        payload_bytes: the space in shared memory for one step of one worker. Larger results take a slower path.
        timers_every: one in this many steps of a worker is timed; 0 times none.
    """

    restarts: RestartLimits | None = None
    on_crash: OnCrash = OnCrash.GO_ON
    is_deterministic: bool = False
    seed: int | None = None
    channel_factory: Callable[[int], Sequence[Any]] | None = None
    context: Context = Context.FORKSERVER
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None
    start_timeout_s: float = 120.0
    leave_timeout_s: float = 10.0
    drain_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    payload_bytes: int = PAYLOAD_BYTES
    timers_every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_crash", OnCrash(self.on_crash))
        object.__setattr__(self, "context", Context(self.context))


def merge_manager_options(options: ManagerOptions | None, keywords: ManagerKeywords) -> ManagerOptions:
    """Return options with the fields that are given by keyword replaced.

    Raises:
        UsageError: a keyword is not a field of ManagerOptions. The text names the nearest field.
    """
    refuse_unknown(keywords, [each.name for each in fields(ManagerOptions)], "an option of stepmill")
    return replace(options or ManagerOptions(), **keywords)  # type: ignore[arg-type]  # its __post_init__ makes enums


def read_engine(given: Any) -> EngineConfig:
    """Return the engine configuration of `given`.

    Args:
        given: an EngineConfig (anything with its fields), ML-Agents' RunOptions (anything with `engine_settings`), or None.
    Raises:
        UnitySideChannelException: a width without a height, or the other way round.
        UsageError: `given` is none of these.
    """
    engine = getattr(given, "engine_settings", given)
    if engine is None:
        return EngineConfig()
    if not hasattr(engine, "time_scale"):
        raise UsageError(
            f"engine_configuration is a {type(engine).__name__}; give an EngineConfig, RunOptions, or None for the defaults"
        )
    # The first generation has no capture_frame_rate, so None is not sent.
    config = EngineConfig(*(getattr(engine, name, None) for name in EngineConfig._fields))
    check_resolution(config.width, config.height)
    return config


def read_limits(given: Any) -> RestartLimits:
    """Return the quotas of ML-Agents' RunOptions (anything with `env_settings`). Those that it lacks have their defaults."""
    quotas, default = getattr(given, "env_settings", None), RestartLimits()
    return RestartLimits(
        **{each.name: getattr(quotas, each.name, getattr(default, each.name)) for each in fields(default)}
    )


# ---- parameters of the env ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConstantSettings:
    """A parameter with a constant value."""

    value: float = 0.0
    seed: int = 0

    def apply(self, key: str, env_channel: Any) -> None:
        """Send the parameter under the name `key`."""
        env_channel.set_float_parameter(key, self.value)


@dataclass(frozen=True)
class UniformSettings:
    """A parameter that the env draws from a uniform distribution over a range."""

    min_value: float = 0.0
    max_value: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range(self.min_value, self.max_value)

    def apply(self, key: str, env_channel: Any) -> None:
        """Send the parameter under the name `key`."""
        env_channel.set_uniform_sampler_parameters(key, self.min_value, self.max_value, self.seed)


@dataclass(frozen=True)
class GaussianSettings:
    """A parameter that the env draws from a normal distribution."""

    mean: float = 1.0
    st_dev: float = 1.0
    seed: int = 0

    def apply(self, key: str, env_channel: Any) -> None:
        """Send the parameter under the name `key`."""
        env_channel.set_gaussian_sampler_parameters(key, self.mean, self.st_dev, self.seed)


@dataclass(frozen=True)
class MultiRangeUniformSettings:
    """A parameter that the env draws from a uniform distribution over several ranges."""

    intervals: Sequence[tuple[float, float]]
    seed: int = 0

    def __post_init__(self) -> None:
        for interval in self.intervals:
            _check_range(*interval)

    def apply(self, key: str, env_channel: Any) -> None:
        """Send the parameter under the name `key`."""
        intervals = [tuple(interval) for interval in self.intervals]
        env_channel.set_multirangeuniform_sampler_parameters(key, intervals, self.seed)


def _check_range(low: float, high: float) -> None:
    if low > high:
        raise UsageError(f"a sampler's range from {low} to {high} is empty; give the smaller bound first")


def checked_parameters(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return env parameters as a dict of floats and samplers. None gives an empty dict.

    Raises:
        UsageError: a value is neither a number nor a sampler.
    """
    checked: dict[str, Any] = {}
    for name, value in (config or {}).items():
        if isinstance(value, (int, float, np.integer, np.floating)):
            checked[name] = float(value)
        elif callable(getattr(value, "apply", None)):
            checked[name] = value
        else:
            raise UsageError(
                f"env parameter {name!r} is a {type(value).__name__}; give a number, or a sampler such as UniformSettings"
            )
    return checked
