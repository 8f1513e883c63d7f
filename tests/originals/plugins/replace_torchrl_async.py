"""A pytest plugin: replaces TorchRL's AsyncEnvPool with stepmill's asynchronous env, before its tests import it."""

from __future__ import annotations

from typing import Any

import torchrl.envs

from stepmill.frontends.torchrl import AsyncStepmillEnv

_BACKENDS = {"threading": {"backend": "thread"}, "multiprocessing": {"backend": "process", "context": "fork"}}


def make_async(env_makers: Any, *, backend: str = "threading", **keywords: Any) -> AsyncStepmillEnv:
    """Take TorchRL's names of backends, and fork workers."""
    return AsyncStepmillEnv(env_makers, **_BACKENDS[backend], **keywords)


# Protected names that TorchRL's cases use.
AsyncStepmillEnv._maybe_shutdown = AsyncStepmillEnv.close  # type: ignore[attr-defined]
AsyncStepmillEnv._env_idx_key = "env_index"  # type: ignore[attr-defined]
torchrl.envs.AsyncEnvPool = make_async
