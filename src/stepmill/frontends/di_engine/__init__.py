"""DI-engine's environment managers on top of `Pool`.

In a DI-engine installation, importing this package puts them into DI-engine's registry under their names: its
`create_env_manager` finds these then, and no config has to change. Without DI-engine they run Gymnasium's envs.
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
