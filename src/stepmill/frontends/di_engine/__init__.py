"""DI-engine's environment managers on top of `Pool`.

In a DI-engine installation, importing this package puts them into DI-engine's registry under their names: its
`create_env_manager` finds these then, and no config has to change. Without DI-engine they run Gymnasium's envs.

    manager        what all managers have in common
    base           `BaseEnvManager`: envs in the caller's thread
    processes      the managers with processes
    supervisor     `EnvSupervisor`
    supervised     the steps and resets of a supervisor's envs
    payloads       the commands and replies of an `EnvSupervisor`
    turns          what happens to an env between two actions
    states         the states of an env, and the moves between them
    desk           sends commands to the pool by env_id, and returns results one by one
    forms          timesteps with the classes, dtypes and shapes of each env
    trees          tree arrays of the V2 managers
    calls          attributes and methods of envs
    config         settings and defaults
    registry       managers by name, and DI-engine's own registry
    errors         errors that are also of DI-engine's classes
"""

from stepmill.frontends.di_engine.base import BaseEnvManager, BaseEnvManagerV2
from stepmill.frontends.di_engine.payloads import ChildType
from stepmill.frontends.di_engine.processes import (
    AsyncSubprocessEnvManager,
    GymVectorEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)
from stepmill.frontends.di_engine.registry import create_env_manager, get_env_manager_cls, register, register_if_there
from stepmill.frontends.di_engine.states import EnvState
from stepmill.frontends.di_engine.supervisor import EnvSupervisor

__all__ = [
    "AsyncSubprocessEnvManager",
    "BaseEnvManager",
    "BaseEnvManagerV2",
    "ChildType",
    "EnvState",
    "EnvSupervisor",
    "GymVectorEnvManager",
    "SubprocessEnvManagerV2",
    "SyncSubprocessEnvManager",
    "create_env_manager",
    "get_env_manager_cls",
    "register",
]

register_if_there()
