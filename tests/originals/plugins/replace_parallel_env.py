"""A pytest plugin: the env modules that PettingZoo's tests import make stepmill's parallel envs, each with its env in a worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from pettingzoo.utils.env import ParallelEnv

from stepmill import PoolOptions
from stepmill.frontends.pettingzoo import StepmillParallelEnv


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace `parallel_env` of the modules. PettingZoo makes a new module at each import, so the tests' own are replaced."""
    homes = {item.module for item in items if isinstance(item, pytest.Function)}
    for module in {value for home in homes for value in vars(home).values() if isinstance(value, ModuleType)}:
        if hasattr(module, "parallel_env"):
            module.parallel_env = _in_workers(module.parallel_env)


def _in_workers(original: Callable[..., ParallelEnv]) -> Callable[..., ParallelEnv]:
    def make(*args: Any, **kwargs: Any) -> ParallelEnv:
        return StepmillParallelEnv(partial(original, *args, **kwargs), options=PoolOptions(context="fork"))

    return make
