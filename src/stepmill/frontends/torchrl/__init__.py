"""TorchRL's `EnvBase` on top of `Pool`.

    StepmillEnv              any envs, on any backend
    ParallelEnv              the same, with the arguments of TorchRL's class of that name, which it replaces
    AsyncStepmillEnv         the same, with asynchronous steps: replaces AsyncEnvPool
    MultiThreadedEnv         EnvPool's envs by name, or Gymnasium's: replaces TorchRL's class of that name
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

from importlib import import_module
from typing import TYPE_CHECKING

from stepmill.spec.errors import MissingExtraError

if TYPE_CHECKING:
    from stepmill.frontends.torchrl.asynchronous import AsyncStepmillEnv as AsyncStepmillEnv
    from stepmill.frontends.torchrl.env import StepmillEnv as StepmillEnv
    from stepmill.frontends.torchrl.parallel import ParallelEnv as ParallelEnv
    from stepmill.frontends.torchrl.threaded import MultiThreadedEnv as MultiThreadedEnv
    from stepmill.frontends.torchrl.threaded import MultiThreadedEnvWrapper as MultiThreadedEnvWrapper

_HOME_OF = {
    "AsyncStepmillEnv": "asynchronous",
    "MultiThreadedEnv": "threaded",
    "MultiThreadedEnvWrapper": "threaded",
    "ParallelEnv": "parallel",
    "StepmillEnv": "env",
}

__all__ = ["AsyncStepmillEnv", "MultiThreadedEnv", "MultiThreadedEnvWrapper", "ParallelEnv", "StepmillEnv"]


def __getattr__(name: str) -> object:
    """Load a public name, once."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'stepmill.frontends.torchrl' has no attribute {name!r}")
    try:
        module = import_module(f"stepmill.frontends.torchrl.{home}")
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if missing in ("torch", "torchrl", "tensordict"):
            raise MissingExtraError(module=missing, extra="torchrl") from exc
        raise
    value: object = getattr(module, name)
    globals()[name] = value
    return value
