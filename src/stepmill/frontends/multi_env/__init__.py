"""actorcritic's `MultiEnv`, `SubprocessEnv` and `create_subprocess_envs` on top of `Pool`.

multi         `MultiEnv`
remote        `SubprocessEnv`, `create_subprocess_envs`
shared_pool   the pool that runs the envs of several SubprocessEnvs
"""

from stepmill.frontends.multi_env.multi import MultiEnv, StepApi
from stepmill.frontends.multi_env.remote import LifeCycleError, SubprocessEnv, create_subprocess_envs

__all__ = ["LifeCycleError", "MultiEnv", "StepApi", "SubprocessEnv", "create_subprocess_envs"]
