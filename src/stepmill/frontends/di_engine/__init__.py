"""DI-engine's environment managers on top of `Pool`.

Importing this package replaces the managers in DI-engine's registry, if DI-engine is installed: its `create_env_manager`
makes these, and no config has to change. Without DI-engine the managers run Gymnasium's envs.

    managers         the managers under DI-engine's names, and its registry
    manager          `Manager`, their base class: launch and close, resets, seeds
    env_pool         `PoolEnvManager`: EnvPool's envs
    env_lifecycle    `EnvState`, and its changes by replies, ends of episodes and retries
    env_calls        attributes and methods of envs
    pool_client      sends commands to the pool by env_id, and returns one reply per command
    timestep_codec   rebuilds timesteps with the classes, dtypes and shapes of each env
    trees            tree arrays of the V2 managers
    supervisor       `EnvSupervisor`, its requests and replies
    worker_functions  DI-engine's `worker_fn`, for code that starts its own processes
    config           settings and their defaults
    errors           errors that are also of DI-engine's classes
"""

from stepmill.frontends.di_engine.env_lifecycle import EnvState
from stepmill.frontends.di_engine.env_pool import PoolEnvManager
from stepmill.frontends.di_engine.managers import (
    AsyncSubprocessEnvManager,
    BaseEnvManager,
    BaseEnvManagerV2,
    GymVectorEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
    create_env_manager,
    get_env_manager_cls,
    register,
    register_if_there,
)
from stepmill.frontends.di_engine.supervisor import ChildType, EnvSupervisor
from stepmill.frontends.di_engine.worker_functions import is_abnormal_timestep, worker_fn, worker_fn_robust

__all__ = [
    "AsyncSubprocessEnvManager",
    "BaseEnvManager",
    "BaseEnvManagerV2",
    "ChildType",
    "EnvState",
    "EnvSupervisor",
    "GymVectorEnvManager",
    "PoolEnvManager",
    "SubprocessEnvManagerV2",
    "SyncSubprocessEnvManager",
    "create_env_manager",
    "get_env_manager_cls",
    "is_abnormal_timestep",
    "register",
    "worker_fn",
    "worker_fn_robust",
]

register_if_there()
