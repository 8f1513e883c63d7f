"""Programs that run with actorcritic's classes or with ours: an env, the original's module, envs that are closed.

The original comes from the checkout `actor-critic` (jrobine/actor-critic) in the folder $STEPMILL_ORIGINALS. It needs gym.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepmill.frontends import multi_env
from tests.originals import either

CHECKOUT = Path(os.environ.get("STEPMILL_ORIGINALS", "/nowhere"), "actor-critic")
HAS_ORIGINAL = CHECKOUT.is_dir() and importlib.util.find_spec("gym") is not None

MARKS = [
    pytest.mark.filterwarnings("ignore"),  # gym's
    pytest.mark.skipif(not HAS_ORIGINAL, reason="needs actorcritic's checkout and gym; make test-originals has both"),
]


class Walk:
    """Old gym's interface; the episode ends at step 3."""

    metadata: dict[str, Any] = {}
    reward_range = (-1.0, 1.0)
    spec = None
    observation_space = "observations"
    action_space = "actions"

    def __init__(self) -> None:
        self.episode = 0

    def reset(self, **kwargs: Any) -> Any:
        self.episode += 1
        self.t = 0
        return {"episode": self.episode, "t": 0, "kwargs": kwargs}

    def step(self, action: Any) -> Any:
        if action == "raise":
            raise RuntimeError("on purpose")
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.t += 1
        return {"episode": self.episode, "t": self.t, "action": action}, 1.0, self.t >= 3, {"t": self.t}

    def render(self, mode: str = "human") -> Any:
        return [mode, self.t]

    def close(self) -> None:
        pass


def load_original() -> Any:
    """Return the module actorcritic.multi_env; the package itself needs TensorFlow."""
    spec = importlib.util.spec_from_file_location("original_multi_env", CHECKOUT / "actorcritic" / "multi_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.get(spec.name)
    if module is None:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class Maker(either.Maker):
    """Makes envs of one side with `module.create_subprocess_envs`; ours in forked processes, as the original's. Closes them."""

    def __init__(self, whose: str) -> None:
        super().__init__(whose)
        self.module = multi_env if self.is_ours else load_original()

    def __call__(self, env_fns: Sequence[Any], **options: Any) -> list[Any]:
        if self.is_ours:
            options.setdefault("context", "fork")
        envs: list[Any] = self.module.create_subprocess_envs(env_fns, **options if self.is_ours else {})
        self.made += envs
        return envs

    def multi(self, env_fns: Sequence[Any], **options: Any) -> Any:
        """Return a MultiEnv of new envs."""
        return self.module.MultiEnv(self(env_fns, **options))

    def close(self) -> None:
        """Close the envs. A test may have closed some, which actorcritic's refuse."""
        for env in self.made:
            with contextlib.nullcontext() if self.is_ours else contextlib.suppress(ValueError):
                env.close()


def pid_of(env: Any) -> int:
    """Return the number of the process of an env."""
    if not isinstance(env, multi_env.SubprocessEnv):
        return int(env._process.pid)
    return int(env.pool_position[0].pool.stats().workers[env.pool_position[1]].pid)
