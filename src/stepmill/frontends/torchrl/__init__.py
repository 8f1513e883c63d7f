"""TorchRL's `EnvBase` on top of `Pool`.

    StepmillEnv              any envs, on any backend
    ParallelEnv              the same, with the arguments of TorchRL's class of that name, which it replaces
    AsyncStepmillEnv         the same, with asynchronous steps. It replaces AsyncEnvPool.
    MultiThreadedEnv         EnvPool's or Gymnasium's envs by name; replaces TorchRL's class of that name
    MultiThreadedEnvWrapper  an existing EnvPool pool, or stepmill.Pool

The names are loaded on first use, which raises `MissingExtraError` without TorchRL. The modules:

    env            `StepmillEnv`
    asynchronous   `AsyncStepmillEnv`
    threaded       `MultiThreadedEnv`, `MultiThreadedEnvWrapper`
    parallel       `ParallelEnv`
    engine         resets and steps of a pool, in NumPy; used by all of these
    parallel_arguments   keyword arguments of TorchRL's ParallelEnv
    specs          Gymnasium's spaces as TorchRL's specs
    views          `env[2:]`; `env.attr` and `env.method()` of all envs
    states         `state_dict` and `load_state_dict`
    env_state      the state of one env, read and written in its worker
    makers         env functions and their keyword arguments
    errors         errors that are also of the classes that TorchRL's users catch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepmill._lazy_names import lazy_names
from stepmill.spec.errors import MissingExtraError

if TYPE_CHECKING:
    from stepmill.frontends.torchrl.asynchronous import AsyncStepmillEnv as AsyncStepmillEnv
    from stepmill.frontends.torchrl.env import StepmillEnv as StepmillEnv
    from stepmill.frontends.torchrl.parallel import ParallelEnv as ParallelEnv
    from stepmill.frontends.torchrl.threaded import MultiThreadedEnv as MultiThreadedEnv
    from stepmill.frontends.torchrl.threaded import MultiThreadedEnvWrapper as MultiThreadedEnvWrapper

_load, __dir__, __all__ = lazy_names(__name__)


def __getattr__(name: str) -> object:
    """Load a public name, once."""
    try:
        return _load(name)
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing in ("torch", "torchrl", "tensordict"):
            raise MissingExtraError(module=missing, extra="torchrl") from exc
        raise
