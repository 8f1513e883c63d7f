"""A pytest plugin: replaces TorchRL's SerialEnv with stepmill's envs on the serial backend, and what replace_torchrl replaces."""

from __future__ import annotations

from typing import Any

import torchrl.envs
from replace_torchrl import ForkedParallelEnv
from torchrl.testing import env_creators

from stepmill.frontends.torchrl import ParallelEnv


class SerialEnv(ParallelEnv):
    """Runs its envs in this process."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"backend": "serial", **keywords})


for _home in (torchrl.envs, env_creators):
    _home.SerialEnv = SerialEnv
assert ForkedParallelEnv
