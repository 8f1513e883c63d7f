"""A pytest plugin: replaces DI-engine's managers with stepmill's, before its tests import them."""

from __future__ import annotations

from ding.envs import env_manager
from ding.envs.env_manager import base_env_manager, env_supervisor, subprocess_env_manager

from stepmill.frontends import di_engine

for _name, _homes in {
    "BaseEnvManager": (base_env_manager,),
    "BaseEnvManagerV2": (base_env_manager,),
    "AsyncSubprocessEnvManager": (subprocess_env_manager,),
    "SyncSubprocessEnvManager": (subprocess_env_manager,),
    "SubprocessEnvManagerV2": (subprocess_env_manager,),
    "EnvSupervisor": (env_supervisor,),
}.items():
    for _home in (*_homes, env_manager):
        setattr(_home, _name, getattr(di_engine, _name))
