"""Runs many reinforcement-learning environments at once.

    make_vec("CartPole-v1", num_envs=64)       a gymnasium.vector.VectorEnv of envs that Gymnasium knows
    VectorEnv([make_env] * 64)                 the same with your own envs
    Pool([make_env] * 64, batch_size=16)       returns envs in the order in which they are ready
    AsyncPool(make_env, num_envs=256)          envs for the tasks of an asyncio event loop
    PoolOptions                                all options; each is also a keyword of the four above. Six are records:
                                               Restarts, Resets, Start, Workers, Tuning, RayOptions
    tune("CartPole-v1", num_envs=64)           finds how to run an env on this machine
    testing.check_env(make_env)                checks that an env is deterministic and fits its spaces

`stepmill.frontends` replaces classes of other libraries, `stepmill.kernels` runs compiled envs, and `stepmill.torch` returns
tensors. All errors are subclasses of `StepmillError`, and their messages say what to do.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from stepmill._lazy_names import lazy_names
from stepmill._version import __version__

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"stepmill runs on Linux only, and this is {sys.platform}; use it in a Linux container or virtual machine."
    )

if getattr(find_spec("stepmill._native"), "origin", None) is None:  # only the folder of its sources
    raise ImportError(
        f"the C++ part of stepmill in {__path__[0]} is not built; run `pip install .` or `make build` in its repository"
    )

# The names are loaded on first use, because workers import this package too and must not load Gymnasium.
if TYPE_CHECKING:
    from stepmill import kernels as kernels
    from stepmill import testing as testing
    from stepmill import timers as timers
    from stepmill.aio.async_pool import AsyncPool as AsyncPool
    from stepmill.aio.lease import EnvLease as EnvLease
    from stepmill.envs.registered import register_adapter as register_adapter
    from stepmill.evaluation.evaluate import evaluate as evaluate
    from stepmill.evaluation.plan import EvaluateOptions as EvaluateOptions
    from stepmill.evaluation.result import Episode as Episode
    from stepmill.evaluation.result import Evaluation as Evaluation
    from stepmill.frontends.gymnasium import VectorEnv as VectorEnv
    from stepmill.frontends.gymnasium import install_vector_entry_points as install_vector_entry_points
    from stepmill.frontends.gymnasium import make_vec as make_vec
    from stepmill.frontends.rollout import Rollout as Rollout
    from stepmill.frontends.rollout import RolloutBatch as RolloutBatch
    from stepmill.kernels import get_include as get_include
    from stepmill.kernels import kernel as kernel
    from stepmill.observe.monitor import monitor as monitor
    from stepmill.observe.trace import trace as trace
    from stepmill.observe.tune import tune as tune
    from stepmill.observe.tune_result import TuneResult as TuneResult
    from stepmill.pool.pool import Pool as Pool
    from stepmill.pool.positions import SavedEnvs as SavedEnvs
    from stepmill.pool.stats import read_timers as read_timers
    from stepmill.saving import restore as restore
    from stepmill.saving import save as save
    from stepmill.simulators.maker import foreign as foreign
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
    from stepmill.spec.options import Resets as Resets
    from stepmill.spec.options import Restarts as Restarts
    from stepmill.spec.options import RetryIn as RetryIn
    from stepmill.spec.options import Seeding as Seeding
    from stepmill.spec.options import Start as Start
    from stepmill.spec.options import Tuning as Tuning
    from stepmill.spec.options import Workers as Workers
    from stepmill.spec.ray_options import RayOptions as RayOptions
    from stepmill.spec.received import EnvFault as EnvFault
    from stepmill.spec.received import Received as Received

__getattr__, __dir__, _names = lazy_names(__name__)
__all__ = [*_names, "__version__"]  # noqa: PLE0604 - made of the imports above
