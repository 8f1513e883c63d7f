"""Fixtures for tests of DI-engine's managers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, BaseEnvManager, SyncSubprocessEnvManager
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.envs import ding_envs
from tests.harness.pools import keep_closed

MakeManager = Callable[..., Any]


@pytest.fixture(params=[BaseEnvManager, AsyncSubprocessEnvManager, SyncSubprocessEnvManager])
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """Make managers, `make_manager(cls, env_fns, **cfg)`; they are closed at the end."""
    yield from keep_closed(lambda cls, env_fns, **cfg: cls(env_fns, cfg))


@pytest.fixture
def launched(make_manager: MakeManager) -> MakeManager:
    """Make and launch managers of some functions, or of so many `DingEnv`s."""

    def launch(cls: Any, envs: Any = 2, length: int = 3, *, gate: Gate | None = None, **cfg: Any) -> Any:
        env_fns = ding_envs(envs, length, gate=str(gate.path) if gate else "") if isinstance(envs, int) else envs
        manager = make_manager(cls, env_fns, **cfg)
        manager.launch()
        return manager

    return launch
