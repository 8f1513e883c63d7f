"""Runs many reinforcement-learning environments at once.

    make_vec("CartPole-v1", num_envs=64)       a gymnasium.vector.VectorEnv of envs that Gymnasium knows
    VectorEnv([make_env] * 64)                 the same, of your own envs
    Pool([make_env] * 64, batch_size=16)       envs in the order in which they are ready
    PoolOptions                                all options, which are keywords of the three above
    tune("CartPole-v1", num_envs=64)           finds how to run an env on this machine
    testing.check_env(make_env)                checks that an env is deterministic and fits its spaces

`stepmill.frontends` replaces classes of other libraries, `stepmill.kernels` runs compiled envs, and `stepmill.torch` returns
tensors. All errors are subclasses of `StepmillError`, and say what to do.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from stepmill._version import __version__

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"stepmill runs on Linux only, and this is {sys.platform}; use it in a Linux container or virtual machine."
    )

# The names are loaded on first use, because workers import this package too and must not load Gymnasium.
if TYPE_CHECKING:
    from stepmill import kernels as kernels
    from stepmill import testing as testing
    from stepmill import timers as timers
    from stepmill.envs.registered import register_adapter as register_adapter
    from stepmill.frontends.gymnasium import VectorEnv as VectorEnv
    from stepmill.frontends.gymnasium import make_vec as make_vec
    from stepmill.frontends.rollout import Rollout as Rollout
    from stepmill.frontends.rollout import RolloutBatch as RolloutBatch
    from stepmill.kernels import get_include as get_include
    from stepmill.kernels import kernel as kernel
    from stepmill.observe.tune import tune as tune
    from stepmill.observe.tune_result import TuneResult as TuneResult
    from stepmill.pool.pool import Pool as Pool
    from stepmill.spec.batch import Batch as Batch
    from stepmill.spec.env import EnvSpec as EnvSpec
    from stepmill.spec.errors import BadOutput as BadOutput
    from stepmill.spec.errors import BusyEnvError as BusyEnvError
    from stepmill.spec.errors import ClosedPoolError as ClosedPoolError
    from stepmill.spec.errors import EngineBug as EngineBug
    from stepmill.spec.errors import EnvError as EnvError
    from stepmill.spec.errors import EnvTimeout as EnvTimeout
    from stepmill.spec.errors import LauncherDied as LauncherDied
    from stepmill.spec.errors import MissingExtraError as MissingExtraError
    from stepmill.spec.errors import RecvTimeout as RecvTimeout
    from stepmill.spec.errors import StepmillError as StepmillError
    from stepmill.spec.errors import UsageError as UsageError
    from stepmill.spec.errors import WorkerDied as WorkerDied
    from stepmill.spec.options import AutoresetMode as AutoresetMode
    from stepmill.spec.options import Context as Context
    from stepmill.spec.options import EnvState as EnvState
    from stepmill.spec.options import OnFault as OnFault
    from stepmill.spec.options import PoolOptions as PoolOptions
    from stepmill.spec.options import RetryIn as RetryIn
    from stepmill.spec.options import Seeding as Seeding
    from stepmill.spec.ray_options import RayOptions as RayOptions

_MODULE_OF = {
    "VectorEnv": "stepmill.frontends.gymnasium",
    "make_vec": "stepmill.frontends.gymnasium",
    "Rollout": "stepmill.frontends.rollout",
    "RolloutBatch": "stepmill.frontends.rollout",
    "get_include": "stepmill.kernels",
    "register_adapter": "stepmill.envs.registered",
    "kernel": "stepmill.kernels",
    "kernels": "stepmill.kernels",
    "testing": "stepmill.testing",
    "timers": "stepmill.timers",
    "TuneResult": "stepmill.observe.tune_result",
    "tune": "stepmill.observe.tune",
    "Pool": "stepmill.pool.pool",
    "Batch": "stepmill.spec.batch",
    "EnvSpec": "stepmill.spec.env",
    "AutoresetMode": "stepmill.spec.options",
    "Context": "stepmill.spec.options",
    "EnvState": "stepmill.spec.options",
    "OnFault": "stepmill.spec.options",
    "PoolOptions": "stepmill.spec.options",
    "RetryIn": "stepmill.spec.options",
    "RayOptions": "stepmill.spec.ray_options",
    "Seeding": "stepmill.spec.options",
    "BadOutput": "stepmill.spec.errors",
    "BusyEnvError": "stepmill.spec.errors",
    "ClosedPoolError": "stepmill.spec.errors",
    "EngineBug": "stepmill.spec.errors",
    "EnvError": "stepmill.spec.errors",
    "EnvTimeout": "stepmill.spec.errors",
    "LauncherDied": "stepmill.spec.errors",
    "MissingExtraError": "stepmill.spec.errors",
    "RecvTimeout": "stepmill.spec.errors",
    "StepmillError": "stepmill.spec.errors",
    "UsageError": "stepmill.spec.errors",
    "WorkerDied": "stepmill.spec.errors",
}

__all__ = [
    "AutoresetMode",
    "BadOutput",
    "Batch",
    "BusyEnvError",
    "ClosedPoolError",
    "Context",
    "EngineBug",
    "EnvError",
    "EnvSpec",
    "EnvState",
    "EnvTimeout",
    "LauncherDied",
    "MissingExtraError",
    "OnFault",
    "Pool",
    "PoolOptions",
    "RayOptions",
    "RecvTimeout",
    "RetryIn",
    "Rollout",
    "RolloutBatch",
    "Seeding",
    "StepmillError",
    "TuneResult",
    "UsageError",
    "VectorEnv",
    "WorkerDied",
    "__version__",
    "get_include",
    "kernel",
    "kernels",
    "make_vec",
    "register_adapter",
    "testing",
    "timers",
    "tune",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'stepmill' has no attribute {name!r}")
    home = import_module(module)
    value: object = home if module == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
