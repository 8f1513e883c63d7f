"""Fixtures for tests of DI-engine's managers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, BaseEnvManager, SyncSubprocessEnvManager
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.envs import ding_envs

MakeManager = Callable[..., Any]


@pytest.fixture(params=[BaseEnvManager, AsyncSubprocessEnvManager, SyncSubprocessEnvManager])
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """Make managers, `make_manager(cls, env_fns, **cfg)`; they are closed at the end."""
    made: list[Any] = []

    def make_one(cls: Any, env_fns: Any, **cfg: Any) -> Any:
        made.append(cls(env_fns, cfg))
        return made[-1]

    yield make_one
    for manager in made:
        manager.close()
    made.clear()


@pytest.fixture
def launched(make_manager: MakeManager) -> MakeManager:
    """Make and launch managers of some functions, or of so many `DingEnv`s."""

    def launch(cls: Any, envs: Any = 2, length: int = 3, *, gate: Gate | None = None, **cfg: Any) -> Any:
        env_fns = ding_envs(envs, length, gate=str(gate.path) if gate else "") if isinstance(envs, int) else envs
        manager = make_manager(cls, env_fns, **cfg)
        manager.launch()
        return manager

    return launch
