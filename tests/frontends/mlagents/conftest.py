"""Managers of scripted Unity envs, closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepmill.frontends.mlagents import ManagerOptions, SubprocessEnvManager
from tests.harness.pools import keep_closed
from tests.harness.unity_envs import ScriptedBehaviors, ScriptedGroups

GENERATIONS = {"behaviors": ScriptedBehaviors, "groups": ScriptedGroups}


@pytest.fixture(params=list(GENERATIONS))
def script(request: pytest.FixtureRequest) -> Any:
    """A scripted env of either generation."""
    return GENERATIONS[request.param]


@pytest.fixture
def manager_of() -> Iterator[Callable[..., SubprocessEnvManager]]:
    """Build managers; further keywords are ManagerOptions. Workers are forked, which is fastest."""

    def build(factory: Any, n_env: int = 1, engine: Any = None, **options: Any) -> SubprocessEnvManager:
        return SubprocessEnvManager(factory, engine, n_env, options=ManagerOptions(**{"context": "fork", **options}))

    yield from keep_closed(build)


@pytest.fixture
def started_of(manager_of: Callable[..., SubprocessEnvManager]) -> Callable[..., SubprocessEnvManager]:
    """Build managers as `manager_of` does, and reset their envs."""

    def build(*arguments: Any, **options: Any) -> SubprocessEnvManager:
        manager = manager_of(*arguments, **options)
        manager.reset()
        return manager

    return build
