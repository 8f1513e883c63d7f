"""Objects that no adapter knows."""

from __future__ import annotations

import pytest

from stepmill.envs import adapter_of
from stepmill.spec.errors import UsageError


def test_another_object_is_refused_with_the_classes_that_are_known():
    with pytest.raises(
        UsageError,
        match=r"returned a builtins.int, .*gymnasium.Env, .*mlagents_envs.BaseEnv, .*reasoning_gym; or register an adapter",
    ):
        adapter_of(3)
