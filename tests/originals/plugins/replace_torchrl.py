"""A pytest plugin: replaces TorchRL's ParallelEnv and MultiThreadedEnv with stepmill's envs, before its tests import them."""

from __future__ import annotations

from typing import Any

import torchrl.envs
import torchrl.testing
from torchrl.envs import set_gym_backend
from torchrl.envs.libs import envpool
from torchrl.testing import env_creators

from stepmill.frontends.torchrl import MultiThreadedEnv, MultiThreadedEnvWrapper, ParallelEnv

set_gym_backend("gymnasium").set()  # gym is looked for first, and is not here


class ForkedParallelEnv(ParallelEnv):
    """Workers are forked, as in TorchRL's own runs of these tests (`--mp_fork`): other workers import TorchRL, which takes longer
    on a busy machine than a test may take."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"mp_start_method": "fork", **keywords})


# Not in torchrl.envs.batched_envs, where the original refers to its own class.
for _home in (torchrl.envs, env_creators):
    _home.ParallelEnv = ForkedParallelEnv
for _home in (torchrl.envs, torchrl.envs.libs, envpool, torchrl.testing, env_creators):
    _home.MultiThreadedEnv = MultiThreadedEnv
    _home.MultiThreadedEnvWrapper = MultiThreadedEnvWrapper
