"""A pytest plugin: replaces TorchRL's ParallelEnv and MultiThreadedEnv with stepmill's envs, before its tests import them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torchrl.envs
import torchrl.testing
from torchrl.envs import set_gym_backend
from torchrl.envs.libs import envpool
from torchrl.testing import env_creators

from stepmill.frontends.torchrl import MultiThreadedEnv, MultiThreadedEnvWrapper, StepmillEnv

set_gym_backend("gymnasium").set()  # gym is looked for first, and is not here


class ParallelStepmillEnv(StepmillEnv):
    """Takes ParallelEnv's arguments. Its env functions return TorchRL's own envs.

    Workers are forked, as in TorchRL's own runs of these tests (`--mp_fork`): other workers import TorchRL, which takes longer
    on a busy machine than a test may take.
    """

    def __init__(self, num_workers: int, create_env_fn: Any, **keywords: Any) -> None:
        functions: Sequence[Callable[..., Any]] = (
            [create_env_fn] * num_workers if callable(create_env_fn) else list(create_env_fn)
        )
        super().__init__(functions, **{"mp_start_method": "fork", **keywords})


# Not in torchrl.envs.batched_envs, where the original refers to its own class.
for _home in (torchrl.envs, env_creators):
    _home.ParallelEnv = ParallelStepmillEnv
for _home in (torchrl.envs, torchrl.envs.libs, envpool, torchrl.testing, env_creators):
    _home.MultiThreadedEnv = MultiThreadedEnv
    _home.MultiThreadedEnvWrapper = MultiThreadedEnvWrapper
