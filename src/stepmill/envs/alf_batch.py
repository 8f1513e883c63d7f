"""Several ALF environments as one batched environment that steps them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stepmill.spec.errors import UsageError
from stepmill.spec.tree import map_nest


class BatchEnvironmentWrapper:
    """Makes one batched ALF environment of n environments: all arrays have a leading dimension n.

    Each env resets itself when its episode is over, as ALF environments do. `seed(s)` gives env i the seed s * n + i. All
    other attributes, such as the specs, `render` and `metadata`, are those of env 0.
    """

    batched = True
    is_tensor_based = False

    def __init__(self, envs: Sequence[Any]) -> None:
        """Wrap one or more envs, none of which is batched."""
        self.envs = list(envs)
        self._time_step: Any = None
        if not self.envs or any(getattr(env, "batched", False) for env in self.envs):
            raise UsageError("BatchEnvironmentWrapper needs one or more envs, none of them batched")
        first = self.envs[0]
        for name in ("action_spec", "time_step_spec", "env_info_spec"):
            if any(getattr(env, name)() != getattr(first, name)() for env in self.envs):
                raise UsageError(f"All environments must have the same {name.replace('action_spec', 'action spec')}.")

    @property
    def batch_size(self) -> int:
        """The number of envs."""
        return len(self.envs)

    def reset(self) -> Any:
        """Reset all envs; return a TimeStep of arrays [n, ...]."""
        self._time_step = stack([env.reset() for env in self.envs])
        return self._time_step

    def step(self, action: Any) -> Any:
        """Step all envs; return a TimeStep of arrays [n, ...]. Before the first `reset`, reset them instead, as in ALF."""
        if self._time_step is None:
            return self.reset()
        steps = [env.step(map_nest(lambda x, i=i: x[i], action)) for i, env in enumerate(self.envs)]
        self._time_step = stack(steps)
        return self._time_step

    def current_time_step(self) -> Any:
        """Return the newest TimeStep of `reset` or `step`, or None before the first one, as in ALF."""
        return self._time_step

    def sync_progress(self) -> None:
        """Do nothing, as in ALF, because the envs are in this process."""

    def seed(self, seed: int) -> None:
        """Seed the envs: env i gets the seed `seed` * n + i."""
        for i, env in enumerate(self.envs):
            env.seed(seed * len(self.envs) + i)

    def close(self) -> None:
        """Close all envs."""
        for env in self.envs:
            close = getattr(env, "close", None)
            if close is not None:
                close()

    def __getattr__(self, name: str) -> Any:
        if name == "envs":  # copy and pickle ask for attributes before `__init__` has run
            raise AttributeError(name)
        return getattr(self.envs[0], name)


def stack(time_steps: Sequence[Any]) -> Any:
    """Return one nest whose leaves are the stacked leaves of nests of equal structure."""
    return map_nest(lambda *leaves: np.stack(leaves), *time_steps)
