"""DI-engine's environment managers on top of `Pool`.

Importing this package replaces the managers in DI-engine's registry, if DI-engine is installed: its `create_env_manager`
makes these, and no config has to change. Without DI-engine the managers run Gymnasium's envs.

    managers         the managers under DI-engine's names, and its registry
    manager          `Manager`, their base class: launch and close, resets, steps, seeds
    env_pool         `PoolEnvManager`: EnvPool's envs
    env_lifecycle    `EnvState`, and its changes by replies and retries, for managers and the supervisor
    env_calls        attributes and methods of envs
    pool_client      sends commands to the pool by env_id, returns one reply per command, and rebuilds timesteps with the classes,
                     dtypes and shapes of each env
    trees            tree arrays of the V2 managers
    supervisor       `EnvSupervisor`, its requests and replies
    worker_functions  DI-engine's `worker_fn`, for code that starts its own processes
    config           settings and their defaults
    errors           errors that are also of DI-engine's classes
"""

from typing import TYPE_CHECKING

from stepmill._lazy_names import lazy_names
from stepmill.frontends.di_engine.managers import register_if_there

if TYPE_CHECKING:
    from stepmill.frontends.di_engine.env_lifecycle import EnvState as EnvState
    from stepmill.frontends.di_engine.env_pool import PoolEnvManager as PoolEnvManager
    from stepmill.frontends.di_engine.managers import AsyncSubprocessEnvManager as AsyncSubprocessEnvManager
    from stepmill.frontends.di_engine.managers import BaseEnvManager as BaseEnvManager
    from stepmill.frontends.di_engine.managers import BaseEnvManagerV2 as BaseEnvManagerV2
    from stepmill.frontends.di_engine.managers import GymVectorEnvManager as GymVectorEnvManager
    from stepmill.frontends.di_engine.managers import SubprocessEnvManagerV2 as SubprocessEnvManagerV2
    from stepmill.frontends.di_engine.managers import SyncSubprocessEnvManager as SyncSubprocessEnvManager
    from stepmill.frontends.di_engine.managers import create_env_manager as create_env_manager
    from stepmill.frontends.di_engine.managers import get_env_manager_cls as get_env_manager_cls
    from stepmill.frontends.di_engine.managers import register as register
    from stepmill.frontends.di_engine.supervisor import ChildType as ChildType
    from stepmill.frontends.di_engine.supervisor import EnvSupervisor as EnvSupervisor
    from stepmill.frontends.di_engine.worker_functions import is_abnormal_timestep as is_abnormal_timestep
    from stepmill.frontends.di_engine.worker_functions import worker_fn as worker_fn
    from stepmill.frontends.di_engine.worker_functions import worker_fn_robust as worker_fn_robust

__getattr__, __dir__, __all__ = lazy_names(__name__)

register_if_there()
