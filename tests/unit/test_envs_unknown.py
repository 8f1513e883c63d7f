"""Objects that no adapter knows."""

from __future__ import annotations

import pytest

from stepmill.envs import adapter_of
from stepmill.spec.errors import UsageError


class EnvBase:
    """Stands for TorchRL's base class of envs."""


EnvBase.__module__ = "torchrl.envs.common"


class GymEnv(EnvBase):
    """Stands for one of its envs."""


def test_an_env_of_torchrl_is_refused_with_what_to_return_instead():
    with pytest.raises(
        UsageError, match=r"not an env that stepmill supports.*gymnasium.make\(...\) in place of GymEnv"
    ):
        adapter_of(GymEnv())


def test_another_object_is_refused_with_the_classes_that_are_known():
    with pytest.raises(UsageError, match=r"returned a builtins.int, .*gymnasium.Env, .*mlagents_envs.BaseEnv$"):
        adapter_of(3)
