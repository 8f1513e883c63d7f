"""stepmill for actorcritic's users: `MultiEnv`, `SubprocessEnv` and `create_subprocess_envs`, in the place of its own."""

from stepmill.frontends.multi_env.multi import MultiEnv, StepApi
from stepmill.frontends.multi_env.remote import LifeCycleError, SubprocessEnv, create_subprocess_envs

__all__ = ["LifeCycleError", "MultiEnv", "StepApi", "SubprocessEnv", "create_subprocess_envs"]
